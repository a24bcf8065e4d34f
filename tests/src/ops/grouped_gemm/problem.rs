//! A product with its operands, how a host runs it, and what it should give.

use std::ops::Range;

pub(super) use crate::differential::Random;
use crate::specification::Specification;
use dropless_core::host::{Host, HostOptions, Simd};
use dropless_core::numerics::{bf16, e4m3};
use dropless_core::ops::{GemmKind, GroupedGemm, Operand, Product};
use dropless_core::{Backend, DType, NumericModel, Result, Tensor};

pub(super) const KINDS: [GemmKind; 3] = [GemmKind::Forward, GemmKind::Dgrad, GemmKind::Wgrad];
pub(super) const MODELS: [NumericModel; 3] = [NumericModel::F32, NumericModel::Hopper, NumericModel::Blackwell];
/// A NaN that no arithmetic makes, in the bits of a f32 and of two bf16.
pub(super) const GUARD: u32 = 0xFFAB_FFAB;

pub(super) fn host(numerics: NumericModel, simd: Simd) -> Host {
    Host::new(HostOptions { numerics, simd: Some(simd), threads: 2, ..HostOptions::default() }).unwrap()
}

pub(super) fn levels() -> impl Iterator<Item = Simd> {
    Simd::ALL.into_iter().filter(|simd| simd.available())
}

/// How the factors are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    F32,
    Bf16,
    Mxfp8,
    Fp8Block,
    /// Both factors are split, or one of them beside bf16.
    Split,
    SplitLeft,
    SplitRight,
}

pub(super) const FORMATS: [Format; 7] =
    [Format::F32, Format::Bf16, Format::Mxfp8, Format::Fp8Block, Format::Split, Format::SplitLeft, Format::SplitRight];

impl Format {
    pub(super) fn splits(self, side: usize) -> bool {
        self == Format::Split || self == [Format::SplitLeft, Format::SplitRight][side]
    }
}

/// A product with its operands in memory.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub(super) kind: GemmKind,
    pub(super) format: Format,
    pub(super) offsets: Vec<u32>,
    /// Rows of the ragged operands; those past the last offset do not count.
    pub(super) rows: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    pub(super) gather: [Option<Vec<u32>>; 2],
    pub(super) data: [Data; 2],
    pub(super) accumulate: bool,
    pub(super) out: DType,
}

/// The elements of an operand, and the scales of a quantized one.
#[derive(Clone, Debug)]
pub(super) enum Data {
    F32(Vec<f32>),
    Bf16(Vec<u16>),
    Mxfp8(Vec<u8>, Vec<u8>),
    Fp8Block(Vec<u8>, Vec<f32>),
}

/// Rows of `from` elements made `to` long.
fn widened<T: Copy>(rows: &[T], from: usize, to: usize, fill: T) -> Vec<T> {
    rows.chunks(from).flat_map(|row| row.iter().copied().chain(std::iter::repeat_n(fill, to - from))).collect()
}

pub(super) fn offsets_of(sizes: &[usize]) -> Vec<u32> {
    let mut end = 0;
    std::iter::once(0)
        .chain(sizes.iter().map(|&size| {
            end += size as u32;
            end
        }))
        .collect()
}

impl Problem {
    /// Random operands.
    pub(super) fn new(kind: GemmKind, format: Format, sizes: &[usize], n: usize, k: usize, seed: u64) -> Problem {
        let offsets = offsets_of(sizes);
        let rows = *offsets.last().unwrap() as usize;
        let mut problem = Problem {
            kind,
            format,
            offsets,
            rows,
            n,
            k,
            gather: [None, None],
            data: [Data::F32(vec![]), Data::F32(vec![])],
            accumulate: false,
            out: DType::F32,
        };
        problem.fill(seed);
        problem
    }

    pub(super) fn fill(&mut self, seed: u64) {
        let mut random = Random(seed);
        for side in 0..2 {
            let len = self.shape(side).iter().product();
            let scales = self.scale_shape(side).iter().product();
            let codes = |random: &mut Random| -> Vec<u8> {
                (0..len)
                    .map(|_| {
                        if random.below(2000) == 0 {
                            0x7F
                        } else {
                            (random.bits() as u8 % 0x7F) | (random.bits() as u8 & 0x80)
                        }
                    })
                    .collect()
            };
            self.data[side] = match self.format {
                format if format == Format::F32 || format.splits(side) => {
                    Data::F32((0..len).map(|_| random.value()).collect())
                }
                Format::F32 | Format::Bf16 | Format::Split | Format::SplitLeft | Format::SplitRight => {
                    Data::Bf16((0..len).map(|_| bf16::from_f32(random.value())).collect())
                }
                Format::Mxfp8 => {
                    Data::Mxfp8(codes(&mut random), (0..scales).map(|_| 120 + random.below(12) as u8).collect())
                }
                Format::Fp8Block => Data::Fp8Block(codes(&mut random), (0..scales).map(|_| random.value()).collect()),
            };
        }
    }

    /// Sets a factor to `value(row, column)` of its plain layout, the rows of all groups in turn; quantized factors get
    /// scales of 1.
    pub(super) fn set(&mut self, side: usize, value: impl Fn(usize, usize) -> f32) {
        let Problem { kind, rows, n, k, .. } = *self;
        let width = if (kind, side) == (GemmKind::Dgrad, 0) || (kind, side) == (GemmKind::Wgrad, 0) { n } else { k };
        let len = self.shape(side).iter().product::<usize>();
        let all = (0..len).map(|i| value(i / width, i % width));
        let code = |x: f32| e4m3::from_f32(x);
        match &mut self.data[side] {
            Data::F32(data) => *data = all.collect(),
            Data::Bf16(data) => *data = all.map(bf16::from_f32).collect(),
            Data::Mxfp8(data, scales) => {
                *data = all.map(code).collect();
                scales.fill(127);
            }
            Data::Fp8Block(data, scales) => {
                // The chain is the last dimension.
                let plain = |i: usize| match (kind, side) {
                    (GemmKind::Forward, _) | (GemmKind::Dgrad, 0) => [i / width, i % width],
                    (GemmKind::Dgrad, _) => [i / (n * k) * n + i % n, i / n % k],
                    (GemmKind::Wgrad, _) => [i % rows, i / rows],
                };
                *data = (0..len).map(|i| code(value(plain(i)[0], plain(i)[1]))).collect();
                scales.fill(1.0);
            }
        }
    }

    /// Appends rows that belong to no group: NaN, or NaN codes and scales.
    pub(super) fn add_rows(&mut self, rows: usize) {
        let before = self.rows;
        self.rows += rows;
        for side in 0..2 {
            if side == 1 && self.kind != GemmKind::Wgrad {
                continue;
            }
            let (shape, scale_shape) = (self.shape(side), self.scale_shape(side));
            // A transposed operand has the new rows as columns.
            let transposed = self.format == Format::Fp8Block && self.kind == GemmKind::Wgrad;
            match &mut self.data[side] {
                Data::F32(x) => x.resize(shape.iter().product(), f32::NAN),
                Data::Bf16(x) => x.resize(shape.iter().product(), 0x7FC0),
                Data::Mxfp8(x, scales) => {
                    x.resize(shape.iter().product(), 0x7F);
                    scales.resize(scale_shape.iter().product(), 0xFF);
                }
                Data::Fp8Block(x, scales) if transposed => {
                    *x = widened(x, before, shape[1], 0x7F);
                    scales.resize(scale_shape.iter().product(), f32::NAN);
                }
                Data::Fp8Block(x, scales) => {
                    x.resize(shape.iter().product(), 0x7F);
                    scales.resize(scale_shape.iter().product(), f32::NAN);
                }
            }
        }
    }

    pub(super) fn groups(&self) -> usize {
        self.offsets.len() - 1
    }

    pub(super) fn group(&self, g: usize) -> Range<usize> {
        self.offsets[g] as usize..self.offsets[g + 1] as usize
    }

    fn product(&self) -> Product {
        self.kind.product(self.groups(), self.rows, self.n, self.k)
    }

    /// The shape of a factor's elements.
    pub(super) fn shape(&self, side: usize) -> Vec<usize> {
        let side = self.product().sides[side];
        if self.format == Format::Fp8Block { side.chain_last().shape() } else { side.shape() }
    }

    /// The shape of its scales.
    pub(super) fn scale_shape(&self, side: usize) -> Vec<usize> {
        let side = self.product().sides[side];
        match self.format {
            Format::F32 | Format::Bf16 | Format::Split | Format::SplitLeft | Format::SplitRight => vec![0],
            Format::Mxfp8 => side.mxfp8_scales().shape(),
            Format::Fp8Block => side.fp8_scales().shape(),
        }
    }

    pub(super) fn out_shape(&self) -> Vec<usize> {
        self.product().out_shape()
    }

    /// Runs it on a host; the result as f32, starting from `before` (in bits of the output type).
    pub(super) fn run(&self, host: &dyn Backend, before: u32) -> Result<Vec<f32>> {
        let mut scales = Vec::new();
        let mut values = Vec::new();
        let mut gathers = Vec::new();
        for side in 0..2 {
            let mut shape = self.shape(side);
            let scale_shape = self.scale_shape(side);
            match &self.data[side] {
                Data::F32(x) => {
                    shape[0] = x.len() / shape[1..].iter().product::<usize>().max(1);
                    values.push(host.upload(DType::F32, &shape, x)?);
                }
                Data::Bf16(x) => {
                    shape[0] = x.len() / shape[1..].iter().product::<usize>().max(1);
                    values.push(host.upload(DType::Bf16, &shape, x)?);
                }
                Data::Mxfp8(x, s) => {
                    values.push(host.upload(DType::E4m3, &shape, x)?);
                    scales.push(host.upload(DType::Ue8m0, &scale_shape, s)?);
                }
                Data::Fp8Block(x, s) => {
                    values.push(host.upload(DType::E4m3, &shape, x)?);
                    scales.push(host.upload(DType::F32, &scale_shape, s)?);
                }
            }
            gathers.push(self.gather[side].as_ref().map(|g| host.upload(DType::U32, &[g.len()], g)).transpose()?);
        }
        let operand = |side: usize| -> Operand<'_> {
            match self.format {
                format if format.splits(side) => Operand::Split { values: &values[side] },
                Format::F32 | Format::Bf16 | Format::Split | Format::SplitLeft | Format::SplitRight => {
                    Operand::Plain { values: &values[side], gather: gathers[side].as_ref() }
                }
                Format::Mxfp8 => {
                    Operand::Mxfp8 { codes: &values[side], scales: &scales[side], gather: gathers[side].as_ref() }
                }
                Format::Fp8Block => {
                    Operand::Fp8Block { codes: &values[side], scale_inv: &scales[side], gather: gathers[side].as_ref() }
                }
            }
        };
        let offsets = host.upload(DType::U32, &[self.offsets.len()], &self.offsets)?;
        let shape = self.out_shape();
        let len: usize = shape.iter().product();
        let out: Tensor = match self.out {
            DType::F32 => host.upload(DType::F32, &shape, &vec![before; len])?,
            _ => host.upload(DType::Bf16, &shape, &vec![before as u16; len])?,
        };
        let (a, b) = (operand(0), operand(1));
        GroupedGemm { kind: self.kind, a, b, offsets: &offsets, out: &out, accumulate: self.accumulate }.run(host)?;
        Ok(match self.out {
            DType::F32 => host.download(&out)?,
            _ => host.download::<u16>(&out)?.into_iter().map(bf16::to_f32).collect(),
        })
    }

    /// What the specification makes of it.
    pub(super) fn expected(&self, model: NumericModel, before: u32) -> Vec<f32> {
        self.run(&Specification::new(host(model, Simd::Plain)), before).unwrap()
    }

    /// Every model and SIMD level against the specification.
    pub(super) fn check_with(&self, models: &[NumericModel], before: u32) {
        for &model in models {
            let want = self.expected(model, before);
            for simd in levels() {
                assert_same(&self.run(&host(model, simd), before).unwrap(), &want, || {
                    format!("{model:?} {simd:?} {self}")
                });
            }
        }
    }

    pub(super) fn check(&self) {
        self.check_with(&MODELS, if self.accumulate { 0x3FC0_0000 } else { GUARD });
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Problem { kind, format, offsets, rows, n, k, accumulate, out, .. } = self;
        write!(f, "{kind:?} {format:?} offsets {offsets:?} of {rows}, n {n}, k {k}, accumulate {accumulate}, {out:?}")
    }
}

/// Bit for bit; any computed NaN equals any other, but a guard only itself.
#[track_caller]
pub(super) fn assert_same(got: &[f32], want: &[f32], what: impl Fn() -> String) {
    assert_eq!(got.len(), want.len(), "{}", what());
    let guard = |x: f32| x.to_bits() == GUARD || x.to_bits() == GUARD << 16;
    let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan() && !guard(a) && !guard(b));
    let wrong: Vec<_> = (0..got.len()).filter(|&i| !same(got[i], want[i])).collect();
    let first: Vec<_> = wrong
        .iter()
        .take(4)
        .map(|&i| format!("[{i}] {:08x} for {:08x}", got[i].to_bits(), want[i].to_bits()))
        .collect();
    assert!(wrong.is_empty(), "{}: {} of {} differ: {first:?}", what(), wrong.len(), got.len());
}

/// Sizes that suit the format: quantized columns are padded to whole blocks.
pub(super) fn sizes_for(kind: GemmKind, format: Format, sizes: &[usize]) -> Vec<usize> {
    let block = match (kind, format) {
        (GemmKind::Wgrad, Format::Mxfp8) => 32,
        (GemmKind::Wgrad, Format::Fp8Block) => 128,
        _ => 1,
    };
    sizes.iter().map(|size| size.next_multiple_of(block)).collect()
}
