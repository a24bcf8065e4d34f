//! The vector operations of the matrix kernels, and their plain version.

use std::array;

/// Code that is compiled once for each level of vector instructions.
pub(super) trait Job {
    /// Must be `#[inline(always)]`, as all it calls, to be compiled for the instructions of `V`.
    fn run<V: Lanes>(self, lanes: V);
}

/// `N` f32 lanes and what belongs to them. Holding a value proves that the machine has the instructions.
pub(super) trait Lanes: Copy {
    /// Lanes of a vector.
    const N: usize;
    /// Rows of a tile of [`super::fused::Fused`], two vectors wide: what the registers hold.
    const FUSED_ROWS: usize;
    /// Rows of a tile of [`super::matrix_unit::MatrixUnit`].
    const UNIT_ROWS: usize;
    /// N f32.
    type F: Copy;
    /// N i32.
    type I: Copy;
    /// 2 N i16.
    type E: Copy;

    /// Runs `job` with the instructions switched on.
    fn vectorize(self, job: impl Job);

    fn splat(self, x: f32) -> Self::F;
    fn load(self, from: &[f32]) -> Self::F;
    fn store(self, x: Self::F, to: &mut [f32]);
    fn mul(self, x: Self::F, y: Self::F) -> Self::F;
    /// `x * y + z`, rounded once.
    fn fma(self, x: Self::F, y: Self::F, z: Self::F) -> Self::F;
    /// Clears the bits that `mask` lacks.
    fn keep(self, x: Self::F, mask: i32) -> Self::F;
    /// To integers, truncated toward zero; any integer where the value does not fit.
    fn truncate(self, x: Self::F) -> Self::I;
    /// To f32, truncated toward zero.
    fn to_float(self, x: Self::I) -> Self::F;
    /// The exponent fields.
    fn field(self, x: Self::F) -> Self::I;
    /// `2^x` for x in -126..=127; any value otherwise.
    fn power(self, x: Self::I) -> Self::F;
    /// `then` where x is a zero, else `otherwise`.
    fn where_zero(self, x: Self::F, then: Self::I, otherwise: Self::I) -> Self::I;

    fn splat_i(self, x: i32) -> Self::I;
    fn add(self, x: Self::I, y: Self::I) -> Self::I;
    fn sub(self, x: Self::I, y: Self::I) -> Self::I;
    fn max(self, x: Self::I, y: Self::I) -> Self::I;
    fn and(self, x: Self::I, y: Self::I) -> Self::I;
    fn and_not(self, x: Self::I, y: Self::I) -> Self::I;
    fn or(self, x: Self::I, y: Self::I) -> Self::I;
    fn xor(self, x: Self::I, y: Self::I) -> Self::I;
    /// Bit i is the sign of lane i.
    fn signs(self, x: Self::I) -> u32;

    /// Two equal i16 in every 32 bits.
    fn splat_e(self, pair: u32) -> Self::E;
    fn load_e(self, from: &[i16]) -> Self::E;
    /// Saturating.
    fn add_e(self, x: Self::E, y: Self::E) -> Self::E;
    fn max_e(self, x: Self::E, y: Self::E) -> Self::E;
    /// The lower and the upper lanes.
    fn widen(self, x: Self::E) -> [Self::I; 2];
}

/// Arrays, which the compiler turns into whatever the target has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plain;

impl Lanes for Plain {
    const N: usize = 8;
    const FUSED_ROWS: usize = 4;
    const UNIT_ROWS: usize = 2;
    type F = [f32; 8];
    type I = [i32; 8];
    type E = [i16; 16];

    fn vectorize(self, job: impl Job) {
        job.run(self);
    }

    #[inline(always)]
    fn splat(self, x: f32) -> [f32; 8] {
        [x; 8]
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> [f32; 8] {
        array::from_fn(|i| from[i])
    }

    #[inline(always)]
    fn store(self, x: [f32; 8], to: &mut [f32]) {
        to[..8].copy_from_slice(&x);
    }

    #[inline(always)]
    fn mul(self, x: [f32; 8], y: [f32; 8]) -> [f32; 8] {
        array::from_fn(|i| x[i] * y[i])
    }

    #[inline(always)]
    fn fma(self, x: [f32; 8], y: [f32; 8], z: [f32; 8]) -> [f32; 8] {
        array::from_fn(|i| x[i].mul_add(y[i], z[i]))
    }

    #[inline(always)]
    fn keep(self, x: [f32; 8], mask: i32) -> [f32; 8] {
        x.map(|x| f32::from_bits(x.to_bits() & mask.cast_unsigned()))
    }

    #[inline(always)]
    fn truncate(self, x: [f32; 8]) -> [i32; 8] {
        #[expect(clippy::cast_possible_truncation, reason = "the cut is meant")]
        x.map(|x| x as i32)
    }

    #[inline(always)]
    fn to_float(self, x: [i32; 8]) -> [f32; 8] {
        #[expect(clippy::cast_possible_truncation, reason = "exact once the low bits are gone")]
        x.map(|x| f64::from_bits(f64::from(x).to_bits() & F64_AS_F32) as f32)
    }

    #[inline(always)]
    fn field(self, x: [f32; 8]) -> [i32; 8] {
        x.map(|x| (x.to_bits() >> 23 & 0xFF).cast_signed())
    }

    #[inline(always)]
    fn power(self, x: [i32; 8]) -> [f32; 8] {
        x.map(|x| f32::from_bits((x.wrapping_add(127) << 23).cast_unsigned()))
    }

    #[inline(always)]
    fn where_zero(self, x: [f32; 8], then: [i32; 8], otherwise: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| if x[i] == 0.0 { then[i] } else { otherwise[i] })
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> [i32; 8] {
        [x; 8]
    }

    #[inline(always)]
    fn add(self, x: [i32; 8], y: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| x[i].wrapping_add(y[i]))
    }

    #[inline(always)]
    fn sub(self, x: [i32; 8], y: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| x[i].wrapping_sub(y[i]))
    }

    #[inline(always)]
    fn max(self, x: [i32; 8], y: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| x[i].max(y[i]))
    }

    #[inline(always)]
    fn and(self, x: [i32; 8], y: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| x[i] & y[i])
    }

    #[inline(always)]
    fn and_not(self, x: [i32; 8], y: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| x[i] & !y[i])
    }

    #[inline(always)]
    fn or(self, x: [i32; 8], y: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| x[i] | y[i])
    }

    #[inline(always)]
    fn xor(self, x: [i32; 8], y: [i32; 8]) -> [i32; 8] {
        array::from_fn(|i| x[i] ^ y[i])
    }

    #[inline(always)]
    fn signs(self, x: [i32; 8]) -> u32 {
        (0..8).fold(0, |mask, i| mask | u32::from(x[i] < 0) << i)
    }

    #[inline(always)]
    fn splat_e(self, pair: u32) -> [i16; 16] {
        #[expect(clippy::cast_possible_truncation, reason = "both halves are equal")]
        [pair as i16; 16]
    }

    #[inline(always)]
    fn load_e(self, from: &[i16]) -> [i16; 16] {
        array::from_fn(|i| from[i])
    }

    #[inline(always)]
    fn add_e(self, x: [i16; 16], y: [i16; 16]) -> [i16; 16] {
        array::from_fn(|i| x[i].saturating_add(y[i]))
    }

    #[inline(always)]
    fn max_e(self, x: [i16; 16], y: [i16; 16]) -> [i16; 16] {
        array::from_fn(|i| x[i].max(y[i]))
    }

    #[inline(always)]
    fn widen(self, x: [i16; 16]) -> [[i32; 8]; 2] {
        [array::from_fn(|i| x[i].into()), array::from_fn(|i| x[i + 8].into())]
    }
}

/// The bits of an f64 that an f32 also has.
pub(super) const F64_AS_F32: u64 = !0 << 29;
