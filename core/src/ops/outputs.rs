//! What each op writes, for those who compare it ([`crate::lockstep`]).

use super::{AllToAll, Attention, GroupQuantize, GroupedGemm, Map, Offload, Route};
use crate::tensor::Tensor;

/// A tensor that an op writes, with the field's name.
pub type Output<'a> = (&'static str, &'a Tensor);

impl<'a> GroupedGemm<'a> {
    /// What it writes.
    pub fn outputs(&self) -> Vec<Output<'a>> {
        vec![("out", self.out)]
    }
}

impl<'a> GroupQuantize<'a> {
    /// What it writes.
    pub fn outputs(&self) -> Vec<Output<'a>> {
        let mut outputs = Vec::new();
        if let Some(row) = self.row {
            outputs.extend([("row.codes", row.codes), ("row.scales", row.scales)]);
        }
        if let Some(column) = self.column {
            outputs.extend([("column.codes", column.codes), ("column.scales", column.scales)]);
            outputs.extend(column.offsets.map(|t| ("column.offsets", t)));
        }
        outputs.extend(self.amax.map(|t| ("amax", t)));
        outputs
    }
}

impl<'a> AllToAll<'a> {
    /// What it writes.
    pub fn outputs(&self) -> Vec<Output<'a>> {
        vec![("recv", self.recv)]
    }
}

impl<'a> Offload<'a> {
    /// What it writes.
    pub fn outputs(&self) -> Vec<Output<'a>> {
        vec![("to", self.to)]
    }
}

impl<'a> Attention<'a> {
    /// What it writes.
    pub fn outputs(&self) -> Vec<Output<'a>> {
        match self {
            Attention::Forward(op) => vec![("out", op.out), ("lse", op.lse)],
            Attention::Backward(op) => vec![("d_q", op.d_q), ("d_k", op.d_k), ("d_v", op.d_v)],
        }
    }
}

impl<'a> Route<'a> {
    /// What it writes.
    pub fn outputs(&self) -> Vec<Output<'a>> {
        match self {
            Route::TopK(op) => {
                let mut outputs =
                    vec![("scores", op.scores), ("ids", op.ids), ("weights", op.weights), ("counts", op.counts)];
                if let Some(balance) = &op.balance {
                    outputs.extend([("balance.counts", balance.counts), ("balance.loss", balance.loss)]);
                }
                outputs
            }
            Route::TopKGrad(op) => vec![("d_logits", op.d_logits)],
            Route::Plan(op) => vec![("rows", op.rows), ("counts", op.counts), ("positions", op.positions)],
            Route::Layout(op) => vec![
                ("offsets", op.offsets),
                ("slot_rows", op.slot_rows),
                ("slot_weights", op.slot_weights),
                ("row_slots", op.row_slots),
            ],
        }
    }
}

impl<'a> Map<'a> {
    /// What it writes.
    pub fn outputs(&self) -> Vec<Output<'a>> {
        match self {
            Map::Add(op) => vec![("out", op.out)],
            Map::AdamW(op) => {
                let mut outputs = vec![("param", op.param), ("m", op.m), ("v", op.v)];
                outputs.extend(op.half.map(|t| ("half", t)));
                outputs
            }
            Map::BiasUpdate(op) => vec![("bias", op.bias)],
            Map::Cast(op) => vec![("out", op.out)],
            Map::ClipScale(op) => vec![("out", op.out)],
            Map::Combine(op) => vec![("out", op.out)],
            Map::CopyColumns(op) => vec![("out", op.out)],
            Map::CrossEntropy(op) => {
                let mut outputs = vec![("loss", op.loss)];
                outputs.extend(op.d_logits.map(|t| ("d_logits", t)));
                outputs
            }
            Map::EmbeddingGrad(op) => vec![("d_table", op.d_table)],
            Map::Fill(op) => vec![("out", op.out)],
            Map::GatherRows(op) => vec![("out", op.out)],
            Map::Mla(op) => vec![("q", op.q), ("k", op.k), ("v", op.v)],
            Map::MlaGrad(op) => vec![("d_q_in", op.d_q_in), ("d_kv", op.d_kv), ("d_k_rope", op.d_k_rope)],
            Map::RmsNorm(op) => vec![("out", op.out), ("rstd", op.rstd)],
            Map::RmsNormGrad(op) => vec![("dx", op.dx), ("d_weight", op.d_weight)],
            Map::Rotary(op) => vec![("out", op.out)],
            Map::SumRows(op) => vec![("out", op.out)],
            Map::SumSquares(op) => vec![("out", op.out)],
            Map::Swiglu(op) => vec![("out", op.out)],
            Map::SwigluGrad(op) => {
                let mut outputs = vec![("d_gate_up", op.d_gate_up)];
                outputs.extend(op.d_weight.map(|t| ("d_weight", t)));
                outputs
            }
            Map::TreeSum(op) => vec![("out", op.out)],
        }
    }
}
