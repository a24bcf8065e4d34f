//! The backward pass: one task for each key head of each sequence.

use std::ops::Range;

use rayon::prelude::*;

use super::{Context, Heads, OP, Rounded, scatter, zeros};
use crate::error::Result;
use crate::host::memory::{Floats, input, input_opt, min_rows};
use crate::host::product::product;
use crate::host::{Simd, simd};
use crate::numerics::{NumericModel, reduce};
use crate::ops::{AttentionBackward, differentiate, visible};

/// The gradients of one key head of one sequence.
struct Gradients {
    /// `[query heads of this key head, sequence, qk_dim]`.
    q: Vec<f32>,
    /// `[sequence, qk_dim]`.
    k: Vec<f32>,
    /// `[sequence, v_dim]`.
    v: Vec<f32>,
}

pub(super) fn run(op: &AttentionBackward<'_>, model: NumericModel, simd: Simd) -> Result<()> {
    let shape = op.shape;
    let (q, k, v) = (input(OP, op.q)?, input(OP, op.k)?, input(OP, op.v)?);
    let (d_out, out, lse) = (input(OP, op.d_out)?, input(OP, op.out)?, input(OP, op.lse)?);
    let start = input_opt(OP, op.start)?;
    let pass = Pass {
        context: Context { shape, start: start.as_ref().map(|s| s.u32()), model, simd },
        q: Heads::new(&q, shape.sequence, shape.heads, shape.qk_dim),
        k: Heads::new(&k, shape.sequence, shape.kv_heads, shape.qk_dim),
        v: Heads::new(&v, shape.sequence, shape.kv_heads, shape.v_dim),
        d_out: Heads::new(&d_out, shape.sequence, shape.heads, shape.v_dim),
        lse: lse.f32(),
        delta: deltas(d_out.floats(), out.floats(), shape.heads * shape.batch * shape.sequence, shape.v_dim),
    };
    let results: Vec<Gradients> = (0..shape.batch * shape.kv_heads)
        .into_par_iter()
        .map(|i| pass.key_head(i / shape.kv_heads, i % shape.kv_heads))
        .collect();

    let group = shape.heads / shape.kv_heads;
    let of = |batch: usize, kv_head: usize| &results[batch * shape.kv_heads + kv_head];
    scatter(op.d_q, shape.sequence, shape.qk_dim, |batch, row, head| {
        &of(batch, head / group).q[(head % group * shape.sequence + row) * shape.qk_dim..]
    })?;
    scatter(op.d_k, shape.sequence, shape.qk_dim, |batch, row, head| &of(batch, head).k[row * shape.qk_dim..])?;
    scatter(op.d_v, shape.sequence, shape.v_dim, |batch, row, head| &of(batch, head).v[row * shape.v_dim..])
}

/// delta of each row and head.
fn deltas(d_out: Floats<'_>, out: Floats<'_>, rows: usize, dim: usize) -> Vec<f32> {
    let delta = |(a, b): &mut (Vec<f32>, Vec<f32>), r: usize| {
        let (d_out, out) = (d_out.row(r, dim, a), out.row(r, dim, b));
        reduce::row(dim, |i| d_out[i] * out[i])
    };
    (0..rows).into_par_iter().with_min_len(min_rows(dim)).map_init(Default::default, delta).collect()
}

struct Pass<'a> {
    context: Context<'a>,
    q: Heads<'a>,
    k: Heads<'a>,
    v: Heads<'a>,
    d_out: Heads<'a>,
    /// `[tokens, heads]`.
    lse: &'a [f32],
    /// `[tokens, heads]`.
    delta: Vec<f32>,
}

/// A query head of a sequence, as one of the heads that share a key head.
#[derive(Clone, Copy)]
struct Head {
    batch: usize,
    kv_head: usize,
    /// Among the query heads of the key head.
    member: usize,
    /// Among all query heads.
    index: usize,
}

/// Memory for one block of rows and tile of keys.
struct Scratch {
    scores: Vec<f32>,
    d_scores: Vec<f32>,
    p: Rounded,
    ds: Rounded,
}

impl Pass<'_> {
    fn key_head(&self, batch: usize, kv_head: usize) -> Gradients {
        let shape = self.context.shape;
        let group = shape.heads / shape.kv_heads;
        let rounded = || Rounded::like(self.q.data);
        let mut scratch = Scratch { scores: Vec::new(), d_scores: Vec::new(), p: rounded(), ds: rounded() };
        let mut gradients = Gradients {
            q: vec![0.0; group * shape.sequence * shape.qk_dim],
            k: vec![0.0; shape.sequence * shape.qk_dim],
            v: vec![0.0; shape.sequence * shape.v_dim],
        };
        let heads =
            move || (0..group).map(move |member| Head { batch, kv_head, member, index: kv_head * group + member });
        for head in heads() {
            for rows in self.context.blocks() {
                for tile in self.context.tiles(batch, &rows) {
                    self.tile(head, &rows, &tile, &mut scratch, &mut gradients);
                }
            }
        }

        let nan = |x: &[f32]| x.iter().any(|x| x.is_nan());
        for head in heads() {
            for row in 0..shape.sequence {
                let d_q = &mut gradients.q[(head.member * shape.sequence + row) * shape.qk_dim..][..shape.qk_dim];
                if nan(d_q) {
                    self.row_alone(head, row, &mut scratch, d_q);
                }
            }
        }
        let each = gradients.k.chunks_mut(shape.qk_dim).zip(gradients.v.chunks_mut(shape.v_dim));
        for (key, (d_k, d_v)) in each.enumerate() {
            if nan(d_k) || nan(d_v) {
                self.key_alone(heads(), key, &mut scratch, d_k, d_v);
            }
        }

        // A chain that ended in -0 ends in +0.
        for d in gradients.q.iter_mut().chain(&mut gradients.k) {
            *d = (*d + 0.0) * shape.scale;
        }
        for d in &mut gradients.v {
            *d += 0.0;
        }
        gradients
    }

    /// The chains of one row's query, from the keys that it sees.
    fn row_alone(&self, head: Head, row: usize, scratch: &mut Scratch, d_q: &mut [f32]) {
        let Context { shape, model, simd, .. } = self.context;
        let Head { batch, kv_head, .. } = head;
        let start = self.context.start(batch, row);
        let sees = |key| start <= key && key <= row;
        // Then so is all of it.
        let i = self.place(head, row);
        if sees(row) && (self.lse[i].is_nan() || self.delta[i].is_nan()) {
            return;
        }
        let rows = row..row + 1;
        d_q.fill(0.0);
        for tile in self.context.tiles(batch, &rows) {
            self.slopes(head, &rows, &tile, scratch);
            let k = self.k.seen(batch, kv_head, &tile, sees);
            let (ds, k) = (scratch.ds.along_keys(1, tile.len()), k.along_rows(shape.qk_dim));
            product(model, simd, ds, k, tile.len(), d_q, shape.qk_dim);
        }
    }

    /// The chains of one key, and of its value, from the rows that see it.
    fn key_alone(
        &self,
        heads: impl Iterator<Item = Head> + Clone,
        key: usize,
        scratch: &mut Scratch,
        d_k: &mut [f32],
        d_v: &mut [f32],
    ) {
        let Context { shape, model, simd, .. } = self.context;
        let tile = key..key + 1;
        let sees = |head: Head, row| self.context.start(head.batch, row) <= key && key <= row;
        let is_nan = |head, row| sees(head, row) && self.lse[self.place(head, row)].is_nan();
        // Then so is all of both.
        if heads.clone().any(|head| (key..shape.sequence).any(|row| is_nan(head, row))) {
            return;
        }
        d_k.fill(0.0);
        d_v.fill(0.0);
        for head in heads {
            let Head { batch, index, .. } = head;
            let sees = |row| sees(head, row);
            for rows in self.context.blocks().filter(|rows| key < rows.end) {
                self.slopes(head, &rows, &tile, scratch);
                let (d_out, q) = (self.d_out.seen(batch, index, &rows, sees), self.q.seen(batch, index, &rows, sees));
                let (p, ds) = (scratch.p.along_rows(1), scratch.ds.along_rows(1));
                product(model, simd, p, d_out.along_rows(shape.v_dim), rows.len(), d_v, shape.v_dim);
                product(model, simd, ds, q.along_rows(shape.qk_dim), rows.len(), d_k, shape.qk_dim);
            }
        }
    }

    /// Where `lse` and `delta` have a row of a query head.
    fn place(&self, head: Head, row: usize) -> usize {
        (head.batch * self.context.shape.sequence + row) * self.context.shape.heads + head.index
    }

    /// Adds the part of one block of rows and one tile of keys.
    fn tile(
        &self,
        head: Head,
        rows: &Range<usize>,
        tile: &Range<usize>,
        scratch: &mut Scratch,
        gradients: &mut Gradients,
    ) {
        let Context { shape, model, simd, .. } = self.context;
        let Head { batch, kv_head, member, index } = head;
        self.slopes(head, rows, tile, scratch);
        let (n, keys, Scratch { p, ds, .. }) = (rows.len(), tile.len(), scratch);
        let d_v = &mut gradients.v[tile.start * shape.v_dim..];
        product(model, simd, p.along_rows(keys), self.d_out.columns(batch, index, rows), n, d_v, shape.v_dim);
        let d_k = &mut gradients.k[tile.start * shape.qk_dim..];
        product(model, simd, ds.along_rows(keys), self.q.columns(batch, index, rows), n, d_k, shape.qk_dim);
        let d_q = &mut gradients.q[(member * shape.sequence + rows.start) * shape.qk_dim..];
        product(model, simd, ds.along_keys(n, keys), self.k.columns(batch, kv_head, tile), keys, d_q, shape.qk_dim);
    }

    /// The probabilities and the gradients of the scores of some rows and keys, zero where a row does not see a key.
    fn slopes(&self, head: Head, rows: &Range<usize>, tile: &Range<usize>, scratch: &mut Scratch) {
        let Context { shape, model, simd, .. } = self.context;
        let Head { batch, kv_head, index, .. } = head;
        let (n, keys, factor) = (rows.len(), tile.len(), shape.exponent_factor());
        let Scratch { scores, d_scores, p, ds } = scratch;
        let (scores, d_scores) = (zeros(scores, n * keys), zeros(d_scores, n * keys));
        let (q, k) = (self.q.rows(batch, index, rows), self.k.rows(batch, kv_head, tile));
        product(model, simd, q, k, shape.qk_dim, scores, keys);
        let (d_out, v) = (self.d_out.rows(batch, index, rows), self.v.rows(batch, kv_head, tile));
        product(model, simd, d_out, v, shape.v_dim, d_scores, keys);
        simd::with(
            simd,
            #[inline(always)]
            || {
                for (row, (s, dp)) in rows.clone().zip(scores.chunks_mut(keys).zip(d_scores.chunks_mut(keys))) {
                    let seen = visible(row, self.context.start(batch, row), tile);
                    let i = self.place(head, row);
                    differentiate(factor, self.lse[i], self.delta[i], s, dp, seen);
                }
            },
        );
        p.store(simd, scores);
        ds.store(simd, d_scores);
    }
}
