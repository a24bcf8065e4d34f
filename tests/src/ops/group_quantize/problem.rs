//! What to quantize, and what the op makes of it.

use dropless_core::host::{Host, HostOptions, Simd};
use dropless_core::numerics::bf16;
use dropless_core::ops::{BlockFormat, ColumnBlocks, GroupQuantize, RowBlocks};
use dropless_core::{Backend, DType, Result, Tensor};

pub(super) const MXFP8: BlockFormat = BlockFormat::Mxfp8 { floor: false };
pub(super) const MXFP8_FLOOR: BlockFormat = BlockFormat::Mxfp8 { floor: true };
pub(super) const FP8: BlockFormat = BlockFormat::Fp8Block { f32_scale: false };
pub(super) const FP8_F32: BlockFormat = BlockFormat::Fp8Block { f32_scale: true };
pub(super) const NVFP4: BlockFormat = BlockFormat::Nvfp4 { stochastic: None };

/// Hosts with every level of vector instructions that this machine has.
pub(super) fn hosts() -> Vec<Host> {
    let levels = Simd::ALL.into_iter().filter(|level| level.available());
    levels.map(|simd| host(Some(simd))).collect()
}

pub(super) fn host(simd: Option<Simd>) -> Host {
    Host::new(HostOptions { simd, threads: 2, ..HostOptions::default() }).expect("the host is always there")
}

/// What to quantize.
#[derive(Clone, Debug)]
pub(super) struct Problem {
    pub(super) format: BlockFormat,
    /// bf16 codes if true, else f32.
    pub(super) bf16: bool,
    pub(super) x: Vec<f32>,
    /// Columns.
    pub(super) k: usize,
    pub(super) rows: Rows,
    /// The row of `x` that each row is.
    pub(super) gather: Option<Vec<u32>>,
}

#[derive(Clone, Debug)]
pub(super) enum Rows {
    /// Sizes of the groups; rows of `x` beyond them belong to no group.
    Ragged(Vec<usize>),
    Stacked {
        groups: usize,
        square: bool,
    },
}

/// The bytes of the results; scales are f32 for FP8 blocks, else bytes.
#[derive(Debug, PartialEq)]
pub(super) struct Output {
    pub(super) row_codes: Vec<u8>,
    pub(super) row_scales: Vec<u8>,
    pub(super) column_codes: Vec<u8>,
    pub(super) column_scales: Vec<u8>,
    pub(super) offsets: Vec<u32>,
    pub(super) amax: Vec<f32>,
}

/// The byte that a buffer is filled with before the op runs.
pub(super) const FILL: u8 = 0xA5;

fn filled(host: &dyn Backend, dtype: DType, shape: &[usize]) -> Tensor {
    let bytes = shape.iter().product::<usize>() * dtype.size();
    host.upload(dtype, shape, &vec![FILL; bytes]).expect("the memory is there")
}

/// Row-wise and (but for NVFP4) column-wise in one op.
pub(super) fn quantize(host: &dyn Backend, p: &Problem) -> Result<Output> {
    let (k, block) = (p.k, p.format.block());
    let sources = p.x.len() / k;
    let rows = p.gather.as_ref().map_or(sources, Vec::len);
    let gather = p.gather.as_ref().map(|index| host.upload(DType::U32, &[rows], index)).transpose()?;
    let (code, scale) = match p.format {
        BlockFormat::Mxfp8 { .. } => (DType::E4m3, DType::Ue8m0),
        BlockFormat::Fp8Block { .. } => (DType::E4m3, DType::F32),
        BlockFormat::Nvfp4 { .. } => (DType::E2m1x2, DType::E4m3),
    };
    let fp8 = scale == DType::F32;
    let nvfp4 = code == DType::E2m1x2;
    let mut shape = vec![rows, k];
    let mut offsets = None;
    let mut square = false;
    if let Rows::Stacked { groups, square: s } = p.rows {
        shape = vec![groups, rows / groups, k];
        square = s;
    }
    if let Rows::Ragged(sizes) = &p.rows {
        let mut ends = vec![0u32];
        ends.extend(sizes.iter().scan(0, |sum, &n| {
            *sum += u32::try_from(n).expect("small");
            Some(*sum)
        }));
        offsets = Some(host.upload(DType::U32, &[ends.len()], &ends)?);
    }
    let mut of_x = shape.clone();
    if gather.is_some() {
        of_x[0] = sources;
    }
    let x = if p.bf16 {
        host.upload(DType::Bf16, &of_x, &p.x.iter().map(|&v| bf16::from_f32(v)).collect::<Vec<_>>())?
    } else {
        host.upload(DType::F32, &of_x, &p.x)?
    };
    let last = shape.len() - 1;
    let with = |at: usize, extent: usize| {
        let mut shape = shape.clone();
        shape[at] = extent;
        shape
    };
    let row_codes = filled(host, code, &with(last, if nvfp4 { k / 2 } else { k }));
    let mut row_scales = with(last, k.div_ceil(block));
    if fp8 && square {
        row_scales[1] = shape[1].div_ceil(block);
    }
    let row_scales = filled(host, scale, &row_scales);
    let (codes, scales) = match &p.rows {
        Rows::Ragged(sizes) => {
            let padded = GroupQuantize::padded_rows(p.format, rows, sizes.len());
            (if fp8 { vec![k, padded] } else { vec![padded, k] }, vec![padded / block, k])
        }
        Rows::Stacked { groups, .. } => {
            let n = rows / groups;
            if fp8 {
                (vec![*groups, k, n], vec![*groups, k.div_ceil(block), n.div_ceil(block)])
            } else {
                (shape.clone(), with(1, n / block))
            }
        }
    };
    let column = if nvfp4 || (fp8 && offsets.is_none() && !square) {
        None
    } else {
        let out = offsets.as_ref().map(|o| filled(host, DType::U32, o.shape()));
        Some((filled(host, code, &codes), filled(host, scale, &scales), out))
    };
    let amax = nvfp4.then(|| filled(host, DType::F32, &[1]));
    GroupQuantize {
        x: &x,
        gather: gather.as_ref(),
        offsets: offsets.as_ref(),
        format: p.format,
        square,
        row: Some(RowBlocks { codes: &row_codes, scales: &row_scales }),
        column: column.as_ref().map(|(codes, scales, offsets)| ColumnBlocks {
            codes,
            scales,
            offsets: offsets.as_ref(),
        }),
        amax: amax.as_ref(),
    }
    .run(host)?;
    let bytes = |t: Option<&Tensor>| t.map_or(Ok(Vec::new()), |t| host.download::<u8>(t));
    Ok(Output {
        row_codes: bytes(Some(&row_codes))?,
        row_scales: bytes(Some(&row_scales))?,
        column_codes: bytes(column.as_ref().map(|c| &c.0))?,
        column_scales: bytes(column.as_ref().map(|c| &c.1))?,
        offsets: column.as_ref().and_then(|c| c.2.as_ref()).map_or(Ok(Vec::new()), |t| host.download(t))?,
        amax: amax.as_ref().map_or(Ok(Vec::new()), |t| host.download(t))?,
    })
}
