//! The parameters: where each lies, what it is called in a Hugging Face checkpoint, and its optimizer state.
//!
//! Parameters live in two arenas, one for the replicated ones (matrices first, then the gains, which do not decay) and
//! one for the experts of this rank; so the optimizer is a handful of ops however many parameters there are. Gradients
//! have one part for each gradient shard or, of experts, for each expert shard (NUMERICS.md, "Gradient shards and ranks").

use dropless_core::nn::{Tokens, Weight};
use dropless_core::ops::{Cast, Fill, TreeSum};
use dropless_core::{Backend, DType, Group, Memory, Tensor};

use crate::error::Result;

/// The arenas are padded to a multiple of this, the row length of the gradient norm's sums of squares. It also makes
/// every power-of-two number of ranks up to it divide an arena.
pub(crate) const ROW: usize = 1024;

/// A parameter's place among the others.
#[derive(Clone, Copy, Debug)]
pub(super) struct Id(usize);

/// How a tensor begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Initial {
    /// Normal with the configured deviation.
    Normal,
    /// Ones.
    One,
    /// Zeros.
    Zero,
}

/// A tensor of a Hugging Face checkpoint: a contiguous part of a parameter.
#[derive(Clone, Debug)]
pub struct Piece {
    /// Its name there.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// How it begins.
    pub initial: Initial,
    /// Whether other ranks have it too.
    pub replicated: bool,
    /// Master weights, f32.
    pub value: Tensor,
    /// Optimizer state; none for what the optimizer does not touch.
    pub moments: Option<Moments>,
}

/// AdamW's state of a piece, f32.
#[derive(Clone, Debug)]
pub struct Moments {
    /// First moment.
    pub m: Tensor,
    /// Second moment.
    pub v: Tensor,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    /// In products as f32 or bf16; decays.
    Matrix,
    /// In products as f32; decays.
    Router,
    /// A norm's weight; f32, does not decay.
    Gain,
    /// The router's selection bias; not the optimizer's.
    Bias,
    /// Matrices of this rank's experts; decay.
    Expert,
}

#[derive(Debug)]
struct Spec {
    kind: Kind,
    /// Leading dimension: local experts, or 1.
    groups: usize,
    shape: Vec<usize>,
    /// Names and shapes of the pieces, in order.
    pieces: Vec<(String, Vec<usize>)>,
    offset: usize,
}

impl Spec {
    fn len(&self) -> usize {
        self.groups * self.shape.iter().product::<usize>()
    }
}

/// Collects the parameters of a model.
pub(super) struct Builder<'a> {
    backend: &'a dyn Backend,
    element: DType,
    shards: usize,
    expert_shards: usize,
    specs: Vec<Spec>,
}

/// Parameters of one kind in one row: master weights, optimizer state and gradients.
#[derive(Debug)]
pub(crate) struct Arena {
    /// Elements, padded.
    pub(crate) len: usize,
    /// The first elements, which decay.
    pub(crate) decayed: usize,
    pub(crate) master: Tensor,
    pub(crate) m: Tensor,
    pub(crate) v: Tensor,
    /// Master weights in bf16, if products use it.
    pub(crate) half: Option<Tensor>,
    /// Each parameter's parts one after the other; `parts * len` elements.
    pub(crate) grads: Tensor,
    /// Parts of a gradient.
    pub(crate) parts: usize,
}

/// The gradients of a step, the shards added: f32, as long as the arenas.
#[derive(Clone, Debug)]
pub struct GradientSums {
    /// Of the replicated parameters.
    pub replicated: Tensor,
    /// Of this rank's experts.
    pub experts: Tensor,
}

/// The parameters of one rank's share of a model.
#[derive(Debug)]
pub struct Params {
    specs: Vec<Spec>,
    pub(crate) replicated: Arena,
    pub(crate) experts: Arena,
    biases: Tensor,
}

impl<'a> Builder<'a> {
    pub(super) fn new(backend: &'a dyn Backend, element: DType, tokens: &Tokens) -> Builder<'a> {
        let (shards, expert_shards) = (tokens.shards(), tokens.expert_shards().count());
        Builder { backend, element, shards, expert_shards, specs: Vec::new() }
    }

    fn add(&mut self, kind: Kind, groups: usize, shape: &[usize], pieces: Vec<(String, Vec<usize>)>) -> Id {
        self.specs.push(Spec { kind, groups, shape: shape.to_vec(), pieces, offset: 0 });
        Id(self.specs.len() - 1)
    }

    fn one(&mut self, kind: Kind, name: &str, shape: &[usize]) -> Id {
        self.add(kind, 1, shape, vec![(name.to_owned(), shape.to_vec())])
    }

    pub(super) fn matrix(&mut self, name: &str, shape: &[usize]) -> Id {
        self.one(Kind::Matrix, name, shape)
    }

    pub(super) fn router(&mut self, name: &str, experts: usize, h: usize) -> Id {
        self.one(Kind::Router, name, &[experts, h])
    }

    pub(super) fn gain(&mut self, name: &str, cols: usize) -> Id {
        self.one(Kind::Gain, name, &[cols])
    }

    pub(super) fn bias(&mut self, name: &str, experts: usize) -> Id {
        self.one(Kind::Bias, name, &[experts])
    }

    /// Gate and up as one matrix `[2 * i, h]`, and down `[h, i]`.
    pub(super) fn mlp(&mut self, prefix: &str, h: usize, i: usize) -> (Id, Id) {
        let gate_up = gate_up_pieces(prefix, h, i);
        (self.add(Kind::Matrix, 1, &[2 * i, h], gate_up), self.matrix(&format!("{prefix}.down_proj.weight"), &[h, i]))
    }

    /// This rank's share of `experts` experts.
    pub(super) fn experts(&mut self, prefix: &str, experts: usize, h: usize, i: usize) -> (Id, Id) {
        let caps = self.backend.caps();
        let (local, place) = (experts / caps.size(Group::Experts), caps.place(Group::Experts));
        let mine = place * local..(place + 1) * local;
        let gate_up = mine.clone().flat_map(|e| gate_up_pieces(&format!("{prefix}.{e}"), h, i)).collect();
        let down = mine.map(|e| (format!("{prefix}.{e}.down_proj.weight"), vec![h, i])).collect();
        (self.add(Kind::Expert, local, &[2 * i, h], gate_up), self.add(Kind::Expert, local, &[h, i], down))
    }

    /// Lays out the arenas.
    pub(super) fn build(self) -> Result<Params> {
        let Builder { backend, element, shards, expert_shards, mut specs } = self;
        let mut place = |kinds: &[Kind]| {
            let mut offset = 0;
            for kind in kinds {
                for spec in specs.iter_mut().filter(|s| s.kind == *kind) {
                    spec.offset = offset;
                    offset += spec.len();
                }
            }
            offset
        };
        let decayed = place(&[Kind::Matrix, Kind::Router]);
        let len = place(&[Kind::Matrix, Kind::Router, Kind::Gain]);
        let (experts, biases) = (place(&[Kind::Expert]), place(&[Kind::Bias]));
        let arena = |len: usize, decayed: usize, parts: usize| -> Result<Arena> {
            let len = len.next_multiple_of(ROW);
            let alloc = |dtype, len| backend.alloc(dtype, &[len], Memory::Device);
            let arena = Arena {
                len,
                decayed,
                master: alloc(DType::F32, len)?,
                m: alloc(DType::F32, len)?,
                v: alloc(DType::F32, len)?,
                half: if element == DType::Bf16 { Some(alloc(DType::Bf16, len)?) } else { None },
                grads: alloc(DType::F32, parts * len)?,
                parts,
            };
            for out in [&arena.master, &arena.m, &arena.v, &arena.grads] {
                Fill { out, value: 0.0 }.run(backend)?;
            }
            Ok(arena)
        };
        let biases = backend.alloc(DType::F32, &[biases], Memory::Device)?;
        Fill { out: &biases, value: 0.0 }.run(backend)?;
        let (replicated, experts) = (arena(len, decayed, shards)?, arena(experts, experts, expert_shards)?);
        Ok(Params { replicated, experts, biases, specs })
    }
}

fn gate_up_pieces(prefix: &str, h: usize, i: usize) -> Vec<(String, Vec<usize>)> {
    ["gate_proj", "up_proj"].map(|part| (format!("{prefix}.{part}.weight"), vec![i, h])).to_vec()
}

impl Arena {
    /// The gradient parts of a parameter, f32 `[parts, len]`.
    pub(crate) fn grad_parts(&self, offset: usize, len: usize) -> Result<Tensor> {
        Ok(self.grads.slice(self.parts * offset, self.parts * (offset + len))?.reshape(&[self.parts, len])?)
    }
}

impl Params {
    fn arena(&self, kind: Kind) -> &Arena {
        if kind == Kind::Expert { &self.experts } else { &self.replicated }
    }

    /// What an op reads, and where its gradient goes.
    pub(super) fn weight(&self, id: Id) -> Weight {
        self.view(id).expect("a parameter lies inside its arena")
    }

    fn view(&self, id: Id) -> Result<Weight> {
        let spec = &self.specs[id.0];
        let arena = self.arena(spec.kind);
        let source = match (&arena.half, spec.kind) {
            (Some(half), Kind::Matrix | Kind::Expert) => half,
            _ => &arena.master,
        };
        let with = |first: &[usize]| [first, &spec.shape].concat();
        let value = source.slice(spec.offset, spec.offset + spec.len())?;
        let value = if spec.kind == Kind::Gain { value } else { value.reshape(&with(&[spec.groups]))? };
        let parts = if spec.kind == Kind::Expert { with(&[arena.parts, spec.groups]) } else { with(&[arena.parts]) };
        let grad = arena.grad_parts(spec.offset, spec.len())?.reshape(&parts)?;
        Ok(Weight { value, grad })
    }

    /// A selection bias.
    pub(super) fn value(&self, id: Id) -> Tensor {
        let spec = &self.specs[id.0];
        self.biases.slice(spec.offset, spec.offset + spec.len()).expect("a bias lies inside its arena")
    }

    /// Every tensor of a checkpoint that this rank holds, in the order of the model.
    ///
    /// # Errors
    /// None in practice: every piece lies inside its arena.
    pub fn pieces(&self) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        for spec in &self.specs {
            let mut offset = spec.offset;
            for (name, shape) in &spec.pieces {
                let end = offset + shape.iter().product::<usize>();
                let part = |arena: &Tensor| arena.slice(offset, end);
                let (value, moments) = if spec.kind == Kind::Bias {
                    (part(&self.biases)?, None)
                } else {
                    let arena = self.arena(spec.kind);
                    (part(&arena.master)?, Some(Moments { m: part(&arena.m)?, v: part(&arena.v)? }))
                };
                let initial = match spec.kind {
                    Kind::Gain => Initial::One,
                    Kind::Bias => Initial::Zero,
                    _ => Initial::Normal,
                };
                pieces.push(Piece {
                    name: name.clone(),
                    shape: shape.clone(),
                    initial,
                    replicated: spec.kind != Kind::Expert,
                    value,
                    moments,
                });
                offset = end;
            }
        }
        Ok(pieces)
    }

    /// The gradient of every piece that has one, out of what [`reduce_shards`](Params::reduce_shards) and the ranks made of
    /// the shards.
    ///
    /// # Errors
    /// None in practice: every piece lies inside its arena.
    pub fn gradients(&self, sums: &GradientSums) -> Result<Vec<(String, Tensor)>> {
        let mut gradients = Vec::new();
        for spec in self.specs.iter().filter(|s| s.kind != Kind::Bias) {
            let source = if spec.kind == Kind::Expert { &sums.experts } else { &sums.replicated };
            let mut offset = spec.offset;
            for (name, shape) in &spec.pieces {
                let end = offset + shape.iter().product::<usize>();
                gradients.push((name.clone(), source.slice(offset, end)?));
                offset = end;
            }
        }
        Ok(gradients)
    }

    /// Rounds the master weights to bf16 where products need it, after they were written from outside.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn refresh(&self, backend: &dyn Backend) -> Result<()> {
        for arena in [&self.replicated, &self.experts] {
            if let Some(half) = &arena.half {
                Cast { x: &arena.master, out: half }.run(backend)?;
            }
        }
        Ok(())
    }

    pub(super) fn clear_gradients(&self, backend: &dyn Backend) -> Result<()> {
        for arena in [&self.replicated, &self.experts] {
            Fill { out: &arena.grads, value: 0.0 }.run(backend)?;
        }
        Ok(())
    }

    /// The gradients of this rank: each parameter's shards added along their tree.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn reduce_shards(&self, backend: &dyn Backend) -> Result<GradientSums> {
        let reduce = |arena: &Arena, experts: bool| -> Result<Tensor> {
            if arena.parts == 1 {
                return Ok(arena.grads.clone());
            }
            let sum = backend.alloc(DType::F32, &[arena.len], Memory::Device)?;
            Fill { out: &sum, value: 0.0 }.run(backend)?;
            for spec in self.specs.iter().filter(|s| s.kind != Kind::Bias && (s.kind == Kind::Expert) == experts) {
                let (offset, len) = (spec.offset, spec.len());
                TreeSum { parts: &arena.grad_parts(offset, len)?, out: &sum.slice(offset, offset + len)? }
                    .run(backend)?;
            }
            Ok(sum)
        };
        Ok(GradientSums { replicated: reduce(&self.replicated, false)?, experts: reduce(&self.experts, true)? })
    }

    /// The gradients `sums` of the local experts of each expert parameter, f32 `[local experts, rows, columns]`, in order.
    pub(crate) fn expert_gradients(&self, sums: &Tensor) -> Result<Vec<Tensor>> {
        let experts = self.specs.iter().filter(|s| s.kind == Kind::Expert);
        experts
            .map(|s| {
                let [rows, cols] = [s.shape[0], s.shape[1]];
                Ok(sums.slice(s.offset, s.offset + s.len())?.reshape(&[s.groups, rows, cols])?)
            })
            .collect()
    }

    /// Number of parameters that a token meets: all replicated ones, and `top_k` of `experts` experts, which `expert_ranks` ranks
    /// share.
    pub fn active(&self, top_k: usize, experts: usize, expert_ranks: usize) -> usize {
        let sum = |expert: bool| -> usize {
            self.specs
                .iter()
                .filter(|s| (s.kind == Kind::Expert) == expert && s.kind != Kind::Bias)
                .map(Spec::len)
                .sum()
        };
        sum(false) + sum(true) * expert_ranks * top_k / experts.max(1)
    }

    /// Number of parameters, where `expert_ranks` ranks share the experts.
    pub fn total(&self, expert_ranks: usize) -> usize {
        self.active(1, 1, expert_ranks)
    }
}
