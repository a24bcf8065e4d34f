//! Vector instructions chosen at run time. Every level gives the same bits.

/// A level of vector instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Simd {
    /// What the compiler's baseline offers.
    Plain,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
}

impl Simd {
    /// All levels, from the simplest on.
    pub const ALL: [Simd; 3] = [Simd::Plain, Simd::Avx2, Simd::Avx512];

    /// Whether this machine has it.
    pub fn available(self) -> bool {
        #[cfg(target_arch = "x86_64")]
        {
            match self {
                Simd::Plain => true,
                Simd::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
                Simd::Avx512 => {
                    is_x86_feature_detected!("avx512f")
                        && is_x86_feature_detected!("avx512bw")
                        && is_x86_feature_detected!("avx512dq")
                        && is_x86_feature_detected!("avx512vl")
                        && Simd::Avx2.available()
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            self == Simd::Plain
        }
    }

    /// The best level of this machine.
    pub fn best() -> Simd {
        Simd::ALL.into_iter().rev().find(|s| s.available()).unwrap_or(Simd::Plain)
    }
}

/// Calls `body` compiled for a level of vector instructions, which [`Host::new`](super::Host::new) found available.
///
/// ```text
/// simd::with(simd, #[inline(always)] || {
///     for x in row.iter_mut() {
///         *x = math::exp(*x);
///     }
/// });
/// ```
///
/// The closure needs its `#[inline(always)]`, and so does every function it calls, for the loop to be compiled with
/// those instructions. Call it inside the work that one thread does, not around a parallel loop: what another thread
/// runs is compiled elsewhere. The bits are the same at every level, since the compiler neither reorders nor fuses
/// float operations and `mul_add` is the exact fused operation everywhere.
#[inline(always)]
pub(super) fn with<R>(simd: Simd, body: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        // What was found is remembered, so this is a few loads.
        assert!(simd.available(), "this machine has no {simd:?} instructions");
        match simd {
            Simd::Plain => body(),
            // SAFETY: they are available.
            Simd::Avx2 => unsafe { avx2(body) },
            // SAFETY: as above.
            Simd::Avx512 => unsafe { avx512(body) },
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        let _ = simd;
        body()
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn avx2<R>(body: impl FnOnce() -> R) -> R {
    body()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
fn avx512<R>(body: impl FnOnce() -> R) -> R {
    body()
}

#[cfg(test)]
mod tests {
    use super::{Simd, with};
    use crate::numerics::{bf16, e4m3, math};

    /// Loops of the kind that the levels compile differently, over every bf16 value.
    fn loops(simd: Simd) -> [Vec<u32>; 4] {
        let x: Vec<f32> = (0..=u16::MAX).map(bf16::to_f32).collect();
        with(
            simd,
            #[inline(always)]
            || {
                [
                    x.iter().map(|&x| math::exp(x).to_bits()).collect(),
                    x.iter().map(|&x| math::log(x).to_bits()).collect(),
                    x.iter().map(|&x| math::silu(x).to_bits()).collect(),
                    x.iter().map(|&x| u32::from(e4m3::from_f32(x))).collect(),
                ]
            },
        )
    }

    /// NaNs are one value, whatever their bits.
    fn one_nan(results: [Vec<u32>; 4]) -> [Vec<u32>; 4] {
        let canonical = |bits: u32| if f32::from_bits(bits).is_nan() { f32::NAN.to_bits() } else { bits };
        results.map(|r| r.into_iter().map(canonical).collect())
    }

    #[test]
    fn levels_give_the_same_bits() {
        let plain = one_nan(loops(Simd::Plain));
        for simd in Simd::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(one_nan(loops(simd)), plain, "{simd:?}");
        }
    }
}
