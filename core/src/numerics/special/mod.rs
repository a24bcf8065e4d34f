//! ex2 and rcp as the special-function unit of an H200 computes them: quadratic interpolation over the fraction, in
//! integers. NUMERICS.md, "ex2 and rcp".
//!
//! Per segment of the fraction f there are three coefficients; with x the bits of f below those that name the segment,
//! the last places of the result are `(8192 c0 + constant + c1 x + c2 S(x)) >> 15`. S is the square of x as an array of
//! partial products of which only those above a column are there, see `square`.

mod ex2;
mod rcp;

pub use ex2::ex2;
pub use rcp::rcp;

const FRACTION: i32 = 0x007F_FFFF;
/// What both functions return for a NaN.
const NAN: f32 = f32::from_bits(0x7FFF_FFFF);

/// c0, c1 and c2 of each segment.
type Coefficients<const SEGMENTS: usize> = [(i32, i32, i32); SEGMENTS];

/// The coefficients in two words a segment, so that a vector of them takes two gathers: c0; and c1 less its nearest
/// multiple of 2^15, `SLOPE`, above c2.
#[derive(Debug)]
struct Interpolator<const SEGMENTS: usize, const SLOPE: i32> {
    first: [i32; SEGMENTS],
    second: [i32; SEGMENTS],
    constant: i32,
}

impl<const SEGMENTS: usize, const SLOPE: i32> Interpolator<SEGMENTS, SLOPE> {
    const fn new(coefficients: &Coefficients<SEGMENTS>, constant: i32) -> Self {
        let (mut first, mut second, mut i) = ([0; SEGMENTS], [0; SEGMENTS], 0);
        while i < SEGMENTS {
            let (c0, c1, c2) = coefficients[i];
            first[i] = c0;
            second[i] = (c1 - SLOPE * (1 << 15)) << 10 | c2;
            i += 1;
        }
        Interpolator { first, second, constant }
    }

    /// The last places of the result for a fraction of 23 bits whose low `LOW` lie within a segment.
    ///
    /// c0 and c1 x are split at 2^15, so that all fits into 32 bits: what has the weight 2^15 needs no shift.
    #[inline(always)]
    const fn at<const LOW: i32>(&self, fraction: i32) -> i32 {
        let segment = (fraction >> LOW) as usize % SEGMENTS;
        let (first, second) = (self.first[segment], self.second[segment]);
        let x = fraction & ((1 << LOW) - 1);
        let (slope, curvature) = (second >> 10, second & 0x3FF);
        let square = square(x >> (LOW - 8), (x >> (LOW - 15)) & 0x7F);
        let below = ((first & 3) << 13) + self.constant + slope * x + curvature * square;
        (first >> 2) + SLOPE * x + (below >> 15)
    }
}

/// The truncated square of a number whose upper 8 bits are `high` and whose next 7 are `low`; what follows is in none of
/// its terms.
///
/// The square of bits b_i is the sum of b_i 2^(2i) and, over i < j, of b_i b_j 2^(i + j + 1). ex2 keeps the terms from
/// 2^19 on of a number of 17 bits, rcp those from 2^17 on of one of 16. Either way these are: the terms among the upper 8
/// bits, all but the square of their last; and of those that a lower bit makes with the upper 8, as many as there are
/// places between it and the 8th bit below them.
#[inline(always)]
const fn square(high: i32, low: i32) -> i32 {
    let mut sum = (high * high) >> 1;
    let mut place = 1;
    while place <= 7 {
        // All ones where the bit is set.
        let mask = -((low >> (7 - place)) & 1);
        sum += (high >> place) & mask;
        place += 1;
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The square by its definition: the terms from 2^column on, over 2^column.
    fn defined(x: u64, bits: u32, column: u32) -> u64 {
        let bit = |i: u32| x >> i & 1;
        let squares = (0..bits).filter(|i| 2 * i >= column).map(|i| bit(i) << (2 * i));
        let pairs = (0..bits).flat_map(|j| (0..j).map(move |i| (i, j))).filter(|(i, j)| i + j + 1 >= column);
        let products = pairs.map(|(i, j)| (bit(i) * bit(j)) << (i + j + 1));
        (squares.sum::<u64>() + products.sum::<u64>()) >> column
    }

    #[test]
    fn the_square_is_its_definition() {
        for x in 0..1 << 17 {
            let of = |low: i32| i64::from(square(x >> (low - 8), (x >> (low - 15)) & 0x7F));
            assert_eq!(of(17), i64::try_from(defined(u64::try_from(x).unwrap(), 17, 19)).unwrap(), "{x:017b}");
            if x < 1 << 16 {
                assert_eq!(of(16), i64::try_from(defined(u64::try_from(x).unwrap(), 16, 17)).unwrap(), "{x:016b}");
            }
        }
    }
}
