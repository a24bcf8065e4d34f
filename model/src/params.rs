//! The weights: where each lies, and what it is called in a Hugging Face checkpoint.
//!
//! Weights live in two arenas, one for the replicated ones (matrices, routers, then norm weights, which do not decay)
//! and one for the experts of this rank; so the optimizer is a handful of ops however many parameters there are. What
//! training adds to them is [`crate::TrainState`].

use dropless_core::ops::{Cast, Fill};
use dropless_core::{Backend, DType, Group, Memory, Result, Tensor};

use crate::names::{MlpNames, Names};

/// The arenas are padded to a multiple of this, the row length of the gradient norm's sums of squares. It also makes
/// every power-of-two number of ranks up to it divide an arena.
pub(crate) const ROW: usize = 1024;

/// A parameter's place among the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Id(pub(crate) usize);

/// How a tensor is initialised.
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
    /// How it is initialised.
    pub initial: Initial,
    /// Whether other ranks hold it, too.
    pub replicated: bool,
    /// Master weights, f32.
    pub value: Tensor,
    pub(crate) place: Place,
}

/// Where a piece lies in its arena.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) kind: Kind,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// In products as f32 or bf16; decays.
    Matrix,
    /// In products as f32; decays.
    Router,
    /// A norm weight; f32, does not decay.
    Norm,
    /// The router's selection bias; not the optimizer's.
    Bias,
    /// Matrices of this rank's experts; decay.
    Expert,
}

#[derive(Debug)]
pub(crate) struct Spec {
    pub(crate) kind: Kind,
    /// Leading dimension: local experts, or 1.
    pub(crate) groups: usize,
    pub(crate) shape: Vec<usize>,
    /// Names and shapes of the pieces, in order.
    pub(crate) pieces: Vec<(String, Vec<usize>)>,
    pub(crate) offset: usize,
}

impl Spec {
    pub(crate) fn len(&self) -> usize {
        self.groups * self.shape.iter().product::<usize>()
    }
}

/// Collects the parameters of a model.
#[derive(Debug)]
pub(crate) struct Builder {
    experts: usize,
    place: usize,
    specs: Vec<Spec>,
}

/// Weights of one kind in one row.
#[derive(Debug)]
pub(crate) struct Arena {
    pub(crate) len: usize,
    /// The first so many decay.
    pub(crate) decayed: usize,
    pub(crate) master: Tensor,
    /// Master weights in bf16, if products use it.
    pub(crate) param_bf16: Option<Tensor>,
}

/// The weights of one rank's share of a model.
#[derive(Debug)]
pub struct Params {
    pub(crate) specs: Vec<Spec>,
    pub(crate) replicated: Arena,
    pub(crate) experts: Arena,
    biases: Tensor,
}

impl Builder {
    pub(crate) fn new(backend: &dyn Backend) -> Builder {
        let caps = backend.caps();
        Builder { experts: caps.size(Group::Experts), place: caps.place(Group::Experts), specs: Vec::new() }
    }

    /// For the tensors of a whole model, of which nothing is built.
    pub(crate) fn whole() -> Builder {
        Builder { experts: 1, place: 0, specs: Vec::new() }
    }

    /// The parameters so far.
    pub(crate) fn into_specs(self) -> Vec<Spec> {
        self.specs
    }

    fn add(&mut self, kind: Kind, groups: usize, shape: &[usize], pieces: Vec<(String, Vec<usize>)>) -> Id {
        self.specs.push(Spec { kind, groups, shape: shape.to_vec(), pieces, offset: 0 });
        Id(self.specs.len() - 1)
    }

    fn one(&mut self, kind: Kind, name: String, shape: &[usize]) -> Id {
        self.add(kind, 1, shape, vec![(name, shape.to_vec())])
    }

    pub(crate) fn matrix(&mut self, name: String, shape: &[usize]) -> Id {
        self.one(Kind::Matrix, name, shape)
    }

    /// Several matrices of `columns` columns, one below the other; each part has a name and rows.
    pub(crate) fn stacked(&mut self, parts: Vec<(String, usize)>, columns: usize) -> Id {
        let rows = parts.iter().map(|(_, rows)| rows).sum();
        let pieces = parts.into_iter().map(|(name, rows)| (name, vec![rows, columns])).collect();
        self.add(Kind::Matrix, 1, &[rows, columns], pieces)
    }

    pub(crate) fn router(&mut self, name: String, experts: usize, h: usize) -> Id {
        self.one(Kind::Router, name, &[experts, h])
    }

    pub(crate) fn norm(&mut self, name: String, cols: usize) -> Id {
        self.one(Kind::Norm, name, &[cols])
    }

    pub(crate) fn bias(&mut self, name: String, experts: usize) -> Id {
        self.one(Kind::Bias, name, &[experts])
    }

    /// Gate and up as one matrix `[2 * i, h]`, and down `[h, i]`.
    pub(crate) fn mlp(&mut self, names: &MlpNames, prefix: &str, h: usize, i: usize) -> (Id, Id) {
        let gate_up = self.add(Kind::Matrix, 1, &[2 * i, h], gate_up_pieces(names, prefix, h, i));
        (gate_up, self.matrix(format!("{prefix}.{}.weight", names.down), &[h, i]))
    }

    /// This rank's share of `experts` experts.
    pub(crate) fn experts(&mut self, names: &Names, prefix: &str, experts: usize, h: usize, i: usize) -> (Id, Id) {
        let local = experts / self.experts;
        let mine = self.place * local..(self.place + 1) * local;
        let names = &names.expert;
        let gate_up = mine.clone().flat_map(|e| gate_up_pieces(names, &format!("{prefix}.{e}"), h, i)).collect();
        let down = mine.map(|e| (format!("{prefix}.{e}.{}.weight", names.down), vec![h, i])).collect();
        (self.add(Kind::Expert, local, &[2 * i, h], gate_up), self.add(Kind::Expert, local, &[h, i], down))
    }

    /// Lays out the arenas, whose weights are undefined at first but for zeros between and behind them.
    pub(crate) fn build(self, backend: &dyn Backend, element: DType) -> Result<Params> {
        let mut specs = self.specs;
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
        let len = place(&[Kind::Matrix, Kind::Router, Kind::Norm]);
        let (experts, biases) = (place(&[Kind::Expert]), place(&[Kind::Bias]));
        let alloc = |dtype, len| backend.alloc(dtype, &[len], Memory::Device);
        let arena = |len: usize, decayed: usize| -> Result<Arena> {
            let len = len.next_multiple_of(ROW);
            let param_bf16 = if element == DType::Bf16 { Some(alloc(DType::Bf16, len)?) } else { None };
            let master = alloc(DType::F32, len)?;
            Fill { out: &master, value: 0.0 }.run(backend)?;
            Ok(Arena { len, decayed, master, param_bf16 })
        };
        let biases = alloc(DType::F32, biases)?;
        Fill { out: &biases, value: 0.0 }.run(backend)?;
        Ok(Params { replicated: arena(len, decayed)?, experts: arena(experts, experts)?, biases, specs })
    }
}

fn gate_up_pieces(names: &MlpNames, prefix: &str, h: usize, i: usize) -> Vec<(String, Vec<usize>)> {
    [names.gate, names.up].map(|part| (format!("{prefix}.{part}.weight"), vec![i, h])).to_vec()
}

impl Params {
    pub(crate) fn arena(&self, kind: Kind) -> &Arena {
        if kind == Kind::Expert { &self.experts } else { &self.replicated }
    }

    /// What an op reads: bf16 where products take it, else f32.
    pub(crate) fn value(&self, id: Id) -> Result<Tensor> {
        let spec = self.spec(id);
        let arena = self.arena(spec.kind);
        let source = match (&arena.param_bf16, spec.kind) {
            (Some(bf16), Kind::Matrix | Kind::Expert) => bf16,
            _ => &arena.master,
        };
        let value = source.slice(spec.offset, spec.offset + spec.len())?;
        match spec.kind {
            Kind::Norm => Ok(value),
            _ => value.reshape(&[&[spec.groups], &spec.shape[..]].concat()),
        }
    }

    pub(crate) fn spec(&self, id: Id) -> &Spec {
        &self.specs[id.0]
    }

    /// A selection bias.
    pub(crate) fn selection_bias(&self, id: Id) -> Result<Tensor> {
        let spec = self.spec(id);
        self.biases.slice(spec.offset, spec.offset + spec.len())
    }

    /// Every tensor of a checkpoint that this rank holds, in the order of the model.
    ///
    /// # Errors
    /// None in practice: every piece lies inside its arena.
    pub fn pieces(&self) -> Result<Vec<Piece>> {
        let mut pieces = Vec::new();
        for spec in &self.specs {
            let mut from = spec.offset;
            for (name, shape) in &spec.pieces {
                let place = Place { kind: spec.kind, from, to: from + shape.iter().product::<usize>() };
                let source = if spec.kind == Kind::Bias { &self.biases } else { &self.arena(spec.kind).master };
                let initial = match spec.kind {
                    Kind::Norm => Initial::One,
                    Kind::Bias => Initial::Zero,
                    Kind::Matrix | Kind::Router | Kind::Expert => Initial::Normal,
                };
                pieces.push(Piece {
                    name: name.clone(),
                    shape: shape.clone(),
                    initial,
                    replicated: spec.kind != Kind::Expert,
                    value: source.slice(from, place.to)?,
                    place,
                });
                from = place.to;
            }
        }
        Ok(pieces)
    }

    /// Rounds the master weights to bf16 where products need it, after they were written from outside.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn refresh(&self, backend: &dyn Backend) -> Result<()> {
        for arena in [&self.replicated, &self.experts] {
            if let Some(bf16) = &arena.param_bf16 {
                Cast { x: &arena.master, out: bf16 }.run(backend)?;
            }
        }
        Ok(())
    }

    /// Bytes of the master weights, and of those in bf16.
    pub fn bytes(&self) -> (u64, u64) {
        let bytes = |tensor: &Tensor| tensor.bytes() as u64;
        let arenas = [&self.replicated, &self.experts];
        let masters = arenas.iter().map(|arena| bytes(&arena.master)).sum::<u64>();
        let halves = arenas.iter().filter_map(|arena| arena.param_bf16.as_ref()).map(bytes).sum();
        (masters + bytes(&self.biases), halves)
    }

    /// Number of parameters of which a token meets all the replicated ones, and `top_k` of `experts` experts, which
    /// `expert_ranks` ranks share.
    pub fn active(&self, top_k: usize, experts: usize, expert_ranks: usize) -> usize {
        let sum = |expert: bool| -> usize {
            let specs = self.specs.iter().filter(|s| (s.kind == Kind::Expert) == expert && s.kind != Kind::Bias);
            specs.map(Spec::len).sum()
        };
        sum(false) + sum(true) * expert_ranks * top_k / experts.max(1)
    }

    /// Number of parameters, where `expert_ranks` ranks share the experts.
    pub fn total(&self, expert_ranks: usize) -> usize {
        self.active(1, 1, expert_ranks)
    }
}
