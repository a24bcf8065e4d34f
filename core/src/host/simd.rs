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
