//! Matrix products over ragged groups of rows: which kernel, how the factors come in, and how many blocks.

use std::borrow::Cow;
use std::sync::Arc;

use dropless_core::ops::{Checked, GroupedGemm, Operand, Product, Ragged, Side};
use dropless_core::{DType, NumericModel, Result, Tensor};

use super::{mxfp8_dequantize, split};
use crate::device::Gpu;
use crate::driver::TensorMap;
use crate::kernel::{
    BF16, Binding, CHAIN, F32, FLOAT, FP8_BLOCK_SCALES, GROUP_ENDS, GROUPED_GEMM_OUT, Kernel, Launch, PRELUDE, RING,
    SIMT_GROUPED_GEMM, SM90, SM90_GROUPED_GEMM, SM90_GROUPED_GEMM_OUT, TILES, U32, scalars, word,
};

const OP: &str = "grouped_gemm";

scalars!(
    /// Extents: outputs and the chain as tiles.cuh has them; rows to gather from; what the offsets are multiples of.
    pub(crate) struct GemmScalars { groups, rows, columns, chain, a_sources, b_sources, offsets_block }
);

const fn tensors(elements: &'static [DType]) -> [Binding; 8] {
    [
        Binding::read("a", elements),
        Binding::read("a_gather", U32).optional(),
        Binding::read("a_scale", F32).optional(),
        Binding::read("b", elements),
        Binding::read("b_gather", U32).optional(),
        Binding::read("b_scale", F32).optional(),
        Binding::read("offsets", U32),
        Binding::in_place("out", FLOAT),
    ]
}

const TENSOR_CORE_CONSTANTS: &[&str] = &[
    "RAGGED_CHAIN",
    "ACCUMULATE",
    "A_CHAIN_LAST",
    "B_CHAIN_LAST",
    "A_SPLIT",
    "B_SPLIT",
    "A_LOAD",
    "B_LOAD",
    "STORE",
    "TILE_COLUMNS",
    "STAGES",
    "CLUSTER",
];

pub(crate) static SM90_BF16_GROUPED_GEMM: Kernel<GemmScalars> = Kernel::new(
    "sm90_bf16_grouped_gemm",
    &[
        PRELUDE,
        SM90,
        RING,
        GROUP_ENDS,
        TILES,
        GROUPED_GEMM_OUT,
        FP8_BLOCK_SCALES,
        CHAIN,
        SIMT_GROUPED_GEMM,
        SM90_GROUPED_GEMM,
        SM90_GROUPED_GEMM_OUT,
        include_str!("../../../kernels/sm90_bf16_grouped_gemm.cu"),
    ],
    &tensors(BF16),
)
.constants(TENSOR_CORE_CONSTANTS)
.maps(3);

pub(crate) static SM90_E4M3_GROUPED_GEMM: Kernel<GemmScalars> = Kernel::new(
    "sm90_e4m3_grouped_gemm",
    &[
        PRELUDE,
        SM90,
        RING,
        GROUP_ENDS,
        TILES,
        GROUPED_GEMM_OUT,
        FP8_BLOCK_SCALES,
        CHAIN,
        SIMT_GROUPED_GEMM,
        SM90_GROUPED_GEMM,
        SM90_GROUPED_GEMM_OUT,
        include_str!("../../../kernels/sm90_e4m3_grouped_gemm.cu"),
    ],
    &tensors(&[DType::E4m3]),
)
.constants(TENSOR_CORE_CONSTANTS)
.maps(3);

pub(crate) static F32_GROUPED_GEMM: Kernel<GemmScalars> = Kernel::new(
    "f32_grouped_gemm",
    &[
        PRELUDE,
        GROUP_ENDS,
        TILES,
        GROUPED_GEMM_OUT,
        FP8_BLOCK_SCALES,
        CHAIN,
        SIMT_GROUPED_GEMM,
        include_str!("../../../kernels/f32_grouped_gemm.cu"),
    ],
    &tensors(&[DType::F32, DType::Bf16, DType::E4m3]),
)
.constants(&["RAGGED_CHAIN", "ACCUMULATE", "A_CHAIN_LAST", "B_CHAIN_LAST", "A_SPLIT", "B_SPLIT", "TILE"]);

/// Sides of a tile in simt_grouped_gemm.cuh, of which a thread has 4 x 4 outputs, and the blocks of a multiprocessor.
const SIMT_TILES: [usize; 2] = [64, 32];
const SIMT_BLOCKS: usize = 4;
/// Rows of a tile, bytes of one of its rows in shared memory, and threads of a block in sm90_grouped_gemm.cuh.
const TILE_ROWS: usize = 128;
const ROW_BYTES: usize = 128;
const TENSOR_CORE_THREADS: u32 = 384;
/// Columns of a tile. The wider one needs less shared-memory bandwidth for a product.
const TILE_COLUMNS: [usize; 2] = [128, 256];
/// Shared memory for the ring of tiles: 6 stages of the narrower tile, 4 of the wider one, or 5 stages with the scales of
/// FP8 blocks' columns.
const RING_BYTES: usize = 192 << 10;
const SCALES_BYTES: usize = 128 * 4;
/// A warp's rows of results in sm90_grouped_gemm_out.cuh, and the slots of all eight warps.
const OUT_ROWS: usize = 16;
const OUT_BYTES: usize = 8 * 2 * OUT_ROWS * ROW_BYTES;
/// The first tile is aligned at an atom of the swizzle.
const ATOM_BYTES: usize = 1024;

/// What the kernel is compiled under for the tests: each kind of product with each way of coming in, and both tiles.
#[cfg(test)]
pub(super) const BF16_CONSTANTS: &[&[u32]] = &[
    &[0, 0, 1, 1, 0, 0, 0, 0, 0, 256, 4, 2],
    &[0, 0, 1, 1, 0, 0, 1, 0, 0, 256, 4, 1],
    &[0, 0, 1, 1, 0, 0, 2, 2, 2, 128, 6, 1],
    &[0, 0, 1, 0, 0, 0, 0, 0, 0, 128, 6, 2],
    &[0, 0, 1, 0, 0, 0, 0, 0, 0, 256, 4, 2],
    &[0, 1, 1, 0, 0, 0, 1, 0, 1, 256, 4, 1],
    &[0, 0, 1, 0, 0, 0, 2, 2, 2, 256, 4, 1],
    &[1, 0, 0, 0, 0, 0, 0, 0, 0, 256, 4, 2],
    &[1, 1, 0, 0, 0, 0, 0, 0, 1, 256, 4, 2],
    &[1, 1, 0, 0, 0, 0, 0, 1, 1, 128, 6, 1],
    &[1, 1, 0, 0, 0, 0, 1, 1, 1, 256, 4, 1],
    &[1, 1, 0, 0, 0, 0, 2, 2, 2, 128, 6, 1],
    &[0, 0, 1, 1, 0, 1, 0, 0, 0, 128, 6, 2],
    &[0, 0, 1, 1, 0, 1, 1, 2, 2, 128, 6, 1],
    &[0, 0, 1, 0, 1, 1, 0, 0, 0, 128, 6, 2],
    &[0, 0, 1, 0, 1, 1, 2, 2, 2, 128, 6, 1],
    &[1, 1, 0, 0, 1, 0, 0, 0, 1, 128, 6, 1],
    &[1, 1, 0, 0, 1, 0, 2, 2, 2, 128, 6, 1],
];
#[cfg(test)]
pub(super) const E4M3_CONSTANTS: &[&[u32]] = &[
    &[0, 0, 1, 1, 0, 0, 0, 0, 0, 256, 4, 2],
    &[0, 0, 1, 1, 0, 0, 1, 0, 0, 256, 4, 2],
    &[0, 0, 1, 1, 0, 0, 0, 0, 0, 128, 6, 1],
    &[0, 0, 1, 1, 0, 0, 2, 2, 2, 256, 4, 1],
    &[1, 1, 1, 1, 0, 0, 0, 0, 1, 128, 5, 2],
    &[1, 0, 1, 1, 0, 0, 0, 0, 0, 128, 5, 1],
    &[1, 0, 1, 1, 0, 0, 2, 2, 2, 128, 5, 1],
];

/// How a factor comes into shared memory, or a result leaves it: `Load` of sm90_grouped_gemm.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// By TMA.
    Boxes = 0,
    /// 16 bytes at a time.
    Pieces = 1,
    /// Element by element.
    Elements = 2,
}

/// What TMA and 16-byte copies want of an address and of the distance between rows.
const ALIGNMENT: usize = 16;

fn aligned(tensor: &Tensor, columns: usize) -> bool {
    [tensor.offset(), columns].iter().all(|n| (n * tensor.dtype().size()).is_multiple_of(ALIGNMENT))
}

/// How the result goes out.
fn store(out: &Tensor, columns: usize, accumulate: bool) -> Load {
    match accumulate {
        _ if !aligned(out, columns) => Load::Elements,
        true => Load::Pieces,
        false => Load::Boxes,
    }
}

/// An operand as the kernels take it.
struct Factor<'a> {
    elements: Cow<'a, Tensor>,
    gather: Option<&'a Tensor>,
    scale_inv: Option<&'a Tensor>,
    /// f32 values in planes.
    split: bool,
    side: Side,
}

impl<'a> Factor<'a> {
    fn of(gpu: &Arc<Gpu>, operand: Operand<'a>, side: Side) -> Result<Factor<'a>> {
        let (elements, gather, scale_inv) = match operand {
            Operand::Plain { values, gather } => (Cow::Borrowed(values), gather, None),
            Operand::Split { values } => (Cow::Owned(split::run(gpu, values)?), None, None),
            Operand::Mxfp8 { codes, scales, gather } => {
                (Cow::Owned(mxfp8_dequantize::run(gpu, codes, scales, !side.chain_last)?), gather, None)
            }
            Operand::Fp8Block { codes, scale_inv, gather } => (Cow::Borrowed(codes), gather, Some(scale_inv)),
        };
        let side = if scale_inv.is_some() { side.chain_last() } else { side };
        Ok(Factor { elements, gather, scale_inv, split: matches!(operand, Operand::Split { .. }), side })
    }

    /// Extents in memory, the fastest first.
    fn extents(&self) -> [usize; 3] {
        let Side { matrices, rows, chain, chain_last, .. } = self.side;
        let matrices = if self.split { split::PLANES * matrices } else { matrices };
        if chain_last { [chain, rows, matrices] } else { [rows, chain, matrices] }
    }

    fn load(&self) -> Load {
        // The scales of columns come by TMA with their codes.
        let scales = self.scale_inv.filter(|_| self.side.ragged == Ragged::Chain);
        let all_aligned =
            aligned(&self.elements, self.extents()[0]) && scales.is_none_or(|scales| aligned(scales, scales.cols()));
        match self.gather {
            _ if self.elements.is_empty() || !all_aligned => Load::Elements,
            Some(_) => Load::Pieces,
            None => Load::Boxes,
        }
    }

    /// The boxes that make a tile of `rows` rows (64 of them if they are last in memory).
    fn map(&self, gpu: &Arc<Gpu>, rows: usize) -> Result<TensorMap> {
        if self.load() != Load::Boxes {
            return Ok(TensorMap::default());
        }
        let wide = ROW_BYTES / self.elements.dtype().size();
        let tile = [wide, if self.side.chain_last { rows } else { wide }, 1];
        gpu.tensor_map(OP, &self.elements, self.extents(), tile)
    }
}

/// Tiles of at most this many rows and columns, as an upper bound: the groups' sizes are not known here.
fn tiles(extents: [usize; 3], wgrad: bool, [tile_rows, tile_columns]: [usize; 2]) -> usize {
    let [groups, rows, columns] = extents;
    let down = if wgrad { groups * rows.div_ceil(tile_rows) } else { groups + rows.div_ceil(tile_rows) };
    down * columns.div_ceil(tile_columns)
}

pub(crate) fn run(gpu: &Arc<Gpu>, op: &Checked<GroupedGemm<'_>>, model: NumericModel) -> Result<()> {
    let product = op.product();
    let Product { groups, m: rows, n: columns, k: chain, sides } = product;
    if op.out.is_empty() {
        return Ok(());
    }
    let wgrad = product.ragged_chain();
    let [a, b] = [Factor::of(gpu, op.a, sides[0])?, Factor::of(gpu, op.b, sides[1])?];

    let scalars = GemmScalars {
        groups: word(groups),
        rows: word(rows),
        columns: word(columns),
        chain: word(chain),
        a_sources: word(a.elements.rows()),
        b_sources: word(b.elements.rows()),
        offsets_block: word(op.offsets_block()),
    };
    let tensors = [
        Some(&*a.elements),
        a.gather,
        a.scale_inv,
        Some(&*b.elements),
        b.gather,
        b.scale_inv,
        Some(op.offsets),
        Some(op.out),
    ];
    let mut constants =
        [wgrad, op.accumulate, a.side.chain_last, b.side.chain_last, a.split, b.split].map(u32::from).to_vec();
    let tiles = |tile| tiles([groups, rows, columns], wgrad, tile);
    let kernel = match a.elements.dtype() {
        DType::Bf16 if model != NumericModel::F32 => &SM90_BF16_GROUPED_GEMM,
        DType::E4m3 if model != NumericModel::F32 => &SM90_E4M3_GROUPED_GEMM,
        _ => {
            // The wider tile, if it leaves no multiprocessor without work.
            let [wide, narrow] = SIMT_TILES;
            let side = if tiles([wide; 2]) >= 2 * gpu.multiprocessors as usize { wide } else { narrow };
            constants.push(word(side));
            let blocks = tiles([side; 2]).min(64 / side * SIMT_BLOCKS * gpu.multiprocessors as usize);
            let launch = Launch::new(&F32_GROUPED_GEMM, scalars, &tensors, blocks, word(side / 4 * (side / 4)));
            return gpu.launch(Launch { constants: &constants, ..launch });
        }
    };

    let multiprocessors = gpu.multiprocessors as usize;
    let [narrow, wide] = TILE_COLUMNS;
    // The wider tile, if it leaves no multiprocessor without work. Products in parts need twice the registers, and so do
    // those with scales of columns.
    let scaled = a.scale_inv.is_some() && wgrad;
    let halves = a.split || b.split || scaled;
    let wide_enough = columns > narrow && tiles([TILE_ROWS, wide]) >= multiprocessors;
    let tile_columns = if !halves && wide_enough { wide } else { narrow };
    // Pairs of blocks share columns, if groups have several rows of tiles.
    let tall = if wgrad { rows } else { rows / groups };
    let shared = b.load() == Load::Boxes && (a.load() == Load::Boxes || a.scale_inv.is_some() && !wgrad);
    let cluster = if shared && tall >= 2 * TILE_ROWS && multiprocessors > 1 { 2 } else { 1 };
    let stage = (TILE_ROWS + tile_columns) * ROW_BYTES;
    let stages = RING_BYTES / (stage + if scaled { SCALES_BYTES } else { 0 });
    let store = store(op.out, columns, op.accumulate);
    let out = match store {
        Load::Boxes => {
            let wide = ROW_BYTES / op.out.dtype().size();
            let matrices = if wgrad { groups } else { 1 };
            gpu.tensor_map(OP, op.out, [columns, rows, matrices], [wide, OUT_ROWS, 1])?
        }
        Load::Pieces | Load::Elements => TensorMap::default(),
    };
    constants.extend([a.load() as u32, b.load() as u32, store as u32, word(tile_columns), word(stages), word(cluster)]);
    let blocks = tiles([TILE_ROWS, tile_columns]).div_ceil(cluster).min(multiprocessors / cluster) * cluster;
    gpu.launch(Launch {
        constants: &constants,
        maps: &[a.map(gpu, TILE_ROWS)?, b.map(gpu, tile_columns / cluster)?, out],
        shared: word(stages * stage + OUT_BYTES + ATOM_BYTES),
        ..Launch::new(kernel, scalars, &tensors, blocks, TENSOR_CORE_THREADS)
    })
}
