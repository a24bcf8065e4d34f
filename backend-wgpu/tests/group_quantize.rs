//! Block quantization against the host, byte by byte: every format, layout and option.

#![expect(clippy::cast_possible_truncation, reason = "small sizes and random bits are cut on purpose")]

mod support;

use dropless_core::ops::{BlockFormat, ColumnBlocks, GroupQuantize, RowBlocks};
use dropless_core::{DType, NumericModel, Tensor};
use support::{Maker, agree};

fn format(m: &mut Maker<'_>) -> BlockFormat {
    match m.random.below(6) {
        0 => BlockFormat::Mxfp8 { floor: false },
        1 => BlockFormat::Mxfp8 { floor: true },
        2 => BlockFormat::Fp8Block { f32_scale: false },
        3 => BlockFormat::Fp8Block { f32_scale: true },
        4 => BlockFormat::Nvfp4 { stochastic: None },
        _ => BlockFormat::Nvfp4 { stochastic: Some((0x0123_4567_89AB_CDEF, 5)) },
    }
}

fn types(format: BlockFormat) -> (DType, DType) {
    match format {
        BlockFormat::Mxfp8 { .. } => (DType::E4m3, DType::Ue8m0),
        BlockFormat::Fp8Block { .. } => (DType::E4m3, DType::F32),
        BlockFormat::Nvfp4 { .. } => (DType::E2m1x2, DType::E4m3),
    }
}

/// Amaxes at which scales turn: powers of two times the largest codes, and their neighbours.
const TURNS: [f32; 6] = [448.0, 448.00003, 447.99997, 6.0, 64.0, 0.0];

/// Blocks of different magnitudes, now and then with a special value.
fn input(m: &mut Maker<'_>, shape: &[usize]) -> Tensor {
    let dtype = m.float();
    let len: usize = shape.iter().product();
    let mut exponent = 0;
    let values: Vec<f32> = (0..len)
        .map(|i| {
            if i % 16 == 0 {
                exponent = m.random.below(60) as i32 - 30;
                return TURNS[m.random.below(6)] * 2f32.powi(exponent);
            }
            m.random.value() * 2f32.powi(if m.random.below(300) == 0 { 120 } else { exponent })
        })
        .collect();
    match dtype {
        DType::F32 => m.with_bytes(dtype, shape, bytemuck::cast_slice(&values)),
        _ => {
            let codes: Vec<u16> = values.iter().map(|&x| dropless_core::numerics::bf16::from_f32(x)).collect();
            m.with_bytes(dtype, shape, bytemuck::cast_slice(&codes))
        }
    }
}

#[test]
fn ragged() {
    agree("ragged", NumericModel::Hopper, |m| {
        let format = format(m);
        let (code, scale) = types(format);
        let (block, transposed) = (format.block(), matches!(format, BlockFormat::Fp8Block { .. }));
        let nvfp4 = matches!(format, BlockFormat::Nvfp4 { .. });
        let cols = if transposed { m.extent(300) } else { block * m.extent(6) };
        let groups = 1 + m.random.below(4);
        let mut offsets = vec![0u32];
        for _ in 0..groups {
            let size = [0, 1, block, m.random.below(150)][m.random.below(4)];
            offsets.push(offsets[offsets.len() - 1] + size as u32);
        }
        let rows = offsets[groups] as usize + m.random.below(4);
        let x = input(m, &[rows, cols]);
        let offsets = m.integers(&[groups + 1], &offsets);
        let padded = GroupQuantize::padded_rows(format, rows, groups) + block * m.random.below(2);
        let codes = m.tensor(code, &[rows, if nvfp4 { cols / 2 } else { cols }]);
        let scales = m.tensor(scale, &[rows, cols.div_ceil(block)]);
        let (column_codes, column_scales) = if transposed {
            (m.tensor(code, &[cols, padded]), m.tensor(scale, &[cols, padded / block]))
        } else {
            (m.tensor(code, &[padded, cols]), m.tensor(scale, &[padded / block, cols]))
        };
        let column_offsets = m.tensor(DType::U32, &[groups + 1]);
        let amax = m.tensor(DType::F32, &[1]);
        let column = ColumnBlocks { codes: &column_codes, scales: &column_scales, offsets: Some(&column_offsets) };
        GroupQuantize {
            x: &x,
            offsets: Some(&offsets),
            format,
            square: false,
            row: (m.random.below(4) > 0).then_some(RowBlocks { codes: &codes, scales: &scales }),
            column: (!nvfp4 && m.random.below(4) > 0).then_some(column),
            amax: nvfp4.then_some(&amax),
        }
        .run(m.backend)
        .unwrap();
        vec![codes, scales, column_codes, column_scales, column_offsets, amax]
    });
}

#[test]
fn stacked() {
    agree("stacked", NumericModel::Hopper, |m| {
        let format = format(m);
        let (code, scale) = types(format);
        let (block, transposed) = (format.block(), matches!(format, BlockFormat::Fp8Block { .. }));
        let nvfp4 = matches!(format, BlockFormat::Nvfp4 { .. });
        let square = m.random.below(2) == 0;
        let k = if transposed { m.extent(300) } else { block * m.extent(4) };
        let n = if transposed { m.extent(300) } else { block * m.extent(4) };
        let groups = 1 + m.random.below(3);
        let x = input(m, &[groups, n, k]);
        let one_scale = square && transposed;
        let codes = m.tensor(code, &[groups, n, if nvfp4 { k / 2 } else { k }]);
        let scales = m.tensor(scale, &[groups, if one_scale { n.div_ceil(block) } else { n }, k.div_ceil(block)]);
        let (column_codes, column_scales) = if transposed {
            (m.tensor(code, &[groups, k, n]), m.tensor(scale, &[groups, k.div_ceil(block), n.div_ceil(block)]))
        } else {
            (m.tensor(code, &[groups, n, k]), m.tensor(scale, &[groups, n / block, k]))
        };
        let amax = m.tensor(DType::F32, &[1]);
        let column = ColumnBlocks { codes: &column_codes, scales: &column_scales, offsets: None };
        let columns = !nvfp4 && (!transposed || square) && m.random.below(4) > 0;
        GroupQuantize {
            x: &x,
            offsets: None,
            format,
            square,
            row: (m.random.below(4) > 0).then_some(RowBlocks { codes: &codes, scales: &scales }),
            column: columns.then_some(column),
            amax: nvfp4.then_some(&amax),
        }
        .run(m.backend)
        .unwrap();
        vec![codes, scales, column_codes, column_scales, amax]
    });
}
