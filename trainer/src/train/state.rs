//! A model's tensors to and from checkpoints.

use dropless_core::{Backend, Group, Tensor};

use dropless_model::Model;
use dropless_model::hf::{NamedTensor, TensorFiles};

use crate::error::Result;

/// What the optimizer's first moment of a weight is called in a checkpoint.
fn first_moment(name: &str) -> String {
    format!("exp_avg.{name}")
}

/// What the second moment is called.
fn second_moment(name: &str) -> String {
    format!("exp_avg_sq.{name}")
}

/// Loads weights, and optimizer state if given.
///
/// # Errors
/// [`crate::Error::Checkpoint`] names a tensor that is missing or does not fit.
pub fn load(
    backend: &dyn Backend,
    model: &mut Model,
    weights: &TensorFiles,
    optimizer: Option<&TensorFiles>,
) -> Result<()> {
    let fill = |tensor: &Tensor, files: &TensorFiles, name: &str, shape: &[usize]| -> Result<()> {
        Ok(backend.write(tensor, bytemuck::cast_slice(&files.values(name, shape)?))?)
    };
    for piece in model.params.pieces()? {
        let (name, shape) = (&piece.name, &piece.shape);
        fill(&piece.value, weights, name, shape)?;
        let moments = model.state.as_ref().map(|state| state.moments(&piece)).transpose()?.flatten();
        if let (Some(moments), Some(optimizer)) = (moments, optimizer) {
            fill(&moments.m, optimizer, &first_moment(name), shape)?;
            fill(&moments.v, optimizer, &second_moment(name), shape)?;
        }
    }
    Ok(model.refresh(backend)?)
}

/// This rank's part of a checkpoint: weights and optimizer state. Replicated tensors are the first rank's to save, and
/// experts the first replica's.
///
/// # Errors
/// Those of the backend.
pub fn tensors(backend: &dyn Backend, model: &Model) -> Result<(Vec<NamedTensor>, Vec<NamedTensor>)> {
    let (mut weights, mut optimizer) = (Vec::new(), Vec::new());
    for piece in model.params.pieces()? {
        let group = if piece.replicated { Group::World } else { Group::Replicas };
        if backend.caps().place(group) != 0 {
            continue;
        }
        let named = |name: String, tensor: &Tensor| -> Result<NamedTensor> {
            Ok(NamedTensor::f32(name, &piece.shape, &backend.download::<f32>(tensor)?))
        };
        if let Some(moments) = model.state.as_ref().map(|state| state.moments(&piece)).transpose()?.flatten() {
            optimizer.push(named(first_moment(&piece.name), &moments.m)?);
            optimizer.push(named(second_moment(&piece.name), &moments.v)?);
        }
        weights.push(named(piece.name.clone(), &piece.value)?);
    }
    Ok((weights, optimizer))
}
