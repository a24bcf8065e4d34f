//! Block quantization: every format, layout and option.

#[cfg(test)]
mod cases;
#[cfg(test)]
mod layouts;
#[cfg(test)]
mod problem;
#[cfg(test)]
mod vectors;

use dropless_core::ops::{BlockFormat, ColumnBlocks, GroupQuantize, RowBlocks};
use dropless_core::{DType, Tensor};

use crate::differential::{Maker, Problem};

pub(crate) const PROBLEMS: [Problem; 2] =
    [Problem::new("group_quantize_ragged", ragged), Problem::new("group_quantize_stacked", stacked)];

fn format(m: &mut Maker<'_>) -> BlockFormat {
    match m.below(6) {
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

fn ragged(m: &mut Maker<'_>) {
    let format = format(m);
    let (code, scale) = types(format);
    let (block, transposed) = (format.block(), matches!(format, BlockFormat::Fp8Block { .. }));
    let nvfp4 = matches!(format, BlockFormat::Nvfp4 { .. });
    let cols = if transposed { m.extent(300) } else { block * m.extent(6) };
    let groups = 1 + m.below(4);
    let mut offsets = vec![0u32];
    for _ in 0..groups {
        let size = [0, 1, block, m.below(150)][m.below(4)];
        offsets.push(offsets[offsets.len() - 1] + size as u32);
    }
    let rows = offsets[groups] as usize + m.below(4);
    let (x, gather) = if m.below(3) == 0 {
        let sources = 1 + m.below(2 * rows + 1);
        let mut index: Vec<u32> = (0..rows).map(|_| m.random.below(sources) as u32).collect();
        m.stray(&mut index, sources);
        (input(m, &[sources, cols]), Some(m.integers(&[rows], &index)))
    } else {
        (input(m, &[rows, cols]), None)
    };
    m.stray(&mut offsets, rows + 1);
    let offsets = m.integers(&[groups + 1], &offsets);
    let padded = GroupQuantize::padded_rows(format, rows, groups) + block * m.below(2);
    let codes = m.output("codes", code, &[rows, if nvfp4 { cols / 2 } else { cols }]);
    let scales = m.output("scales", scale, &[rows, cols.div_ceil(block)]);
    let column_codes = m.output("column_codes", code, &if transposed { [cols, padded] } else { [padded, cols] });
    let column_scales = m.output("column_scales", scale, &[padded / block, cols]);
    let column_offsets = m.output("column_offsets", DType::U32, &[groups + 1]);
    let amax = m.output("amax", DType::F32, &[1]);
    let column = ColumnBlocks { codes: &column_codes, scales: &column_scales, offsets: Some(&column_offsets) };
    let columns = !nvfp4 && m.below(4) > 0;
    let row = (m.below(4) > 0).then_some(RowBlocks { codes: &codes, scales: &scales });
    m.run(
        GroupQuantize {
            x: &x,
            gather: gather.as_ref(),
            offsets: Some(&offsets),
            format,
            square: false,
            row,
            column: columns.then_some(column),
            amax: nvfp4.then_some(&amax),
        },
        GroupQuantize::run,
    );
}

fn stacked(m: &mut Maker<'_>) {
    let format = format(m);
    let (code, scale) = types(format);
    let (block, transposed) = (format.block(), matches!(format, BlockFormat::Fp8Block { .. }));
    let nvfp4 = matches!(format, BlockFormat::Nvfp4 { .. });
    let square = m.flag();
    let k = if transposed { m.extent(300) } else { block * m.extent(4) };
    let n = if transposed { m.extent(300) } else { block * m.extent(4) };
    let groups = 1 + m.below(3);
    let x = input(m, &[groups, n, k]);
    let one_scale = square && transposed;
    let codes = m.output("codes", code, &[groups, n, if nvfp4 { k / 2 } else { k }]);
    let scales = m.output("scales", scale, &[groups, if one_scale { n.div_ceil(block) } else { n }, k.div_ceil(block)]);
    let (column_codes, column_scales) = if transposed {
        (
            m.output("column_codes", code, &[groups, k, n]),
            m.output("column_scales", scale, &[groups, k.div_ceil(block), n.div_ceil(block)]),
        )
    } else {
        (m.output("column_codes", code, &[groups, n, k]), m.output("column_scales", scale, &[groups, n / block, k]))
    };
    let amax = m.output("amax", DType::F32, &[1]);
    let column = ColumnBlocks { codes: &column_codes, scales: &column_scales, offsets: None };
    let columns = !nvfp4 && (!transposed || square) && m.below(4) > 0;
    let row = (m.below(4) > 0).then_some(RowBlocks { codes: &codes, scales: &scales });
    m.run(
        GroupQuantize {
            x: &x,
            gather: None,
            offsets: None,
            format,
            square,
            row,
            column: columns.then_some(column),
            amax: nvfp4.then_some(&amax),
        },
        GroupQuantize::run,
    );
}
