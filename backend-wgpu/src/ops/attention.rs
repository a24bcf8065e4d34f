//! Attention, one tile of keys after the other, so that the scores in memory are those of one tile.
//!
//! Every product is the same shader under other strides; its chains continue from tile to tile in f32 sums.

use dropless_core::numerics::mma::Tensorcore;
use dropless_core::ops::{Attention, AttentionBackward, AttentionForward, AttentionShape, Checked, KEY_TILE};
use dropless_core::{DType, NumericModel, Result, Tensor};

use super::map::elementwise;
use crate::buffer;
use crate::dispatch::{Dispatch, Stream, word};
use crate::shader::{Binding, F32, FLOAT, FORMATS, MATH, MMA, OPERANDS, PRELUDE, ROW, Shader, U32, params};

/// Rows and columns of sums of one invocation, with a matrix unit and without.
const TILE: [usize; 2] = [4, 2];
/// Invocations of a workgroup along rows and along columns.
const SIDE: usize = 8;

params!(
    /// Extents, and distances in memory in elements.
    ProductParams {
        heads_of_all,
        heads,
        rows,
        columns,
        chain,
        row_tiles,
        column_tiles,
        sum_rows,
        first_row,
        a_first,
        a_sequence,
        a_head,
        a_row,
        a_chain,
        b_first,
        b_sequence,
        b_head,
        b_share,
        b_column,
        b_chain,
    }
);

pub(crate) static PRODUCT: Shader = Shader {
    name: "attention_product",
    files: &[PRELUDE, FORMATS, MMA, OPERANDS, include_str!("../../../shaders/attention_product.wgsl")],
    params: ProductParams::DECLARATION,
    bindings: &[
        Binding::read("a", FLOAT),
        Binding::read("b", FLOAT),
        Binding::read("factors", F32).optional(),
        Binding::in_place("sums", F32),
    ],
    constants: &[
        "TILE",
        "STEP",
        "FRACTION_BITS",
        "RESULT_BITS",
        "MODEL",
        "A_CHAIN_LAST",
        "B_CHAIN_LAST",
        "A_QUADS",
        "B_QUADS",
    ],
};

params!(
    /// Extents of a tile of keys and the rows that may see it; `scale`: the bits of an f32.
    TileParams { elements, heads, sequence, rows, first_key, keys, scale }
);

pub(crate) static SOFTMAX: Shader = Shader {
    name: "attention_softmax",
    files: &[PRELUDE, FORMATS, MATH, include_str!("../../../shaders/attention_softmax.wgsl")],
    params: TileParams::DECLARATION,
    bindings: &[
        Binding::read("scores", F32),
        Binding::read("start", U32).optional(),
        Binding::in_place("largest", F32),
        Binding::in_place("total", F32),
        Binding::write("probabilities", FLOAT),
        Binding::write("factors", F32),
    ],
    constants: &["TILE_KEYS"],
};

pub(crate) static DIFFERENTIATE: Shader = Shader {
    name: "attention_differentiate",
    files: &[PRELUDE, FORMATS, MATH, include_str!("../../../shaders/attention_differentiate.wgsl")],
    params: TileParams::DECLARATION,
    bindings: &[
        Binding::read("scores", F32),
        Binding::read("d_scores", F32),
        Binding::read("start", U32).optional(),
        Binding::read("lse", F32),
        Binding::read("delta", F32),
        Binding::write("probabilities", FLOAT),
        Binding::write("slopes", FLOAT),
    ],
    constants: &["TILE_KEYS"],
};

params!(
    /// Extents; `elements`: those of the result.
    FinishParams { elements, heads, sequence, dim }
);

pub(crate) static FINISH: Shader = Shader {
    name: "attention_finish",
    files: &[PRELUDE, FORMATS, MATH, include_str!("../../../shaders/attention_finish.wgsl")],
    params: FinishParams::DECLARATION,
    bindings: &[
        Binding::read("sums", F32),
        Binding::read("largest", F32),
        Binding::read("total", F32),
        Binding::write("out", FLOAT),
        Binding::write("lse", F32),
    ],
    constants: &[],
};

params!(
    /// Heads of all tokens, and their elements.
    DeltaParams { rows, columns }
);

pub(crate) static DELTA: Shader = Shader {
    name: "attention_delta",
    files: &[PRELUDE, FORMATS, ROW, include_str!("../../../shaders/attention_delta.wgsl")],
    params: DeltaParams::DECLARATION,
    bindings: &[Binding::read("d_out", FLOAT), Binding::read("out", FLOAT), Binding::write("delta", F32)],
    constants: &[],
};

params!(
    /// Extents of the sums and of the tensor; `scale`: the bits of an f32.
    StoreParams { elements, heads, sequence, rows, dim, sum_rows, first_row, scale }
);

pub(crate) static STORE: Shader = Shader {
    name: "attention_store",
    files: &[PRELUDE, FORMATS, include_str!("../../../shaders/attention_store.wgsl")],
    params: StoreParams::DECLARATION,
    bindings: &[Binding::read("sums", F32), Binding::write("out", FLOAT)],
    constants: &[],
};

pub(crate) fn run(stream: &Stream, op: &Checked<Attention<'_>>, model: NumericModel) -> Result<()> {
    match &**op {
        Attention::Forward(op) => forward(&Pass { stream, shape: op.shape, dtype: op.q.dtype(), model }, op),
        Attention::Backward(op) => backward(&Pass { stream, shape: op.shape, dtype: op.q.dtype(), model }, op),
    }
}

/// What every step needs.
struct Pass<'a> {
    stream: &'a Stream,
    shape: AttentionShape,
    /// The operands' type.
    dtype: DType,
    model: NumericModel,
}

/// A factor `[rows, chain]` of each head of each sequence, in memory.
struct Side<'a> {
    tensor: &'a Tensor,
    /// Of the first head of the first sequence.
    first: usize,
    /// From sequence to sequence, from head to head, from row to row, and along the chain.
    sequence: usize,
    head: usize,
    row: usize,
    chain: usize,
}

impl Side<'_> {
    /// Whether four elements that are neighbours in memory, from any row or chain element on, begin at a multiple of
    /// four.
    fn quads(&self) -> bool {
        let steps = [self.tensor.offset(), self.first, self.sequence, self.head, self.row.max(self.chain)];
        steps.into_iter().all(|step| step.is_multiple_of(4))
    }

    fn chain_last(&self) -> bool {
        self.chain == 1
    }

    /// With rows and chain exchanged.
    fn turned(self) -> Self {
        Side { row: self.chain, chain: self.row, ..self }
    }
}

/// The sums `[batch * heads, sum_rows, columns]` that a product goes on with.
struct Sums<'a> {
    tensor: &'a Tensor,
    heads: usize,
    sum_rows: usize,
    /// The rows that take part.
    first_row: usize,
    rows: usize,
    columns: usize,
}

impl Pass<'_> {
    fn scratch(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        buffer::alloc(&self.stream.gpu, dtype, shape)
    }

    /// Query heads that share a key head.
    fn share(&self) -> usize {
        self.shape.heads / self.shape.kv_heads
    }

    /// Rows from `first` on of a tensor `[tokens, heads * dim]`, the chain along the head.
    fn rows<'t>(&self, tensor: &'t Tensor, dim: usize, first: usize) -> Side<'t> {
        let width = tensor.cols();
        Side { tensor, first: first * width, sequence: self.shape.sequence * width, head: dim, row: width, chain: 1 }
    }

    /// Rows from `first` on of probabilities `[batch * heads, sequence, KEY_TILE]`, the chain along the keys.
    fn tile_rows<'t>(&self, tensor: &'t Tensor, first: usize) -> Side<'t> {
        let head = self.shape.sequence * KEY_TILE;
        Side { tensor, first: first * KEY_TILE, sequence: self.shape.heads * head, head, row: KEY_TILE, chain: 1 }
    }

    /// Continues every chain of `sums`. A head of `b` serves `share` heads.
    fn product(
        &self,
        a: &Side<'_>,
        b: &Side<'_>,
        share: usize,
        chain: usize,
        sums: &Sums<'_>,
        factors: Option<&Tensor>,
    ) -> Result<()> {
        let unit = if self.dtype == DType::F32 { None } else { Tensorcore::of_bf16(self.model) };
        let tile = TILE[usize::from(unit.is_none())];
        let [row_tiles, column_tiles] = [sums.rows, sums.columns].map(|extent| extent.div_ceil(SIDE * tile));
        let heads_of_all = self.shape.batch * sums.heads;
        let params = ProductParams {
            heads_of_all: word(heads_of_all),
            heads: word(sums.heads),
            rows: word(sums.rows),
            columns: word(sums.columns),
            chain: word(chain),
            row_tiles: word(row_tiles),
            column_tiles: word(column_tiles),
            sum_rows: word(sums.sum_rows),
            first_row: word(sums.first_row),
            a_first: word(a.first),
            a_sequence: word(a.sequence),
            a_head: word(a.head),
            a_row: word(a.row),
            a_chain: word(a.chain),
            b_first: word(b.first),
            b_sequence: word(b.sequence),
            b_head: word(b.head),
            b_share: word(share),
            b_column: word(b.row),
            b_chain: word(b.chain),
        };
        // A chain of f32 fma needs no lookahead.
        let f32_chain = Tensorcore { step: 1, fraction_bits: 0, result_bits: 0 };
        let Tensorcore { step, fraction_bits, result_bits } = unit.unwrap_or(f32_chain);
        let constants = [
            word(tile),
            word(step),
            fraction_bits.cast_unsigned(),
            result_bits.cast_unsigned(),
            u32::from(unit.is_some()),
            u32::from(a.chain_last()),
            u32::from(b.chain_last()),
            u32::from(unit.is_some() && a.quads()),
            u32::from(unit.is_some() && b.quads()),
        ];
        self.stream.dispatch(Dispatch {
            shader: &PRODUCT,
            tensors: &[Some(a.tensor), Some(b.tensor), factors, Some(sums.tensor)],
            constants: &constants,
            params: params.words(),
            workgroups: (heads_of_all * row_tiles * column_tiles) as u64,
        })
    }

    fn elements(
        &self,
        shader: &'static Shader,
        tensors: &[Option<&Tensor>],
        constants: &[u32],
        params: Vec<u32>,
        elements: usize,
    ) -> Result<()> {
        let workgroups = elements.div_ceil(64) as u64;
        self.stream.dispatch(Dispatch { shader, tensors, constants, params, workgroups })
    }

    /// The first key and the number of keys of each tile.
    fn tiles(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let sequence = self.shape.sequence;
        (0..sequence).step_by(KEY_TILE).map(move |first| (first, KEY_TILE.min(sequence - first)))
    }

    /// `elements`: those of a row, times the rows that may see the tile.
    fn tile_params(&self, first_key: usize, keys: usize, elements: usize) -> TileParams {
        let AttentionShape { heads, sequence, scale, .. } = self.shape;
        TileParams {
            elements: word(elements),
            heads: word(heads),
            sequence: word(sequence),
            rows: word(sequence - first_key),
            first_key: word(first_key),
            keys: word(keys),
            scale: scale.to_bits(),
        }
    }

    /// Products of the rows that may see a tile with its keys, from zero, `[batch * heads, sequence, keys]`.
    fn scores(&self, a: &Side<'_>, b: &Side<'_>, dim: usize, first_key: usize, keys: usize) -> Result<Tensor> {
        let AttentionShape { batch, sequence, heads, .. } = self.shape;
        // New memory is zero.
        let scores = self.scratch(DType::F32, &[batch * heads, sequence, keys])?;
        let rows = sequence - first_key;
        let sums = Sums { tensor: &scores, heads, sum_rows: sequence, first_row: first_key, rows, columns: keys };
        self.product(a, b, self.share(), dim, &sums, None)?;
        Ok(scores)
    }

    /// Stores `sums`, all of whose rows take part, as the rows from `first_row` on of a gradient.
    fn store(&self, sums: &Sums<'_>, out: &Tensor, first_row: usize, scale: f32) -> Result<()> {
        let elements = self.shape.batch * sums.heads * sums.rows * sums.columns;
        let params = StoreParams {
            elements: word(elements),
            heads: word(sums.heads),
            sequence: word(self.shape.sequence),
            rows: word(sums.rows),
            dim: word(sums.columns),
            sum_rows: word(sums.sum_rows),
            first_row: word(first_row),
            scale: scale.to_bits(),
        };
        self.elements(&STORE, &[Some(sums.tensor), Some(out)], &[], params.words(), elements)
    }
}

fn forward(pass: &Pass<'_>, op: &AttentionForward<'_>) -> Result<()> {
    let AttentionShape { batch, sequence, heads, qk_dim, v_dim, .. } = pass.shape;
    let all = batch * heads;
    let largest = pass.scratch(DType::F32, &[all, sequence])?;
    elementwise::fill_bits(pass.stream, &largest, f32::NEG_INFINITY.to_bits())?;
    // New memory is zero.
    let total = pass.scratch(DType::F32, &[all, sequence])?;
    let factors = pass.scratch(DType::F32, &[all, sequence])?;
    let sums = pass.scratch(DType::F32, &[all, sequence, v_dim])?;
    let probabilities = pass.scratch(pass.dtype, &[all, sequence, KEY_TILE])?;
    for (first_key, keys) in pass.tiles() {
        let rows = sequence - first_key;
        let (q, k) = (pass.rows(op.q, qk_dim, first_key), pass.rows(op.k, qk_dim, first_key));
        let scores = pass.scores(&q, &k, qk_dim, first_key, keys)?;
        let tensors = [Some(&scores), op.start, Some(&largest), Some(&total), Some(&probabilities), Some(&factors)];
        let params = pass.tile_params(first_key, keys, all * rows);
        pass.elements(&SOFTMAX, &tensors, &[word(KEY_TILE)], params.words(), all * rows)?;
        let sums = Sums { tensor: &sums, heads, sum_rows: sequence, first_row: first_key, rows, columns: v_dim };
        let (p, v) = (pass.tile_rows(&probabilities, first_key), pass.rows(op.v, v_dim, first_key).turned());
        pass.product(&p, &v, pass.share(), keys, &sums, Some(&factors))?;
    }
    let elements = op.out.len();
    let params =
        FinishParams { elements: word(elements), heads: word(heads), sequence: word(sequence), dim: word(v_dim) };
    let tensors = [Some(&sums), Some(&largest), Some(&total), Some(op.out), Some(op.lse)];
    pass.elements(&FINISH, &tensors, &[], params.words(), elements)
}

fn backward(pass: &Pass<'_>, op: &AttentionBackward<'_>) -> Result<()> {
    let AttentionShape { batch, sequence, heads, kv_heads, qk_dim, v_dim, scale } = pass.shape;
    let (all, share) = (batch * heads, pass.share());
    let delta = pass.scratch(DType::F32, &[batch * sequence * heads])?;
    pass.stream.dispatch(Dispatch {
        shader: &DELTA,
        tensors: &[Some(op.d_out), Some(op.out), Some(&delta)],
        constants: &[],
        params: DeltaParams { rows: word(delta.len()), columns: word(v_dim) }.words(),
        workgroups: delta.len() as u64,
    })?;
    let d_q = pass.scratch(DType::F32, &[all, sequence, qk_dim])?;
    let probabilities = pass.scratch(pass.dtype, &[all, sequence, KEY_TILE])?;
    let slopes = pass.scratch(pass.dtype, &[all, sequence, KEY_TILE])?;
    for (first_key, keys) in pass.tiles() {
        let rows = sequence - first_key;
        let (q, k) = (pass.rows(op.q, qk_dim, first_key), pass.rows(op.k, qk_dim, first_key));
        let (d_out, v) = (pass.rows(op.d_out, v_dim, first_key), pass.rows(op.v, v_dim, first_key));
        let scores = pass.scores(&q, &k, qk_dim, first_key, keys)?;
        let d_scores = pass.scores(&d_out, &v, v_dim, first_key, keys)?;
        let elements = all * rows * keys;
        let tensors =
            [Some(&scores), Some(&d_scores), op.start, Some(op.lse), Some(&delta), Some(&probabilities), Some(&slopes)];
        let params = pass.tile_params(first_key, keys, elements);
        pass.elements(&DIFFERENTIATE, &tensors, &[word(KEY_TILE)], params.words(), elements)?;

        let d_q = Sums { tensor: &d_q, heads, sum_rows: sequence, first_row: first_key, rows, columns: qk_dim };
        pass.product(&pass.tile_rows(&slopes, first_key), &k.turned(), share, keys, &d_q, None)?;

        for (tile, other, dim, out, scale) in
            [(&probabilities, op.d_out, v_dim, op.d_v, 1.0), (&slopes, op.q, qk_dim, op.d_k, scale)]
        {
            let sums = pass.scratch(DType::F32, &[batch * kv_heads, keys, dim])?;
            let sums = Sums { tensor: &sums, heads: kv_heads, sum_rows: keys, first_row: 0, rows: keys, columns: dim };
            // The query heads of each key head, in order.
            for member in 0..share {
                let mut a = pass.tile_rows(tile, first_key).turned();
                a.first += member * a.head;
                a.head *= share;
                let mut b = pass.rows(other, dim, first_key).turned();
                b.first += member * b.head;
                b.head *= share;
                pass.product(&a, &b, 1, rows, &sums, None)?;
            }
            pass.store(&sums, out, first_key, scale)?;
        }
    }
    let d_q = Sums { tensor: &d_q, heads, sum_rows: sequence, first_row: 0, rows: sequence, columns: qk_dim };
    pass.store(&d_q, op.d_q, 0, scale)
}
