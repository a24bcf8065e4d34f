//! One optimizer step, or one validation, on one rank.

use dropless_core::numerics::reduce::tree;
use dropless_core::ops::{Add, Fill, SumRows};
use dropless_core::{Backend, DType, Group, Memory, Tensor};
use dropless_model::collective::gather;
use dropless_model::nn::Tokens;
use dropless_model::optimizer::{self, Gradients};
use dropless_model::{Inputs, Model};

use super::inputs::{Scales, upload};
use super::notice::Notice;
use crate::config::Config;
use crate::data::Batch;
use crate::error::Result;

/// What a step found, the same on every rank.
#[derive(Clone, Debug)]
pub struct StepResult {
    /// Mean cross-entropy in nats per token.
    pub loss: f32,
    /// The same of the multi-token-prediction module.
    pub next_loss: Option<f32>,
    /// Auxiliary loss, added over the layers.
    pub balance_loss: f32,
    /// Global gradient norm before clipping.
    pub grad_norm: f32,
    /// Choices of each expert in each MoE layer.
    pub counts: Vec<Vec<u64>>,
    /// What the ranks had to tell when the step's sums were gathered.
    pub(super) notices: Vec<Notice>,
}

/// Sums over tokens that are added on the device, f32 `[kinds, shards]`. One more row takes this rank's notice along.
struct Totals<'a> {
    backend: &'a dyn Backend,
    shards: usize,
    sums: Tensor,
}

const LOSS: usize = 0;
const NEXT: usize = 1;
const BALANCE: usize = 2;
const KINDS: usize = 3;
const NOTICE: usize = KINDS;
const ROWS: usize = KINDS + 1;

impl<'a> Totals<'a> {
    fn new(backend: &'a dyn Backend, shards: usize) -> Result<Totals<'a>> {
        let sums = backend.alloc(DType::F32, &[ROWS, shards], Memory::Device)?;
        Fill { out: &sums, value: 0.0 }.run(backend)?;
        Ok(Totals { backend, shards, sums })
    }

    /// Adds the sums of x (equal parts of which belong to the shards) to one kind.
    fn add(&mut self, kind: usize, x: &Tensor) -> Result<()> {
        let parts = self.backend.alloc(DType::F32, &[ROWS, self.shards], Memory::Device)?;
        Fill { out: &parts, value: 0.0 }.run(self.backend)?;
        let out = parts.index(kind)?.reshape(&[self.shards, 1])?;
        SumRows { x: &x.reshape(&[x.len(), 1])?, out: &out }.run(self.backend)?;
        let sums = self.backend.alloc(DType::F32, &[ROWS, self.shards], Memory::Device)?;
        Add { a: &self.sums, b: &parts, c: None, out: &sums }.run(self.backend)?;
        self.sums = sums;
        Ok(())
    }

    /// The sums over all ranks' shards, along the tree, and every rank's notice.
    fn read(&self, notice: Notice) -> Result<([f32; KINDS], Vec<Notice>)> {
        Fill { out: &self.sums.index(NOTICE)?, value: notice.code() }.run(self.backend)?;
        let all: Vec<f32> = self.backend.download(&gather(self.backend, Group::World, &self.sums)?)?;
        let ranks = self.backend.caps().ranks;
        let value = |kind: usize, shard: usize| {
            let (rank, local) = (shard / self.shards, shard % self.shards);
            all[(rank * ROWS + kind) * self.shards + local]
        };
        let sum = |kind| tree(0, ranks * self.shards, &|shard| Some(value(kind, shard))).unwrap_or(0.0);
        let notices = (0..ranks).map(|rank| Notice::of(value(NOTICE, rank * self.shards))).collect();
        Ok((std::array::from_fn(sum), notices))
    }
}

/// Forward and backward of a whole batch and the reduction over the ranks, which takes this rank's notice along. The
/// weights stay as they are.
///
/// # Errors
/// Those of the ops and of the ranks.
pub(super) fn gradients(
    backend: &dyn Backend,
    config: &Config,
    tokens: &Tokens,
    model: &Model,
    batch: &Batch,
    notice: Notice,
) -> Result<(StepResult, Gradients, Vec<Tensor>)> {
    let train = &config.train;
    let (rank, ranks) = (backend.caps().rank, backend.caps().ranks);
    let has_next = config.model.architecture().next.is_some();
    let scales = Scales::new(batch, has_next.then_some(train.mtp_loss_coefficient));
    let micro_batches = (0..train.batch_size / train.micro_batch_size).map(|micro| {
        let share = batch.share(train.micro_batch_size, micro, rank, ranks);
        upload(backend, share, batch.sequence, scales)
    });
    accumulate(backend, config, tokens, model, scales, micro_batches, notice)
}

/// The same of micro-batches on the device, each of which is made when the one before is done.
///
/// # Errors
/// As [`gradients`].
pub(super) fn accumulate(
    backend: &dyn Backend,
    config: &Config,
    tokens: &Tokens,
    model: &Model,
    scales: Scales,
    micro_batches: impl Iterator<Item = Result<Inputs>>,
    notice: Notice,
) -> Result<(StepResult, Gradients, Vec<Tensor>)> {
    let train = &config.train;
    model.clear_gradients(backend)?;
    let mut totals = Totals::new(backend, tokens.shards())?;
    for (index, inputs) in micro_batches.enumerate() {
        let _scope = backend.scope("micro-batch", Some(index));
        let inputs = inputs?;
        let losses = model.step(backend, tokens, &inputs)?;
        totals.add(LOSS, &losses.tokens)?;
        if let Some(next) = &losses.next {
            totals.add(NEXT, next)?;
        }
        for balance in &losses.balance {
            totals.add(BALANCE, balance)?;
        }
    }
    let _scope = backend.scope("reduce", None);
    let gradients = optimizer::reduce(backend, model, train.max_grad_norm)?;
    let mut counts = Vec::new();
    for balancing in model.balancing() {
        counts.push(gather(backend, Group::World, &balancing.counts)?);
    }
    let (sums, notices) = totals.read(notice)?;
    let clip: Vec<f32> = backend.download(&gradients.clip)?;
    let result = StepResult {
        loss: sums[LOSS] * scales.loss,
        next_loss: scales.next.map(|scale| sums[NEXT] * scale.mean),
        balance_loss: sums[BALANCE],
        grad_norm: clip[0],
        counts: counts.iter().map(|c| read_counts(backend, c)).collect::<Result<_>>()?,
        notices,
    };
    Ok((result, gradients, counts))
}

/// The choices of each expert, added over the ranks.
fn read_counts(backend: &dyn Backend, counts: &Tensor) -> Result<Vec<u64>> {
    let all: Vec<u32> = backend.download(counts)?;
    let experts = counts.cols();
    let mut sums = vec![0; experts];
    for row in all.chunks(experts) {
        for (sum, &count) in sums.iter_mut().zip(row) {
            *sum += u64::from(count);
        }
    }
    Ok(sums)
}

/// The sum of the losses of a batch's tokens, and the ranks' notices; the same on every rank.
///
/// # Errors
/// Those of the ops and of the ranks.
pub(super) fn evaluate(
    backend: &dyn Backend,
    config: &Config,
    tokens: &Tokens,
    model: &Model,
    batch: &Batch,
    notice: Notice,
) -> Result<(f32, Vec<Notice>)> {
    let train = &config.train;
    let (rank, ranks) = (backend.caps().rank, backend.caps().ranks);
    let mut totals = Totals::new(backend, tokens.shards())?;
    let scales = Scales { loss: 1.0, next: None };
    for micro in 0..batch.sequences() / train.micro_batch_size {
        let share = batch.share(train.micro_batch_size, micro, rank, ranks);
        let inputs = upload(backend, share, batch.sequence, scales)?;
        totals.add(LOSS, &model.evaluate(backend, tokens, &inputs)?)?;
    }
    let (sums, notices) = totals.read(notice)?;
    Ok((sums[LOSS], notices))
}

#[cfg(test)]
mod tests {
    use dropless_core::NumericModel;
    use dropless_core::host::{Host, HostOptions};
    use dropless_core::ops::NONE;

    use super::*;

    /// Two sequences of four tokens; one target counts in the first, three in the second.
    fn batch() -> Batch {
        Batch {
            sequence: 4,
            ids: vec![1, 2, 3, 4, 5, 6, 7, 8],
            targets: vec![NONE, NONE, 9, NONE, 6, 7, 8, NONE],
            positions: vec![0, 1, 2, 3, 0, 1, 2, 3],
            start: vec![0; 8],
            valid: 4,
        }
    }

    fn loss_and_norm(micro: usize) -> [f32; 2] {
        let set = ["train.batch_size=2", "train.grad_shards=1", "train.recipe=f32", "train.sequence_length=4"];
        let mut config = Config::load(None, &set.map(str::to_owned)).unwrap();
        config.train.micro_batch_size = micro;
        let host = Host::new(HostOptions { numerics: NumericModel::F32, ..HostOptions::default() }).unwrap();
        let backend: &dyn Backend = &host;
        let tokens = Tokens::new(backend, micro, 4, 1).unwrap();
        let parts = config.model.architecture();
        let mut model = Model::new(backend, &parts, &config.options(), &tokens).unwrap();
        model.initialise(backend, 1, 0.3).unwrap();
        let (result, ..) = gradients(backend, &config, &tokens, &model, &batch(), Notice::default()).unwrap();
        // The same from the losses of the tokens: the sum over the targets, whatever micro-batch they are in.
        let (sum, _) = evaluate(backend, &config, &tokens, &model, &batch(), Notice::default()).unwrap();
        assert!((result.loss - sum / 4.0).abs() < 1e-6 * result.loss, "{} {sum}", result.loss);
        [result.loss, result.grad_norm]
    }

    #[test]
    fn b244_the_mean_is_over_the_tokens_of_the_step() {
        let (one, two) = (loss_and_norm(2), loss_and_norm(1));
        for (a, b) in one.into_iter().zip(two) {
            assert!((a - b).abs() < 1e-5 * a, "{a} {b}");
        }
    }
}
