//! The memory of a run, known before anything is allocated.
//!
//! The model is built, and a step and a validation run, over [`Dry`], by the code that trains; so what a rank needs of its
//! backend is what it will ask for. The rest is what the process holds beside: text, batch, names.

use std::fmt;
use std::path::Path;

use dropless_core::dry::{Bytes, Dry};
use dropless_core::{Backend, Caps, DType, Memory};
use dropless_model::architecture::Feed;
use dropless_model::{Architecture, Model, optimizer};

use super::inputs::{self, Scales};
use super::notice::Notice;
use super::staging::Staging;
use super::step;
use crate::backends::{self, Place};
use crate::config::{Config, Format, Tokenizer};
use crate::error::{Error, Result};
use crate::options::TrainOptions;
use crate::{schedule, system};

/// Bytes for the names and extents of a tensor: twice, where it is described and where it lies.
const NAMES: u64 = 512;
/// Bytes in memory for a byte of text that becomes ids: itself, and its id of four bytes in a vector that doubles as it
/// grows.
const TEXT: u64 = 9;
/// Where a device does not say what it has, it has less than this.
const LARGEST_DEVICE: u64 = 1 << 40;
/// Bytes of a parameter that is trained: weight, gradient and two moments in f32.
const TRAINED: f64 = 16.0;

/// The bytes that one rank asks its backend for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankNeed {
    /// Master weights.
    pub parameters: u64,
    /// The same in bf16 and, of experts and linear layers, in the form of their recipes' products.
    pub copies: u64,
    /// The optimizer's moments.
    pub moments: u64,
    /// Gradients of every shard.
    pub gradients: u64,
    /// The rest: activations under the policy, and what is computed with them, at the fullest moment of a step.
    pub working: u64,
    /// The largest exchange: what it sends, receives and stages; a part of the working memory.
    pub exchange: u64,
    /// The copy of weights and moments from which the rank's part of a checkpoint is written, in host memory.
    pub staged: u64,
    /// All of it in each memory: host memory holds that copy, and offloaded activations.
    pub most: Bytes,
    /// Tensors with a name.
    pieces: u64,
}

/// The memory of a run: of one of its ranks, and of this process.
#[derive(Clone, Debug)]
pub struct Need {
    /// One rank.
    pub rank: RankNeed,
    /// Ranks of this process.
    pub ranks: u64,
    /// What all ranks of this process hold on the device.
    pub device: u64,
    /// What the process holds in host memory; the device's, too, where that is the same.
    pub host: u64,
    text: u64,
    batch: u64,
    program: u64,
    place: Place,
    may_use: Option<system::Limit>,
}

/// What one rank with these capabilities asks its backend for when it trains as configured.
///
/// # Errors
/// Those of a real run that is refused; [`dropless_core::Error::Capacity`] for a tensor that no buffer holds.
pub fn of_rank(config: &Config, caps: &Caps, place: &Place) -> Result<RankNeed> {
    let dry = &Dry::new(caps.clone(), place.footprint);
    let (train, parts) = (&config.train, config.model.architecture());
    let tokens = inputs::tokens(dry, config)?;
    let mut model = Model::new(dry, &parts, &config.options(), &tokens)?;
    model.refresh(dry)?;
    let held = dry.live().device;
    let staged = dry.alloc(DType::F32, &[Staging::largest(caps, &model)?], Memory::Host)?;

    let (count, has_next) = (tokens.count(), parts.next.is_some());
    let scales = Scales::new(&crate::data::Batch::new(1), has_next.then_some(train.mtp_loss_coefficient));
    // All micro-batches are alike; the second meets what the first left.
    let micro_batches = (train.batch_size / train.micro_batch_size).min(2);
    let blank = || inputs::blank(dry, count, has_next);
    let (_, gradients, counts) =
        step::accumulate(dry, config, &tokens, &model, scales, (0..micro_batches).map(|_| blank()), Notice::default())?;
    optimizer::update(dry, &mut model, &train.adamw(), &gradients, &counts, schedule::step_numbers(train, 1))?;
    drop((gradients, counts));
    model.evaluate(dry, &tokens, &inputs::blank(dry, count, false)?)?;

    let (parameters, halves) = model.params.bytes();
    let (moments, gradients) = model.state.as_ref().map_or((0, 0), |state| state.bytes());
    let most = dry.most();
    let copies = halves + held.saturating_sub(parameters + halves + moments + gradients);
    let mut need = RankNeed {
        parameters,
        copies,
        moments,
        gradients,
        working: most.device.saturating_sub(held),
        exchange: dry.most_exchanged(),
        staged: staged.bytes() as u64,
        most,
        ..RankNeed::default()
    };
    need.pieces = model.params.pieces()?.len() as u64;
    Ok(need)
}

impl Need {
    /// Of the run of these ranks, which this process drives.
    ///
    /// # Errors
    /// [`Error::Memory`] when what is there cannot hold what the weights alone need; as [`of_rank`].
    pub fn of(ranks: &[Box<dyn Backend>], config: &Config, options: &TrainOptions) -> Result<Need> {
        let Some(first) = ranks.first() else { return Err(Error::Usage("no rank to train on".into())) };
        let (caps, count) = (first.caps(), ranks.len() as u64);
        let place = backends::place(options.backend, caps);
        let may_use = system::memory_limit();
        let (text, batch) = (text_bytes(config), batch_bytes(config));
        let program = system::peak().unwrap_or(0);
        let least = at_least(&config.model.architecture(), config, caps);
        let (least_device, names) = (least.device.saturating_mul(count), least.host.saturating_mul(count));
        let least_host = if place.in_host_memory { least_device.saturating_add(names) } else { names };
        let device = if place.in_host_memory { None } else { Some(place.device_bytes.unwrap_or(LARGEST_DEVICE)) };
        fits("the device", least_device, device, "its memory", true)?;
        fits("the host", least_host, may_use.map(|l| l.bytes), may_use.map_or("", |l| l.of), true)?;

        let rank = of_rank(config, caps, &place)?;
        let blocks = Staging::BLOCK_BYTES * count;
        let device = rank.most.device.saturating_mul(count);
        let pinned = rank.most.host.saturating_mul(count);
        let shared = if place.in_host_memory { device } else { 0 };
        let names = rank.pieces * NAMES * count;
        let host = [program, text, batch, blocks, names, pinned, shared].into_iter().fold(0, u64::saturating_add);
        let program = program + names + blocks;
        Ok(Need { rank, ranks: count, device, host, text, batch, program, place, may_use })
    }

    /// Fails unless device and host can hold it.
    ///
    /// # Errors
    /// [`Error::Memory`].
    pub fn check(&self) -> Result<()> {
        if !self.place.in_host_memory {
            fits("the device", self.device, self.place.device_bytes, "its memory", false)?;
        }
        fits("the host", self.host, self.may_use.map(|l| l.bytes), self.may_use.map_or("", |l| l.of), false)
    }
}

fn fits(what: &'static str, needs: u64, may_use: Option<u64>, limit: &'static str, at_least: bool) -> Result<()> {
    match may_use {
        Some(may_use) if needs > may_use => Err(Error::Memory { what, needs, may_use, limit, at_least }),
        _ => Ok(()),
    }
}

/// What a rank needs in any case, without describing the model: the weights on the device, the names on the host. Extents
/// that overflow everything else end here.
fn at_least(parts: &Architecture, config: &Config, caps: &Caps) -> Bytes {
    let train = &config.train;
    let group = caps.expert_ranks.max(1) as f64;
    let tied = if parts.tied { parts.vocab as f64 * parts.hidden as f64 } else { 0.0 };
    let shared = |feed: &Feed| match feed {
        Feed::Moe(moe) => 3.0 * parts.hidden as f64 * moe.experts as f64 * moe.width as f64,
        Feed::Dense { .. } => 0.0,
    };
    let experts: f64 = parts.feeds().map(shared).sum();
    let weights = parts.parameters() - tied - experts + experts / group;
    let tokens = (train.micro_batch_size / caps.ranks.max(1)) as f64 * train.sequence_length as f64;
    let logits = tokens * parts.vocab as f64 * 4.0;
    let pieces = |feed: &Feed| match feed {
        Feed::Moe(moe) => 3.0 * moe.experts as f64 / group,
        Feed::Dense { .. } => 3.0,
    };
    let names = parts.feeds().map(pieces).sum::<f64>() * NAMES as f64;
    Bytes { device: whole(weights * TRAINED + logits), host: whole(names) }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a number of bytes; the cast saturates")]
fn whole(bytes: f64) -> u64 {
    bytes as u64
}

/// What the files of a configuration take in memory: text that becomes ids when the run starts. Bytes and indexed files
/// are mapped. Files that cannot be read are reported by who reads them.
fn text_bytes(config: &Config) -> u64 {
    let data = &config.data;
    let sources = data.sources().into_iter().map(|source| (source.paths, source.format));
    let sets = data.validation_sets().into_iter().map(|set| (set.paths, set.format));
    let mapped = |path: &Path, format: Option<Format>| match format.unwrap_or_else(|| crate::data::format(path)) {
        Format::Indexed => true,
        Format::Jsonl => false,
        Format::Text => data.tokenizer == Tokenizer::Byte,
    };
    let files = sources.chain(sets).flat_map(|(patterns, format)| {
        let paths = crate::data::matching(&patterns).unwrap_or_default().into_iter();
        paths.filter(move |path| !mapped(path, format)).collect::<Vec<_>>()
    });
    let sizes = files.filter_map(|path| path.metadata().ok()).map(|file| file.len());
    sizes.fold(0, u64::saturating_add).saturating_mul(TEXT)
}

/// The fields of a batch: four words for each token.
fn batch_bytes(config: &Config) -> u64 {
    16 * config.train.tokens() as u64
}

/// Bytes for people.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mib = self.0 as f64 / f64::from(1 << 20);
        if mib < 1024.0 { write!(f, "{mib:.1} MiB") } else { write!(f, "{:.1} GiB", mib / 1024.0) }
    }
}

impl fmt::Display for Need {
    /// A table: what a rank holds on its device, and what this process holds in host memory.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rank = &self.rank;
        let mut row = |name: &str, bytes: u64| writeln!(f, "  {name:<34}{:>12}", Size(bytes).to_string());
        row("parameters", rank.parameters)?;
        row("copies for products", rank.copies)?;
        row("moments", rank.moments)?;
        row("gradients", rank.gradients)?;
        row("activations and working memory", rank.working)?;
        row("  the largest exchange of it", rank.exchange)?;
        row("a rank, at most", rank.most.device)?;
        row("offloaded activations of a rank", rank.most.host.saturating_sub(rank.staged))?;
        row("copy of a rank for checkpoints", rank.staged)?;
        row("text", self.text)?;
        row("batch", self.batch)?;
        row("program", self.program)?;
        let ranks = if self.ranks == 1 { "1 rank".into() } else { format!("{} ranks", self.ranks) };
        if !self.place.in_host_memory {
            let of = self.place.device_bytes.map_or(String::new(), |bytes| format!(" of {}", Size(bytes)));
            writeln!(f, "  device, {ranks}: {}{of}", Size(self.device))?;
        }
        let of = self.may_use.map_or(String::new(), |l| format!(" of {} ({})", Size(l.bytes), l.of));
        write!(f, "  host, {ranks}: {}{of}", Size(self.host))
    }
}
