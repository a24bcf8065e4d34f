//! Random operands: values of ordinary size with edges among them.

use dropless_core::DType;
use dropless_core::numerics::bf16;

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// 32 random bits.
    pub fn bits(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 32) as u32
    }

    /// 0 to `n` - 1.
    pub fn below(&mut self, n: usize) -> usize {
        self.bits() as usize % n
    }

    /// A value of ordinary size, now and then an edge, halfway between two bf16, or any bits at all.
    pub fn value(&mut self) -> f32 {
        match self.below(400) {
            0 => 0.0,
            1 => -0.0,
            2 => f32::from_bits(self.bits()),
            3 => f32::from_bits(self.bits() & 0x807F_FFFF),
            4..8 => f32::from_bits(self.ordinary().to_bits() & 0xFFFF_0000 | 0x8000),
            _ => self.ordinary(),
        }
    }

    /// `len` values, uniform in -scale..scale, as `dtype` holds them.
    pub fn floats(&mut self, dtype: DType, len: usize, scale: f32) -> Vec<f32> {
        let unit = |bits: u32| (bits >> 8) as f32 / (1u32 << 23) as f32 - 1.0;
        let rounded = |x: f32| if dtype == DType::Bf16 { bf16::round(x) } else { x };
        (0..len).map(|_| rounded(unit(self.bits()) * scale)).collect()
    }

    /// `len` numbers below `bound`.
    pub fn indices(&mut self, len: usize, bound: usize) -> Vec<u32> {
        (0..len).map(|_| self.below(bound) as u32).collect()
    }

    /// The sum of four uniform numbers: mostly within (-2, 2).
    fn ordinary(&mut self) -> f32 {
        ((0..4).map(|_| f64::from(self.bits()) / f64::from(u32::MAX) - 0.5).sum::<f64>() * 2.0) as f32
    }

    /// A scale of ordinary size, now and then any.
    fn ue8m0(&mut self) -> u8 {
        if self.below(100) == 0 { self.bits() as u8 } else { 120 + self.below(15) as u8 }
    }

    /// A code that is a number; now and then NaN, so seldom that most sums of hundreds have none.
    fn e4m3(&mut self) -> u8 {
        let code = self.bits() as u8;
        if code & 0x7F == 0x7F && self.below(100) != 0 { code ^ 1 } else { code }
    }

    /// `len` values in the bytes of a float type; of other types any bytes.
    pub fn elements(&mut self, dtype: DType, len: usize) -> Vec<u8> {
        match dtype {
            DType::F32 => (0..len).flat_map(|_| self.value().to_le_bytes()).collect(),
            DType::Bf16 => (0..len).flat_map(|_| bf16::from_f32(self.value()).to_le_bytes()).collect(),
            DType::E4m3 => (0..len).map(|_| self.e4m3()).collect(),
            DType::Ue8m0 => (0..len).map(|_| self.ue8m0()).collect(),
            _ => (0..len * dtype.size()).map(|_| self.bits() as u8).collect(),
        }
    }
}
