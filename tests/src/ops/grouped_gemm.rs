//! The grouped product over every kind, operand format and numeric model.

#[cfg(test)]
mod cases;
#[cfg(test)]
mod cuda;
#[cfg(test)]
mod problem;
#[cfg(test)]
mod properties;

use dropless_core::ops::{GemmKind, GroupedGemm, Operand, Ragged, Side};
use dropless_core::{DType, NumericModel, Tensor};

use crate::differential::{Maker, Problem};

pub(crate) const PROBLEMS: [Problem; 4] = [
    Problem { numerics: NumericModel::Hopper, ..Problem::new("grouped_gemm_hopper", product) },
    Problem { numerics: NumericModel::F32, ..Problem::new("grouped_gemm_f32", product) },
    Problem { numerics: NumericModel::Hopper, ..Problem::new("grouped_gemm_split_hopper", split_product) },
    Problem { numerics: NumericModel::F32, ..Problem::new("grouped_gemm_split_f32", split_product) },
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    F32,
    Bf16,
    Mxfp8,
    Fp8Block,
    Split,
}

impl Format {
    /// Elements along the sum that share a scale.
    fn block(self) -> usize {
        match self {
            Format::F32 | Format::Bf16 | Format::Split => 1,
            Format::Mxfp8 => 32,
            Format::Fp8Block => 128,
        }
    }
}

/// A factor: its elements, its scales, and its row indices.
struct Factor {
    format: Format,
    elements: Tensor,
    scales: Option<Tensor>,
    gather: Option<Tensor>,
}

impl Factor {
    fn operand(&self) -> Operand<'_> {
        let gather = self.gather.as_ref();
        match (self.format, &self.scales) {
            (Format::Mxfp8, Some(scales)) => Operand::Mxfp8 { codes: &self.elements, scales, gather },
            (Format::Fp8Block, Some(scale_inv)) => Operand::Fp8Block { codes: &self.elements, scale_inv, gather },
            (Format::Split, _) => Operand::Split { values: &self.elements },
            _ => Operand::Plain { values: &self.elements, gather },
        }
    }
}

fn factor(m: &mut Maker<'_>, format: Format, side: Side, gather: bool) -> Factor {
    let sources = 7;
    let index = gather.then(|| {
        let mut index: Vec<u32> = (0..side.shape()[0]).map(|_| m.random.below(sources) as u32).collect();
        m.stray(&mut index, sources);
        m.integers(&[index.len()], &index)
    });
    // What is stored: the rows to gather from.
    let side = match side.ragged {
        Ragged::Rows if gather => Side { rows: sources, ..side },
        Ragged::Chain if gather => Side { chain: sources, ..side },
        _ => side,
    };
    let (elements, scales) = match format {
        Format::F32 => (m.tensor(DType::F32, &side.shape()), None),
        Format::Bf16 => (m.tensor(DType::Bf16, &side.shape()), None),
        Format::Mxfp8 => {
            let scales = side.mxfp8_scales().shape();
            let elements = m.tensor(DType::E4m3, &side.shape());
            let len = scales.iter().product();
            // Mostly near 1, now and then any scale at all.
            let codes: Vec<u8> = (0..len)
                .map(|_| if m.random.below(50) == 0 { m.random.bits() as u8 } else { 120 + m.random.below(12) as u8 })
                .collect();
            (elements, Some(m.with_bytes(DType::Ue8m0, &scales, &codes)))
        }
        Format::Fp8Block => {
            let elements = m.tensor(DType::E4m3, &side.chain_last().shape());
            (elements, Some(m.tensor(DType::F32, &side.fp8_scales().shape())))
        }
        Format::Split => (split_values(m, &side.shape()), None),
    };
    Factor { format, elements, scales, gather: index }
}

/// Values at which the parts of an f32 behave differently: none but the highest where that is not finite (of the largest
/// f32, too, which rounds to infinity), a lowest part that underflows, and subnormals.
const SPLIT_EDGES: [f32; 9] = [
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MAX,
    f32::NAN,
    f32::from_bits(0x7F7F_7FFF), // the largest f32 with a finite highest part
    f32::from_bits(0x087F_FFFF), // just below 2^-110
    f32::from_bits(0x0080_0001), // just above the subnormals
    f32::from_bits(0x807F_FFFF), // the largest subnormal, negative
    f32::from_bits(0x0000_0001), // the smallest
];

/// Random values; in one factor of four a few of them are edges.
fn split_values(m: &mut Maker<'_>, shape: &[usize]) -> Tensor {
    let len = shape.iter().product();
    let mut bytes = m.random.elements(DType::F32, len);
    if len > 0 && m.random.below(4) == 0 {
        for _ in 0..1 + m.random.below(4) {
            let (at, edge) = (m.random.below(len), SPLIT_EDGES[m.random.below(SPLIT_EDGES.len())]);
            bytes[4 * at..][..4].copy_from_slice(&edge.to_le_bytes());
        }
    }
    m.with_bytes(DType::F32, shape, &bytes)
}

fn product(m: &mut Maker<'_>) {
    product_of(m, &[Format::F32, Format::Bf16, Format::Mxfp8, Format::Fp8Block, Format::Split]);
}

/// Among the others a few problems have too few of them: three combinations of factors in three kinds of products.
fn split_product(m: &mut Maker<'_>) {
    product_of(m, &[Format::Split]);
}

/// A product in one of these formats. Rows past the last group hold values that must not show.
fn product_of(m: &mut Maker<'_>, formats: &[Format]) {
    let kind = m.one_of(&[GemmKind::Forward, GemmKind::Dgrad, GemmKind::Wgrad]);
    let format = m.one_of(formats);
    // Beside a split factor there may be one of bf16.
    let formats = match format {
        Format::Split => m.one_of(&[[format, format], [Format::Bf16, format], [format, Format::Bf16]]),
        _ => [format; 2],
    };
    let (block, groups) = (format.block(), 1 + m.below(4));
    let (mut n, mut k, mut spare) = (extent(m), extent(m), m.below(10));
    let mut offsets = vec![0u32];
    for _ in 0..groups {
        let mut size = size(m);
        if kind == GemmKind::Wgrad {
            size = size.next_multiple_of(block);
        }
        offsets.push(offsets[offsets.len() - 1] + size as u32);
    }
    match (kind, format) {
        (GemmKind::Wgrad, _) => spare = spare.next_multiple_of(block),
        (GemmKind::Forward, Format::Mxfp8) => k = k.next_multiple_of(block),
        (GemmKind::Dgrad, Format::Mxfp8) => n = n.next_multiple_of(block),
        _ => {}
    }
    let rows = offsets[groups] as usize + spare;
    let product = kind.product(groups, rows, n, k);
    let ([a, b], out) = (product.sides, product.out_shape());
    // Blocks along what is gathered cannot be.
    let gather = m.flag() && (block == 1 || !product.ragged_chain());
    let plain = |format| format != Format::Split;
    let a = factor(m, formats[0], a, gather && plain(formats[0]));
    let b = factor(m, formats[1], b, gather && plain(formats[1]) && product.ragged_chain());
    m.stray(&mut offsets, rows + 1);
    let offsets = m.integers(&[groups + 1], &offsets);
    let accumulate = m.flag();
    let out = if accumulate {
        m.in_place("out", DType::F32, &out)
    } else {
        let dtype = m.float();
        m.output("out", dtype, &out)
    };
    let (a, b) = (a.operand(), b.operand());
    m.run(GroupedGemm { kind, a, b, offsets: &offsets, out: &out, accumulate }, GroupedGemm::run);
}

/// Rows of a group: none, one, a tile and its neighbours.
fn size(m: &mut Maker<'_>) -> usize {
    match m.below(10) {
        0 | 1 => 0,
        2 | 3 => 1,
        4 => 8,
        5 => 9,
        6..9 => m.below(40),
        _ => 120 + m.below(20),
    }
}

/// Of a weight: one, a tile and its neighbours, and tails.
fn extent(m: &mut Maker<'_>) -> usize {
    match m.below(7) {
        0 => 1,
        1 => 64,
        2 => 65,
        3..6 => 1 + m.below(99),
        _ => 120 + m.below(180),
    }
}
