//! The vector operations of the matrix kernels on x86-64.

use std::arch::x86_64::*;

use super::lanes::{F64_AS_F32, Job, Lanes};
use crate::host::Simd;

/// An intrinsic in a method of [`Avx2`] or [`Avx512`].
macro_rules! have {
    ($intrinsic:expr) => {
        // SAFETY: the receiver's `new` saw that the machine has the instructions; loads and stores go through a slice
        // of the vector's length.
        unsafe { $intrinsic }
    };
}

/// 8 lanes. Only [`Avx2::new`] makes one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn new() -> Option<Self> {
        Simd::Avx2.available().then_some(Avx2(()))
    }

    #[target_feature(enable = "avx2,fma")]
    fn enter(self, job: impl Job) {
        job.run(self);
    }
}

impl Lanes for Avx2 {
    const N: usize = 8;
    const FUSED_ROWS: usize = 6;
    const UNIT_ROWS: usize = 2;
    type F = __m256;
    type I = __m256i;
    type E = __m256i;

    fn vectorize(self, job: impl Job) {
        have!(self.enter(job))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        have!(_mm256_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m256 {
        have!(_mm256_loadu_ps(from[..8].as_ptr()))
    }

    #[inline(always)]
    fn store(self, x: __m256, to: &mut [f32]) {
        have!(_mm256_storeu_ps(to[..8].as_mut_ptr(), x))
    }

    #[inline(always)]
    fn mul(self, x: __m256, y: __m256) -> __m256 {
        have!(_mm256_mul_ps(x, y))
    }

    #[inline(always)]
    fn fma(self, x: __m256, y: __m256, z: __m256) -> __m256 {
        have!(_mm256_fmadd_ps(x, y, z))
    }

    #[inline(always)]
    fn keep(self, x: __m256, mask: i32) -> __m256 {
        have!(_mm256_and_ps(x, _mm256_castsi256_ps(_mm256_set1_epi32(mask))))
    }

    #[inline(always)]
    fn truncate(self, x: __m256) -> __m256i {
        have!(_mm256_cvttps_epi32(x))
    }

    /// Through f64, as no conversion here rounds toward zero by itself.
    #[inline(always)]
    fn to_float(self, x: __m256i) -> __m256 {
        let half = |x: __m128i| {
            let mask = have!(_mm256_castsi256_pd(_mm256_set1_epi64x(F64_AS_F32.cast_signed())));
            have!(_mm256_cvtpd_ps(_mm256_and_pd(_mm256_cvtepi32_pd(x), mask)))
        };
        let low = have!(_mm256_castsi256_si128(x));
        let high = have!(_mm256_extracti128_si256::<1>(x));
        have!(_mm256_set_m128(half(high), half(low)))
    }

    #[inline(always)]
    fn field(self, x: __m256) -> __m256i {
        have!(_mm256_and_si256(_mm256_srli_epi32::<23>(_mm256_castps_si256(x)), _mm256_set1_epi32(0xFF)))
    }

    #[inline(always)]
    fn power(self, x: __m256i) -> __m256 {
        have!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(x, _mm256_set1_epi32(127)))))
    }

    #[inline(always)]
    fn where_zero(self, x: __m256, then: __m256i, otherwise: __m256i) -> __m256i {
        let zero = have!(_mm256_castps_si256(_mm256_cmp_ps::<_CMP_EQ_OQ>(x, _mm256_setzero_ps())));
        have!(_mm256_blendv_epi8(otherwise, then, zero))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m256i {
        have!(_mm256_set1_epi32(x))
    }

    #[inline(always)]
    fn add(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_add_epi32(x, y))
    }

    #[inline(always)]
    fn sub(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_sub_epi32(x, y))
    }

    #[inline(always)]
    fn max(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_max_epi32(x, y))
    }

    #[inline(always)]
    fn and(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_and_si256(x, y))
    }

    #[inline(always)]
    fn and_not(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_andnot_si256(y, x))
    }

    #[inline(always)]
    fn or(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_or_si256(x, y))
    }

    #[inline(always)]
    fn xor(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_xor_si256(x, y))
    }

    #[inline(always)]
    fn signs(self, x: __m256i) -> u32 {
        have!(_mm256_movemask_ps(_mm256_castsi256_ps(x))).cast_unsigned()
    }

    #[inline(always)]
    fn splat_e(self, pair: u32) -> __m256i {
        have!(_mm256_set1_epi32(pair.cast_signed()))
    }

    #[inline(always)]
    fn load_e(self, from: &[i16]) -> __m256i {
        have!(_mm256_loadu_si256(from[..16].as_ptr().cast()))
    }

    #[inline(always)]
    fn add_e(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_adds_epi16(x, y))
    }

    #[inline(always)]
    fn max_e(self, x: __m256i, y: __m256i) -> __m256i {
        have!(_mm256_max_epi16(x, y))
    }

    #[inline(always)]
    fn widen(self, x: __m256i) -> [__m256i; 2] {
        have!([
            _mm256_cvtepi16_epi32(_mm256_castsi256_si128(x)),
            _mm256_cvtepi16_epi32(_mm256_extracti128_si256::<1>(x)),
        ])
    }
}

/// 16 lanes. Only [`Avx512::new`] makes one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Avx512(());

impl Avx512 {
    pub(super) fn new() -> Option<Self> {
        Simd::Avx512.available().then_some(Avx512(()))
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
    fn enter(self, job: impl Job) {
        job.run(self);
    }
}

impl Lanes for Avx512 {
    const N: usize = 16;
    const FUSED_ROWS: usize = 8;
    const UNIT_ROWS: usize = 4;
    type F = __m512;
    type I = __m512i;
    type E = __m512i;

    fn vectorize(self, job: impl Job) {
        have!(self.enter(job))
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        have!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> __m512 {
        have!(_mm512_loadu_ps(from[..16].as_ptr()))
    }

    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32]) {
        have!(_mm512_storeu_ps(to[..16].as_mut_ptr(), x))
    }

    #[inline(always)]
    fn mul(self, x: __m512, y: __m512) -> __m512 {
        have!(_mm512_mul_ps(x, y))
    }

    #[inline(always)]
    fn fma(self, x: __m512, y: __m512, z: __m512) -> __m512 {
        have!(_mm512_fmadd_ps(x, y, z))
    }

    #[inline(always)]
    fn keep(self, x: __m512, mask: i32) -> __m512 {
        have!(_mm512_and_ps(x, _mm512_castsi512_ps(_mm512_set1_epi32(mask))))
    }

    #[inline(always)]
    fn truncate(self, x: __m512) -> __m512i {
        have!(_mm512_cvttps_epi32(x))
    }

    #[inline(always)]
    fn to_float(self, x: __m512i) -> __m512 {
        have!(_mm512_cvt_roundepi32_ps::<{ _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC }>(x))
    }

    #[inline(always)]
    fn field(self, x: __m512) -> __m512i {
        have!(_mm512_and_si512(_mm512_srli_epi32::<23>(_mm512_castps_si512(x)), _mm512_set1_epi32(0xFF)))
    }

    #[inline(always)]
    fn power(self, x: __m512i) -> __m512 {
        have!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(x, _mm512_set1_epi32(127)))))
    }

    #[inline(always)]
    fn where_zero(self, x: __m512, then: __m512i, otherwise: __m512i) -> __m512i {
        let zero = have!(_mm512_cmp_ps_mask::<_CMP_EQ_OQ>(x, _mm512_setzero_ps()));
        have!(_mm512_mask_blend_epi32(zero, otherwise, then))
    }

    #[inline(always)]
    fn splat_i(self, x: i32) -> __m512i {
        have!(_mm512_set1_epi32(x))
    }

    #[inline(always)]
    fn add(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_add_epi32(x, y))
    }

    #[inline(always)]
    fn sub(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_sub_epi32(x, y))
    }

    #[inline(always)]
    fn max(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_max_epi32(x, y))
    }

    #[inline(always)]
    fn and(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_and_si512(x, y))
    }

    #[inline(always)]
    fn and_not(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_andnot_si512(y, x))
    }

    #[inline(always)]
    fn or(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_or_si512(x, y))
    }

    #[inline(always)]
    fn xor(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_xor_si512(x, y))
    }

    #[inline(always)]
    fn signs(self, x: __m512i) -> u32 {
        have!(_mm512_movepi32_mask(x)).into()
    }

    #[inline(always)]
    fn splat_e(self, pair: u32) -> __m512i {
        have!(_mm512_set1_epi32(pair.cast_signed()))
    }

    #[inline(always)]
    fn load_e(self, from: &[i16]) -> __m512i {
        have!(_mm512_loadu_si512(from[..32].as_ptr().cast()))
    }

    #[inline(always)]
    fn add_e(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_adds_epi16(x, y))
    }

    #[inline(always)]
    fn max_e(self, x: __m512i, y: __m512i) -> __m512i {
        have!(_mm512_max_epi16(x, y))
    }

    #[inline(always)]
    fn widen(self, x: __m512i) -> [__m512i; 2] {
        have!([
            _mm512_cvtepi16_epi32(_mm512_castsi512_si256(x)),
            _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64::<1>(x)),
        ])
    }
}
