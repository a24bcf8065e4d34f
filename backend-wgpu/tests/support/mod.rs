//! What the op tests share: the backend under test, random values, and the comparison of bits.

use dropless_core::host::{Host, HostOptions};
use dropless_core::numerics::bf16;
use dropless_core::{Backend, DType, Error, NumericModel};
use dropless_wgpu::{Wgpu, WgpuOptions};
use proptest::test_runner::{Config, RngSeed};

/// The backend, or None when there is no adapter and `DROPLESS_REQUIRE` does not name wgpu.
pub(crate) fn open(numerics: NumericModel) -> Option<Wgpu> {
    let required = std::env::var("DROPLESS_REQUIRE").is_ok_and(|names| names.split(',').any(|name| name == "wgpu"));
    match Wgpu::new(&WgpuOptions { numerics, ..WgpuOptions::default() }) {
        Err(Error::Unavailable { why, .. }) if !required => {
            println!("skipped: {why}");
            None
        }
        opened => Some(opened.unwrap()),
    }
}

/// The specification.
pub(crate) fn host(numerics: NumericModel) -> Host {
    Host::new(HostOptions { numerics, threads: 1, ..HostOptions::default() }).unwrap()
}

/// Problems of a property test: `DROPLESS_CASES` of them.
pub(crate) fn config() -> Config {
    let cases = std::env::var("DROPLESS_CASES").map_or(48, |n| n.parse().expect("DROPLESS_CASES is a number"));
    Config { cases, rng_seed: RngSeed::Fixed(20260), failure_persistence: None, ..Config::default() }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((mixed ^ (mixed >> 31)) >> 32) as u32
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.next() as usize % n
    }

    /// A value of ordinary size, now and then an edge or any bits at all.
    pub(crate) fn value(&mut self) -> f32 {
        match self.below(400) {
            0 => 0.0,
            1 => -0.0,
            2 => f32::from_bits(self.next()),
            3 => f32::from_bits(self.next() & 0x807F_FFFF),
            _ => ((0..4).map(|_| f64::from(self.next()) / f64::from(u32::MAX) - 0.5).sum::<f64>() * 2.0) as f32,
        }
    }

    /// `len` values in the bytes of a float type; of other types any bytes.
    pub(crate) fn elements(&mut self, dtype: DType, len: usize) -> Vec<u8> {
        match dtype {
            DType::F32 => (0..len).flat_map(|_| self.value().to_le_bytes()).collect(),
            DType::Bf16 => (0..len).flat_map(|_| bf16::from_f32(self.value()).to_le_bytes()).collect(),
            _ => (0..len * dtype.size()).map(|_| self.next() as u8).collect(),
        }
    }
}

/// Equal bits, or two NaN of a float type; a failure names the first elements that differ.
pub(crate) fn assert_same(what: &str, dtype: DType, got: &[u8], want: &[u8]) {
    let size = dtype.size();
    let number = |bytes: &[u8]| match dtype {
        DType::F32 => f32::from_le_bytes(bytes.try_into().unwrap()),
        DType::Bf16 => bf16::to_f32(u16::from_le_bytes(bytes.try_into().unwrap())),
        _ => 0.0,
    };
    assert_eq!(got.len(), want.len(), "{what}");
    let pairs = got.chunks(size).zip(want.chunks(size));
    let differ = |(g, w): &(&[u8], &[u8])| g != w && !(number(g).is_nan() && number(w).is_nan());
    let wrong: Vec<_> = pairs.enumerate().filter(|(_, pair)| differ(pair)).collect();
    let show = |(i, (g, w)): &(usize, (&[u8], &[u8]))| {
        let hex = |bytes: &[u8]| bytes.iter().rev().map(|b| format!("{b:02x}")).collect::<String>();
        format!("[{i}] {} ({:e}), not {} ({:e})", hex(g), number(g), hex(w), number(w))
    };
    let first: Vec<_> = wrong.iter().take(8).map(show).collect();
    assert!(wrong.is_empty(), "{what}: {} of {} differ: {first:#?}", wrong.len(), got.len() / size);
}
