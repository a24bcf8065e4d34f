//! The forward pass: each block of rows of each head walks over its tiles of keys.

use std::ops::Range;

use rayon::prelude::*;

use super::{BLOCK, Context, Heads, OP, Rounded, scatter, zeros};
use crate::error::Result;
use crate::host::memory::{input, input_opt};
use crate::host::product::product;
use crate::host::{Simd, simd};
use crate::numerics::NumericModel;
use crate::ops::{AttentionForward, OnlineSoftmax, visible};

/// The result of some rows.
struct Block {
    /// `[rows, v_dim]`.
    out: Vec<f32>,
    lse: Vec<f32>,
}

pub(super) fn run(op: &AttentionForward<'_>, model: NumericModel, simd: Simd) -> Result<()> {
    let shape = op.shape;
    let (q, k, v) = (input(OP, op.q)?, input(OP, op.k)?, input(OP, op.v)?);
    let start = input_opt(OP, op.start)?;
    let context = Context { shape, start: start.as_ref().map(|s| s.u32()), model, simd };
    let pass = Pass {
        context,
        q: Heads::new(&q, shape.sequence, shape.heads, shape.qk_dim),
        k: Heads::new(&k, shape.sequence, shape.kv_heads, shape.qk_dim),
        v: Heads::new(&v, shape.sequence, shape.kv_heads, shape.v_dim),
    };
    let blocks = shape.sequence.div_ceil(BLOCK);
    let places: Vec<_> = (0..shape.batch * shape.heads)
        .flat_map(|i| context.blocks().map(move |rows| (i / shape.heads, i % shape.heads, rows)))
        .collect();
    let results: Vec<Block> = places
        .into_par_iter()
        .map_init(
            || (Vec::new(), Rounded::like(pass.v.data)),
            |(scores, p), (batch, head, rows)| pass.block(batch, head, &rows, scores, p),
        )
        .collect();

    let of = |batch: usize, row: usize, head: usize| &results[(batch * shape.heads + head) * blocks + row / BLOCK];
    scatter(op.out, shape.sequence, shape.v_dim, |batch, row, head| {
        &of(batch, row, head).out[row % BLOCK * shape.v_dim..]
    })?;
    scatter(op.lse, shape.sequence, 1, |batch, row, head| &of(batch, row, head).lse[row % BLOCK..])
}

struct Pass<'a> {
    context: Context<'a>,
    q: Heads<'a>,
    k: Heads<'a>,
    v: Heads<'a>,
}

impl Pass<'_> {
    fn block(&self, batch: usize, head: usize, rows: &Range<usize>, scores: &mut Vec<f32>, p: &mut Rounded) -> Block {
        let mut block = self.rows(batch, head, rows, scores, p);
        let each = rows.clone().zip(block.out.chunks_mut(self.context.shape.v_dim)).zip(&block.lse);
        for ((row, out), lse) in each {
            // Where the sum of the probabilities is NaN, so is every result.
            if !lse.is_nan() && out.iter().any(|o| o.is_nan()) {
                out.copy_from_slice(&self.rows(batch, head, &(row..row + 1), scores, p).out);
            }
        }
        block
    }

    /// Rows that go through the keys together; a row alone meets no value that it does not see.
    fn rows(&self, batch: usize, head: usize, rows: &Range<usize>, scores: &mut Vec<f32>, p: &mut Rounded) -> Block {
        let Context { shape, model, simd, .. } = self.context;
        let (kv_head, factor) = (head * shape.kv_heads / shape.heads, shape.exponent_factor());
        let q = self.q.rows(batch, head, rows);
        let mut state = vec![OnlineSoftmax::EMPTY; rows.len()];
        let mut out = vec![0.0f32; rows.len() * shape.v_dim];
        for tile in self.context.tiles(batch, rows) {
            let keys = tile.len();
            let scores = zeros(scores, rows.len() * keys);
            product(model, simd, q, self.k.rows(batch, kv_head, &tile), shape.qk_dim, scores, keys);
            simd::with(
                simd,
                #[inline(always)]
                || {
                    let lines = scores.chunks_mut(keys).zip(out.chunks_mut(shape.v_dim)).zip(&mut state);
                    for (row, ((scores, out), state)) in rows.clone().zip(lines) {
                        let seen = visible(row, self.context.start(batch, row), &tile);
                        let alpha = state.advance(factor, scores, seen);
                        for o in out {
                            *o *= alpha;
                        }
                    }
                },
            );
            p.store(simd, scores);
            let p = p.along_keys(rows.len(), keys);
            let seen_by_row = (rows.len() == 1).then(|| {
                let start = self.context.start(batch, rows.start);
                self.v.seen(batch, kv_head, &tile, |key| start <= key && key <= rows.start)
            });
            let v = match &seen_by_row {
                Some(values) => values.along_rows(shape.v_dim),
                None => self.v.columns(batch, kv_head, &tile),
            };
            product(model, simd, p, v, keys, &mut out, shape.v_dim);
        }
        let rows = state.into_iter().zip(out.chunks_mut(shape.v_dim));
        let lse = simd::with(
            simd,
            #[inline(always)]
            || rows.map(|(state, out)| state.finish(out)).collect(),
        );
        Block { out, lse }
    }
}
