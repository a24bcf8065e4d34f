//! The two layouts of a checkpoint: each expert's matrices under names of their own, as on the hub, or all experts of a
//! layer in one tensor, as in the memory of transformers.
//!
//! A tensor of a file is one piece of the model, or several pieces that follow each other: the fused `gate_up_proj`
//! `[experts, 2 * i, h]` is gate and up of the first expert, of the second, and so on. So every piece is a contiguous
//! part of a file's tensor in either layout.

use std::ops::Range;

use crate::names::Names;
use crate::params::{Kind, Spec};

/// How the experts of a layer lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Experts {
    /// A tensor for each matrix of each expert.
    Separate,
    /// `experts.gate_up_proj` and `experts.down_proj`.
    Fused,
}

/// How a checkpoint names and cuts its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// The experts.
    pub experts: Experts,
    /// Whether names begin with `model.` (but that of the output matrix).
    pub prefixed: bool,
}

const PREFIX: &str = "model.";
/// The only tensor outside of what `model.` stands for.
const HEAD: &str = "lm_head.";

impl Layout {
    /// The name in a file for a name with prefix.
    pub(super) fn in_file<'a>(&self, name: &'a str) -> &'a str {
        if self.prefixed { name } else { name.strip_prefix(PREFIX).unwrap_or(name) }
    }

    /// The name with prefix for a name in a file.
    pub(super) fn canonical(&self, name: &str) -> String {
        if self.prefixed || name.starts_with(HEAD) { name.to_owned() } else { format!("{PREFIX}{name}") }
    }
}

/// Whether a name in a file has the prefix.
pub(super) fn has_prefix(name: &str) -> bool {
    name.starts_with(PREFIX)
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    /// Its name, with prefix.
    pub(super) name: String,
    pub(super) shape: Vec<usize>,
    /// Its pieces, by their place in the model's order.
    pub(super) pieces: Range<usize>,
}

/// The tensors of a model's files, in the model's order.
pub(super) fn stored(specs: &[Spec], names: &Names, experts: Experts) -> Vec<Stored> {
    let mut out = Vec::new();
    let mut piece = 0;
    for spec in specs {
        if spec.kind == Kind::Expert && experts == Experts::Fused {
            let name = fused(names, &spec.pieces[0].0);
            let shape = [&[spec.groups], &spec.shape[..]].concat();
            out.push(Stored { name, shape, pieces: piece..piece + spec.pieces.len() });
            piece += spec.pieces.len();
            continue;
        }
        for (name, shape) in &spec.pieces {
            let name = if experts == Experts::Fused { fused(names, name) } else { name.clone() };
            out.push(Stored { name, shape: shape.clone(), pieces: piece..piece + 1 });
            piece += 1;
        }
    }
    out
}

/// The name, where experts are fused, of the tensor that holds the piece of this name.
pub fn fused(names: &Names, piece: &str) -> String {
    let name = piece.replacen(&format!(".{}.", names.moe), &format!(".{}.", Names::FUSED_MOE), 1);
    let Some((prefix, rest)) = name.split_once(".experts.") else { return name };
    let is_down = rest.ends_with(&format!(".{}.weight", names.expert.down));
    format!("{prefix}.experts.{}", if is_down { "down_proj" } else { "gate_up_proj" })
}
