//! A model's weights in files: which tensor of which file holds each piece, checked as a whole before anything is read,
//! and read bit by bit, so that memory for little more than a block of elements is needed above the weights themselves.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use dropless_core::Backend;
use safetensors::Dtype;

use super::blocks::{self, Blocks, Grid, SCALE_SUFFIX};
use super::layout::{self, Experts, Layout, Stored};
use super::tensors::{Found, TensorFiles};
use super::{elements, listing};
use crate::architecture::Architecture;
use crate::error::{Error, Result};
use crate::model::specs;
use crate::params::{Kind, Params};

/// A piece of the model.
#[derive(Clone, Debug)]
pub(super) struct Part {
    pub(super) name: String,
    pub(super) len: usize,
    pub(super) kind: Kind,
    /// The tensor that holds it, and from which element on.
    stored: usize,
    from: usize,
}

/// The weights of a model in files.
#[derive(Debug)]
pub struct WeightFiles {
    files: TensorFiles,
    layout: Layout,
    blocks: Option<Blocks>,
    stored: Vec<Stored>,
    parts: Vec<Part>,
    by_name: BTreeMap<String, usize>,
    ignored: Vec<String>,
}

impl WeightFiles {
    /// Elements that are read at a time.
    pub const CHUNK: usize = 1 << 20;

    /// Finds every tensor of `model` in `files`, whose FP8 weights have these blocks.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: experts both separate and fused, names with and without `model.`; or, all in one line, the
    /// tensors that are missing, of another shape or type, or unknown, each with what was expected. A tied output matrix
    /// that is there must equal the embedding: of such files, libraries read different models.
    pub fn find(files: TensorFiles, model: &Architecture, blocks: Option<Blocks>) -> Result<WeightFiles> {
        let layout = layout_of(&files, model)?;
        let specs = specs(model);
        let stored = layout::stored(&specs, &model.names, layout.experts);
        let pieces = specs.iter().flat_map(|spec| spec.pieces.iter().map(move |piece| (spec.kind, piece)));
        let mut parts: Vec<Part> = pieces
            .map(|(kind, (name, shape))| Part {
                name: name.clone(),
                len: shape.iter().product(),
                kind,
                stored: 0,
                from: 0,
            })
            .collect();
        for (at, tensor) in stored.iter().enumerate() {
            let mut from = 0;
            for part in &mut parts[tensor.pieces.clone()] {
                (part.stored, part.from) = (at, from);
                from += part.len;
            }
        }
        let by_name = parts.iter().enumerate().map(|(at, part)| (part.name.clone(), at)).collect();
        let mut weights = WeightFiles { files, layout, blocks, stored, parts, by_name, ignored: Vec::new() };
        weights.ignored = weights.compare(model)?;
        if model.tied {
            weights.check_tied()?;
        }
        Ok(weights)
    }

    /// Holds the files against the model; returns the tensors that are there and mean nothing to it.
    fn compare(&self, model: &Architecture) -> Result<Vec<String>> {
        let mut problems = listing::Problems::default();
        let mut known = BTreeSet::new();
        for tensor in &self.stored {
            let name = self.layout.in_file(&tensor.name);
            known.insert(name.to_owned());
            let Some(found) = self.files.find(name) else {
                problems.missing.push(format!("{name} {:?}", tensor.shape));
                continue;
            };
            let file = self.files.of_several(found.file);
            if found.shape != tensor.shape {
                problems.shapes.push(format!("{name} {:?}{file} (expected {:?})", found.shape, tensor.shape));
            }
            if found.dtype == Dtype::F8_E4M3 {
                known.insert(format!("{name}{SCALE_SUFFIX}"));
                self.compare_scales(name, &tensor.shape, &mut problems)?;
            } else if !elements::FLOATS.contains(&found.dtype) {
                problems.types.push(format!("{name} {}{file} (expected F32, BF16, F16 or F8_E4M3)", found.dtype));
            }
        }
        let modules = Modules::of(&self.files, self.layout, model);
        let mut ignored = Vec::new();
        for name in self.files.names().filter(|name| !known.contains(*name)) {
            let canonical = self.layout.canonical(name);
            let whole = canonical.strip_suffix(SCALE_SUFFIX).unwrap_or(&canonical);
            let tied = model.tied && whole == HEAD;
            let Some(found) = self.files.find(name) else { continue };
            // An expert of no width, say: the library that wrote it has such a module, and it has no elements.
            let empty = found.shape.contains(&0);
            if tied || empty || whole.ends_with(ROTARY) || modules.ignores(whole) {
                ignored.push(name.to_owned());
            } else {
                let scaled = name.strip_suffix(SCALE_SUFFIX).and_then(|weight| self.files.find(weight));
                let why = scaled.map_or(String::new(), |weight| format!(" for a weight that is {}", weight.dtype));
                problems.unknown.push(format!("{name} {:?}{}{why}", found.shape, self.files.of_several(found.file)));
            }
        }
        match problems.line() {
            None => Ok(ignored),
            Some(line) => Err(Error::checkpoint(self.files.whole(), line)),
        }
    }

    fn compare_scales(&self, name: &str, shape: &[usize], problems: &mut listing::Problems) -> Result<()> {
        let no_blocks =
            || self.files.bad(name, "is F8_E4M3, but config.json has no quantization_config with its blocks");
        let blocks = self.blocks.ok_or_else(no_blocks)?;
        let scale = format!("{name}{SCALE_SUFFIX}");
        let file = |found: Found<'_>| self.files.of_several(found.file);
        let Some(expected) = blocks.scales(shape) else {
            problems.types.push(format!("{name} F8_E4M3 of shape {shape:?} (expected F32, BF16 or F16)"));
            return Ok(());
        };
        match self.files.find(&scale) {
            None => problems.missing.push(format!("{scale} {expected:?}")),
            Some(found) if found.shape != expected => {
                problems.shapes.push(format!("{scale} {:?}{} (expected {expected:?})", found.shape, file(found)));
            }
            Some(found) if !blocks::SCALES.contains(&found.dtype) => {
                problems.types.push(format!("{scale} {}{} (expected F32 or F8_E8M0)", found.dtype, file(found)));
            }
            Some(_) => {}
        }
        Ok(())
    }

    /// Where embedding and output are one matrix, a second copy in the files says the same.
    fn check_tied(&self) -> Result<()> {
        let Some(found) = self.files.find(HEAD) else { return Ok(()) };
        let table = self.layout.in_file(EMBEDDING);
        let shape = self.files.find(table).map_or(&[][..], |table| table.shape);
        if found.shape != shape {
            let what = format!("has the shape {:?}, expected that of {table}, {shape:?}", found.shape);
            return Err(self.files.bad(HEAD, what));
        }
        let len: usize = shape.iter().product();
        for from in (0..len).step_by(WeightFiles::CHUNK) {
            let range = from..len.min(from + WeightFiles::CHUNK);
            if self.elements(HEAD, range.clone())? != self.elements(table, range)? {
                let what =
                    format!("differs from {table}, but tie_word_embeddings is true: set it to false for two matrices");
                return Err(self.files.bad(HEAD, what));
            }
        }
        Ok(())
    }

    /// How the files name and cut the tensors.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// The blocks of FP8 weights.
    pub fn blocks(&self) -> Option<Blocks> {
        self.blocks
    }

    /// The files.
    pub fn files(&self) -> &TensorFiles {
        &self.files
    }

    /// Tensors of the files that mean nothing to the model: of multi-token-prediction modules that it does not have, copies
    /// of its embedding and output matrix, rotary frequencies, tensors without elements.
    pub fn ignored(&self) -> &[String] {
        &self.ignored
    }

    /// A line about the ignored tensors, if there are any.
    pub fn note(&self) -> Option<String> {
        let count = self.ignored.len();
        let names = listing::some(&self.ignored);
        (count > 0).then(|| {
            let tensors = if count == 1 { "1 tensor is".to_owned() } else { format!("{count} tensors are") };
            format!("note: {}: {tensors} ignored: {names}", self.files.whole().display())
        })
    }

    /// Every piece of the model, in order.
    pub(super) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// The name, in its file, of the tensor that holds a piece.
    pub(super) fn holder(&self, part: &Part) -> &str {
        self.layout.in_file(&self.stored[part.stored].name)
    }

    /// Where a piece lies in the tensor that holds it, in elements.
    pub(super) fn place(&self, part: &Part) -> Range<usize> {
        part.from..part.from + part.len
    }

    /// Reads a piece of the model, at most [`CHUNK`](WeightFiles::CHUNK) values at a time, each with the place of the first.
    ///
    /// # Errors
    /// [`Error::Checkpoint`] for a name that the model does not have, and a factor of FP8 weights that is not finite;
    /// [`Error::Io`]; those of `each`.
    pub fn read(&self, piece: &str, mut each: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let unknown = || Error::checkpoint(self.files.whole(), format!("{piece} is no weight of this model"));
        let part = &self.parts[*self.by_name.get(piece).ok_or_else(unknown)?];
        let (holder, place) = (self.holder(part), self.place(part));
        for from in place.clone().step_by(WeightFiles::CHUNK) {
            let values = self.elements(holder, from..place.end.min(from + WeightFiles::CHUNK))?;
            each(from - place.start, &values)?;
        }
        Ok(())
    }

    /// Fills the weights that a rank has: of the experts, it reads its own alone.
    ///
    /// # Errors
    /// As [`read`](WeightFiles::read), and those of the backend.
    pub fn load(&self, backend: &dyn Backend, params: &Params) -> Result<()> {
        params.pieces()?.iter().try_for_each(|piece| {
            self.read(&piece.name, |from, values| {
                let part = piece.value.slice(from, from + values.len())?;
                Ok(backend.write(&part, bytemuck::cast_slice(values))?)
            })
        })
    }

    /// The values of some elements of a tensor of the files.
    pub(super) fn elements(&self, name: &str, range: Range<usize>) -> Result<Vec<f32>> {
        let missing = || Error::checkpoint(self.files.whole(), format!("there is no tensor {name}"));
        let found = self.files.find(name).ok_or_else(missing)?;
        let size = elements::size(found.dtype);
        let bytes = self.files.read(name, range.start * size, range.len() * size)?;
        match (found.dtype, self.blocks) {
            (Dtype::F8_E4M3, Some(blocks)) => self.dequantized(name, found, blocks, range, &bytes),
            (dtype, _) => elements::decode(dtype, &bytes)
                .ok_or_else(|| self.files.bad(name, format!("is {dtype}, expected F32, BF16, F16 or F8_E4M3"))),
        }
    }

    fn dequantized(
        &self,
        name: &str,
        found: Found<'_>,
        blocks: Blocks,
        range: Range<usize>,
        codes: &[u8],
    ) -> Result<Vec<f32>> {
        let &[.., rows, columns] = found.shape else {
            return Err(self.files.bad(name, format!("is F8_E4M3 of shape {:?}, expected a matrix", found.shape)));
        };
        let scale = format!("{name}{SCALE_SUFFIX}");
        let missing = || self.files.bad(name, format!("is F8_E4M3, but its scales {scale} are missing"));
        let dtype = self.files.find(&scale).ok_or_else(missing)?.dtype;
        let (first, last) = (range.start / (rows * columns), (range.end - 1) / (rows * columns));
        let matrix = rows.div_ceil(blocks.rows) * columns.div_ceil(blocks.columns) * elements::size(dtype);
        let bytes = self.files.read(&scale, first * matrix, (last + 1 - first) * matrix)?;
        let scales = blocks::decode_scales(dtype, &bytes)
            .ok_or_else(|| self.files.bad(&scale, format!("is {dtype}, expected F32 or F8_E8M0")))?;
        if let Some(bad) = scales.iter().find(|scale| !scale.is_finite()) {
            return Err(self.files.bad(&scale, format!("has the factor {bad}, expected finite ones")));
        }
        Ok(blocks.dequantize(codes, range, &Grid { rows, columns, first }, &scales))
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";
/// Rotary frequencies, which older files hold though they follow from the configuration.
const ROTARY: &str = ".rotary_emb.inv_freq";

fn layout_of(files: &TensorFiles, model: &Architecture) -> Result<Layout> {
    let mixture = |what: &str, a: &str, b: &str| {
        Error::checkpoint(files.whole(), format!("has {what}: {a} and {b}; expected one of the two everywhere"))
    };
    let with = files.names().find(|name| layout::has_prefix(name));
    let without =
        files.names().find(|name| ["embed_tokens.", "layers.", "norm."].iter().any(|start| name.starts_with(start)));
    if let (Some(with), Some(without)) = (with, without) {
        return Err(mixture("names with and without model.", with, without));
    }
    let prefixed = without.is_none();
    let layout = Layout { experts: Experts::Separate, prefixed };
    let experts = |experts| -> BTreeSet<String> {
        let specs = specs(model);
        let tensors = layout::stored(&specs, &model.names, experts);
        tensors.into_iter().map(|tensor| tensor.name).filter(|name| name.contains(".experts.")).collect()
    };
    let present = |names: BTreeSet<String>| {
        let mut names = names.into_iter().map(|name| layout.in_file(&name).to_owned());
        names.find(|name| files.contains(name))
    };
    match (present(experts(Experts::Separate)), present(experts(Experts::Fused))) {
        (Some(separate), Some(fused)) => Err(mixture("separate and fused experts", &separate, &fused)),
        (None, Some(_)) => Ok(Layout { experts: Experts::Fused, prefixed }),
        _ => Ok(layout),
    }
}

/// Multi-token-prediction modules in files.
struct Modules {
    /// Layers of the model's main part.
    layers: usize,
    /// The layer of the model's own module.
    own: Option<usize>,
    /// The layers of the others.
    others: BTreeSet<usize>,
}

impl Modules {
    fn of(files: &TensorFiles, layout: Layout, model: &Architecture) -> Modules {
        let layers = model.layers.len();
        let own = model.next.as_ref().map(|_| layers);
        let is_module = |name: &str| {
            let canonical = layout.canonical(name);
            let (layer, rest) = layer(&canonical)?;
            let module = layer >= layers && Some(layer) != own && rest.starts_with("eh_proj.");
            module.then_some(layer)
        };
        Modules { layers, own, others: files.names().filter_map(is_module).collect() }
    }

    /// Whether a tensor is of another module, or one of the copies that files hold for the model's own.
    fn ignores(&self, canonical: &str) -> bool {
        let Some((layer, rest)) = layer(canonical).filter(|(layer, _)| *layer >= self.layers) else { return false };
        let copy = ["embed_tokens.weight", "shared_head.head.weight"].contains(&rest);
        self.others.contains(&layer) || (self.own == Some(layer) && copy)
    }
}

/// The layer that a tensor belongs to, and the rest of its name.
fn layer(canonical: &str) -> Option<(usize, &str)> {
    let (layer, rest) = canonical.strip_prefix("model.layers.")?.split_once('.')?;
    Some((layer.parse().ok()?, rest))
}
