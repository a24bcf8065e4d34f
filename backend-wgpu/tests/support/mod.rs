//! What the op tests share: the backend under test, random values, and the comparison of bits.

#![allow(dead_code, reason = "each test file uses its part")]
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "tests may panic, and their numbers are small"
)]

use dropless_core::host::{Host, HostOptions};
use dropless_core::numerics::bf16;
use dropless_core::{Backend, DType, Error, Memory, NumericModel, Tensor};
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

/// Problems of each op: `DROPLESS_CASES`.
pub(crate) fn cases() -> u32 {
    std::env::var("DROPLESS_CASES").map_or(12, |n| n.parse().expect("DROPLESS_CASES is a number"))
}

/// That many problems of a property test, the same in every run.
pub(crate) fn config() -> Config {
    Config { cases: cases(), rng_seed: RngSeed::Fixed(20260), failure_persistence: None, ..Config::default() }
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

/// Makes the operands of one problem on a backend; the same seed makes the same operands on every backend.
pub(crate) struct Maker<'a> {
    pub(crate) backend: &'a dyn Backend,
    pub(crate) random: Random,
}

impl Maker<'_> {
    /// A tensor of random elements.
    pub(crate) fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let bytes = self.random.elements(dtype, shape.iter().product());
        self.with_bytes(dtype, shape, &bytes)
    }

    /// A tensor of integers.
    pub(crate) fn integers(&mut self, shape: &[usize], values: &[u32]) -> Tensor {
        self.with_bytes(DType::U32, shape, bytemuck::cast_slice(values))
    }

    /// A tensor of given elements. Half of them lie at an odd place in a larger buffer.
    pub(crate) fn with_bytes(&mut self, dtype: DType, shape: &[usize], bytes: &[u8]) -> Tensor {
        let row: usize = shape.iter().product();
        let before = if self.random.below(2) == 0 { 0 } else { self.random.below(300) };
        let whole = self.backend.alloc(dtype, &[before + row + 3], Memory::Device).unwrap();
        let tensor = whole.slice(before, before + row).unwrap().reshape(shape).unwrap();
        self.backend.write(&tensor, bytes).unwrap();
        tensor
    }

    /// One of the float types.
    pub(crate) fn float(&mut self) -> DType {
        [DType::F32, DType::Bf16][self.random.below(2)]
    }

    /// 1 to `most`, with a liking for 1 and for powers of two and their neighbours.
    pub(crate) fn extent(&mut self, most: usize) -> usize {
        let near_power = (1usize << self.random.below(10)) + self.random.below(3);
        let extent = [1, near_power - 1, 1 + self.random.below(most)][self.random.below(3)];
        extent.clamp(1, most)
    }
}

/// Runs `problem` on the host and on wgpu under [`cases`] seeds, and compares every tensor that it returns.
pub(crate) fn agree(name: &str, numerics: NumericModel, problem: impl Fn(&mut Maker<'_>) -> Vec<Tensor>) {
    let Some(wgpu) = open(numerics) else { return };
    let host = host(numerics);
    for seed in 0..u64::from(cases()) {
        let run = |backend: &dyn Backend| {
            let outputs = problem(&mut Maker { backend, random: Random(seed) });
            let read = |tensor: &Tensor| (tensor.dtype(), backend.download::<u8>(tensor).unwrap());
            outputs.iter().map(read).collect::<Vec<_>>()
        };
        for (place, ((dtype, got), (_, want))) in run(&wgpu).iter().zip(&run(&host)).enumerate() {
            assert_same(&format!("{name}, seed {seed}, output {place}"), *dtype, got, want);
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
