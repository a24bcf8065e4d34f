//! Tiles with the bits of a matrix unit. NUMERICS.md, "Matrix products".
//!
//! A product of two bf16 (or e4m3) values is exact in f32, and so is its multiple by a power of two. Hence a term on
//! the step's grid is `truncate(a * b * 2^(fraction_bits - largest))`, and the sum of 16 (or 32) of them fits an i32.
//! The largest exponent comes first, from sums of exponents in 16-bit lanes, because a product's exponent is the sum
//! of its factors' exponents whether or not the significands carry.
//!
//! A step with a NaN, an infinity, a result near the ends of the exponent range, or an accumulator that lifts the sum
//! past an i32 is left to the integers of [`crate::numerics::mma`].

use super::blocks::{Kernel, Left, Right};
use super::lanes::Lanes;
use crate::numerics::mma::Tensorcore;

/// A largest exponent below this one means that every product is zero: see [`Element`](super::element::Element).
const NONE: i32 = -5_000;
/// The exponents for which every intermediate value is a normal f32 or is truncated to zero either way: a product that f32
/// cannot hold (below 2^-134) lies under the grid, and so does a subnormal accumulator.
const LEAST: i32 = -100;
/// At most 32 products below 2^(largest + 2) and the accumulator stay below 2^(largest + 8): no f32 overflows.
const GREATEST: i32 = 118;

/// A unit with `STEP` products in a step, truncated to `FRACTION` bits below the largest and to `RESULT` in the end.
#[derive(Clone, Copy, Debug)]
pub(super) struct MatrixUnit<const STEP: usize, const FRACTION: i32, const RESULT: i32>;

impl<const STEP: usize, const FRACTION: i32, const RESULT: i32> Kernel for MatrixUnit<STEP, FRACTION, RESULT> {
    const STEP: usize = STEP;
    const UNIT: Option<Tensorcore> = Some(Tensorcore { step: STEP, fraction_bits: FRACTION, result_bits: RESULT });

    fn rows<V: Lanes>() -> usize {
        V::UNIT_ROWS
    }

    #[inline(always)]
    fn tile<V: Lanes, const R: usize>(
        self,
        lanes: V,
        left: Left<'_>,
        right: Right<'_>,
        c: &mut [f32],
        exact: &dyn Fn(usize, usize, usize, f32) -> f32,
    ) {
        let width = 2 * V::N;
        let lefts =
            left.values.as_chunks::<R>().0.chunks_exact(STEP).zip(left.exponents.as_chunks::<R>().0.chunks_exact(STEP));
        let rights = right.values.chunks_exact(STEP * width).zip(right.exponents.chunks_exact(STEP * width));
        for (step, ((a, ea), (b, eb))) in lefts.zip(rights).enumerate() {
            let mut largest = [lanes.splat_e(0x8000_8000); R];
            for (ea, eb) in ea.iter().zip(eb.chunks_exact(width)) {
                let eb = lanes.load_e(eb);
                for (largest, &ea) in largest.iter_mut().zip(ea) {
                    *largest = lanes.max_e(*largest, lanes.add_e(lanes.splat_e(ea), eb));
                }
            }

            let zero = lanes.splat_i(0);
            let mut exponent = [[zero; 2]; R];
            let mut scale = [[lanes.splat(0.0); 2]; R];
            for r in 0..R {
                let products = lanes.widen(largest[r]);
                for h in 0..2 {
                    let acc = lanes.load(&c[r * width + h * V::N..]);
                    let own = lanes.sub(lanes.field(acc), lanes.splat_i(127));
                    let own = lanes.where_zero(acc, lanes.splat_i(2 * NONE), own);
                    exponent[r][h] = lanes.max(products[h], own);
                    let bounded = lanes.max(exponent[r][h], lanes.splat_i(LEAST));
                    scale[r][h] = lanes.power(lanes.sub(lanes.splat_i(FRACTION), bounded));
                }
            }

            let mut sum = [[zero; 2]; R];
            for (a, b) in a.iter().zip(b.chunks_exact(width)) {
                let b = [lanes.load(b), lanes.load(&b[V::N..])];
                for r in 0..R {
                    let a = lanes.splat(a[r]);
                    for h in 0..2 {
                        let term = lanes.truncate(lanes.mul(lanes.mul(a, b[h]), scale[r][h]));
                        sum[r][h] = lanes.add(sum[r][h], term);
                    }
                }
            }

            for r in 0..R {
                for h in 0..2 {
                    let at = r * width + h * V::N;
                    let c = &mut c[at..at + V::N];
                    let (products, exponent) = (sum[r][h], exponent[r][h]);
                    let own = lanes.truncate(lanes.mul(lanes.load(c), scale[r][h]));
                    let total = lanes.add(products, own);
                    let bounded = lanes.max(exponent, lanes.splat_i(LEAST));
                    let unit = lanes.power(lanes.sub(bounded, lanes.splat_i(FRACTION)));
                    let result = lanes.mul(lanes.to_float(total), unit);
                    let result = if RESULT < 23 { lanes.keep(result, -1 << (23 - RESULT)) } else { result };

                    // Negative where the exponent is out of bounds, or where the last addition wrapped around.
                    let low = lanes
                        .and_not(lanes.sub(exponent, lanes.splat_i(LEAST)), lanes.sub(exponent, lanes.splat_i(NONE)));
                    let high = lanes.sub(lanes.splat_i(GREATEST), exponent);
                    let wrapped = lanes.and(lanes.xor(products, total), lanes.xor(own, total));
                    let mut rest = lanes.signs(lanes.or(lanes.or(low, high), wrapped));
                    if rest == 0 {
                        lanes.store(result, c);
                        continue;
                    }
                    let mut before = [0.0; 16];
                    before[..V::N].copy_from_slice(c);
                    lanes.store(result, c);
                    while rest != 0 {
                        let lane = rest.trailing_zeros() as usize;
                        c[lane] = exact(r, h * V::N + lane, step, before[lane]);
                        rest &= rest - 1;
                    }
                }
            }
        }
    }
}
