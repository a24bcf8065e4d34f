//! The parameters as layers take them: weights with their gradients.

use dropless_core::{Result, Tensor};

use crate::nn::{Linear, LinearRecipe, Norm, Weight};
use crate::params::{Id, Params};
use crate::train_state::TrainState;

/// A model's weights, with gradients where it is trained.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Weights<'a> {
    pub(crate) params: &'a Params,
    pub(crate) state: Option<&'a TrainState>,
    pub(crate) linear_recipe: LinearRecipe,
}

impl Weights<'_> {
    /// What an op reads, and where its gradient goes.
    pub(crate) fn get(self, id: Id) -> Result<Weight> {
        let grad = self.state.map(|state| state.grad(self.params.spec(id))).transpose()?;
        Ok(Weight { value: self.params.value(id)?, grad })
    }

    /// A linear layer.
    pub(crate) fn linear(self, id: Id) -> Result<Linear> {
        Ok(Linear::new(self.get(id)?, self.linear_recipe))
    }

    /// A norm.
    pub(crate) fn norm(self, id: Id, eps: f32) -> Result<Norm> {
        Ok(Norm { weight: self.get(id)?, eps })
    }

    /// A selection bias.
    pub(crate) fn selection_bias(self, id: Id) -> Result<Tensor> {
        self.params.selection_bias(id)
    }
}
