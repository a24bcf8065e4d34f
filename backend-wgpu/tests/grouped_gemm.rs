//! The grouped product against the host, bit by bit, over every kind, operand format and numeric model.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "tests may panic, and their numbers are small"
)]

mod support;

use dropless_core::ops::{GemmKind, GroupedGemm, Operand};
use dropless_core::{Backend, DType, NumericModel, Tensor};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use support::{Random, assert_same, config, host, open};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    F32,
    Bf16,
    Mxfp8,
    Fp8Block,
}

/// A product. Rows past the last group hold values that must not show.
#[derive(Clone, Debug)]
struct Problem {
    kind: GemmKind,
    format: Format,
    sizes: Vec<usize>,
    spare: usize,
    n: usize,
    k: usize,
    gather: bool,
    accumulate: bool,
    out: DType,
    seed: u64,
}

/// A factor: its elements, and its row indices or its scales.
struct Factor {
    format: Format,
    elements: Tensor,
    extra: Option<Tensor>,
}

impl Factor {
    fn operand(&self) -> Operand<'_> {
        match (self.format, &self.extra) {
            (Format::Mxfp8, Some(scales)) => Operand::Mxfp8 { codes: &self.elements, scales },
            (Format::Fp8Block, Some(scale_inv)) => Operand::Fp8Block { codes: &self.elements, scale_inv },
            (_, gather) => Operand::Plain { values: &self.elements, gather: gather.as_ref() },
        }
    }
}

impl Problem {
    /// With extents that the format allows.
    fn settled(mut self) -> Problem {
        let block = match self.format {
            Format::F32 | Format::Bf16 => 1,
            Format::Mxfp8 => 32,
            Format::Fp8Block => 128,
        };
        self.gather &= block == 1;
        match (self.kind, self.format) {
            (GemmKind::Wgrad, _) => {
                self.sizes.iter_mut().for_each(|size| *size = size.next_multiple_of(block));
                self.spare = self.spare.next_multiple_of(block);
            }
            (GemmKind::Forward, Format::Mxfp8) => self.k = self.k.next_multiple_of(32),
            (GemmKind::Dgrad, Format::Mxfp8) => self.n = self.n.next_multiple_of(32),
            _ => {}
        }
        if self.accumulate {
            self.out = DType::F32;
        }
        self
    }

    /// `shape`: as a plain operand; `chain`: its dimension along which the product sums.
    fn factor(&self, b: &dyn Backend, random: &mut Random, shape: &[usize], chain: usize, ragged: bool) -> Factor {
        let mut put = |dtype: DType, shape: &[usize]| {
            let bytes = random.elements(dtype, shape.iter().product());
            let tensor = b.alloc(dtype, shape, dropless_core::Memory::Device).unwrap();
            b.write(&tensor, &bytes).unwrap();
            tensor
        };
        let (elements, extra) = match self.format {
            Format::F32 | Format::Bf16 => {
                let dtype = if self.format == Format::F32 { DType::F32 } else { DType::Bf16 };
                if ragged && self.gather {
                    let sources = 7;
                    let elements = put(dtype, &[sources, shape[1]]);
                    let index: Vec<u32> = (0..shape[0]).map(|_| random.next() % 7).collect();
                    (elements, Some(b.upload(DType::U32, &[shape[0]], &index).unwrap()))
                } else {
                    (put(dtype, shape), None)
                }
            }
            Format::Mxfp8 => {
                let mut scales = shape.to_vec();
                scales[chain] /= 32;
                let elements = put(DType::E4m3, shape);
                let len = scales.iter().product();
                // Mostly near 1, now and then any scale at all.
                let codes: Vec<u8> = (0..len)
                    .map(|_| if random.below(50) == 0 { random.next() as u8 } else { 120 + random.below(12) as u8 })
                    .collect();
                (elements, Some(b.upload(DType::Ue8m0, &scales, &codes).unwrap()))
            }
            Format::Fp8Block => {
                let mut shape = shape.to_vec();
                let length = shape.remove(chain);
                shape.push(length);
                let elements = put(DType::E4m3, &shape);
                let last = shape.len() - 1;
                shape[last] = length.div_ceil(128);
                if shape.len() == 3 {
                    shape[1] = shape[1].div_ceil(128);
                }
                (elements, Some(put(DType::F32, &shape)))
            }
        };
        Factor { format: self.format, elements, extra }
    }

    /// The bytes of the result.
    fn run(&self, backend: &dyn Backend) -> Vec<u8> {
        let mut random = Random(self.seed);
        let mut offsets = vec![0u32];
        for &size in &self.sizes {
            offsets.push(offsets[offsets.len() - 1] + size as u32);
        }
        let (groups, n, k) = (self.sizes.len(), self.n, self.k);
        let rows = self.sizes.iter().sum::<usize>() + self.spare;
        let (a, b, out, chain): ([usize; 2], Vec<usize>, Vec<usize>, [usize; 2]) = match self.kind {
            GemmKind::Forward => ([rows, k], vec![groups, n, k], vec![rows, n], [1, 2]),
            GemmKind::Dgrad => ([rows, n], vec![groups, n, k], vec![rows, k], [1, 1]),
            GemmKind::Wgrad => ([rows, n], vec![rows, k], vec![groups, n, k], [0, 0]),
        };
        let a = self.factor(backend, &mut random, &a, chain[0], true);
        let b = self.factor(backend, &mut random, &b, chain[1], self.kind == GemmKind::Wgrad);
        let offsets = backend.upload(DType::U32, &[groups + 1], &offsets).unwrap();
        let old = random.elements(self.out, out.iter().product());
        let out = backend.alloc(self.out, &out, dropless_core::Memory::Device).unwrap();
        backend.write(&out, &old).unwrap();
        let (a, b) = (a.operand(), b.operand());
        GroupedGemm { kind: self.kind, a, b, offsets: &offsets, out: &out, accumulate: self.accumulate }
            .run(backend)
            .unwrap();
        backend.download(&out).unwrap()
    }
}

fn problem() -> impl Strategy<Value = Problem> {
    let kind = prop_oneof![Just(GemmKind::Forward), Just(GemmKind::Dgrad), Just(GemmKind::Wgrad)];
    let format = prop_oneof![Just(Format::F32), Just(Format::Bf16), Just(Format::Mxfp8), Just(Format::Fp8Block)];
    let size =
        prop_oneof![2 => Just(0usize), 2 => Just(1), 1 => Just(8), 1 => Just(9), 3 => 0usize..40, 1 => 120usize..140];
    let extent = prop_oneof![1 => Just(1usize), 1 => Just(64), 1 => Just(65), 3 => 1usize..100, 1 => 120usize..300];
    let sizes = proptest::collection::vec(size, 1..5);
    let out = prop_oneof![Just(DType::F32), Just(DType::Bf16)];
    (kind, format, sizes, 0usize..10, extent.clone(), extent, any::<bool>(), any::<bool>(), out, any::<u64>()).prop_map(
        |(kind, format, sizes, spare, n, k, gather, accumulate, out, seed)| {
            Problem { kind, format, sizes, spare, n, k, gather, accumulate, out, seed }.settled()
        },
    )
}

fn agrees(numerics: NumericModel) {
    let Some(wgpu) = open(numerics) else { return };
    let host = host(numerics);
    let run = |problem: Problem| {
        let (got, want) = (problem.run(&wgpu), problem.run(&host));
        assert_same(&format!("{problem:?}"), problem.out, &got, &want);
        Ok(())
    };
    TestRunner::new(config()).run(&problem(), run).unwrap();
}

#[test]
fn hopper() {
    agrees(NumericModel::Hopper);
}

#[test]
fn f32() {
    agrees(NumericModel::F32);
}
