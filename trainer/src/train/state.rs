//! A model's tensors to and from checkpoints.

use dropless_core::{Backend, Caps, Group, Tensor};

use dropless_model::Model;
use dropless_model::hf::tensors::Head;
use dropless_model::hf::{ModelDir, TensorFiles, WeightFiles};
use safetensors::Dtype;

use crate::config::Config;
use crate::error::Result;
use crate::output;

/// What the optimizer's first moment of a weight is called in a checkpoint.
fn first_moment(name: &str) -> String {
    format!("exp_avg.{name}")
}

/// What the second moment is called.
fn second_moment(name: &str) -> String {
    format!("exp_avg_sq.{name}")
}

/// The weights that a run begins with: drawn from its seed, or those of the model directory it names. The first rank says
/// what of the directory is ignored.
///
/// # Errors
/// [`crate::Error::Checkpoint`] and [`crate::Error::Config`] for a directory that does not fit; those of the backend.
pub fn begin(backend: &dyn Backend, model: &mut Model, config: &Config) -> Result<()> {
    let Some(origin) = &config.origin else {
        let deviation = config.model.architecture().initializer_range;
        return Ok(model.initialise(backend, config.train.seed, deviation)?);
    };
    let dir = ModelDir::open(origin.directory.as_ref())?;
    config.check_model(&dir.config.model, &dir.path)?;
    if backend.caps().rank == 0 {
        dir.notes().iter().for_each(output::tell);
    }
    load(backend, model, &dir.weights, None)
}

/// Loads weights, and optimizer state if given.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names a tensor that is missing or does not fit.
pub fn load(
    backend: &dyn Backend,
    model: &mut Model,
    weights: &WeightFiles,
    optimizer: Option<&TensorFiles>,
) -> Result<()> {
    weights.load(backend, &model.params)?;
    if let (Some(state), Some(optimizer)) = (&model.state, optimizer) {
        for piece in model.params.pieces()? {
            let Some(moments) = state.moments(&piece)? else { continue };
            for (tensor, name) in [(&moments.m, first_moment(&piece.name)), (&moments.v, second_moment(&piece.name))] {
                backend.write(tensor, bytemuck::cast_slice(&optimizer.values(&name, &piece.shape)?))?;
            }
        }
    }
    Ok(model.refresh(backend)?)
}

/// A rank's part of a checkpoint: names and f32 tensors of the weights and of the optimizer state. The ranks that hold
/// the same tensors, which is all of them for replicated ones, share them out in equal parts.
///
/// # Errors
/// A model whose parameters do not fit together.
pub fn part(caps: &Caps, model: &Model) -> Result<[Vec<(Head, Tensor)>; 2]> {
    let pieces = model.params.pieces()?;
    let total = |replicated| pieces.iter().filter(|p| p.replicated == replicated).map(|p| p.value.len()).sum::<usize>();
    let (mut weights, mut optimizer) = (Vec::new(), Vec::new());
    let mut share = |group: Group, replicated: bool| -> Result<()> {
        let (place, ranks) = (caps.place(group), caps.size(group));
        let each = total(replicated).div_ceil(ranks);
        let mut before = 0;
        for piece in pieces.iter().filter(|piece| piece.replicated == replicated) {
            let owner = before / each.max(1);
            before += piece.value.len();
            if owner != place {
                continue;
            }
            let head = |name: String| Head { name, dtype: Dtype::F32, shape: piece.shape.clone() };
            if let Some(moments) = model.state.as_ref().map(|state| state.moments(piece)).transpose()?.flatten() {
                optimizer.push((head(first_moment(&piece.name)), moments.m));
                optimizer.push((head(second_moment(&piece.name)), moments.v));
            }
            weights.push((head(piece.name.clone()), piece.value.clone()));
        }
        Ok(())
    };
    share(Group::World, true)?;
    share(Group::Replicas, false)?;
    Ok([weights, optimizer])
}
