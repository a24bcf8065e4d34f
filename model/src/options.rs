//! How a model computes.

use crate::context::Activations;
use crate::moe::Recipe;
use crate::nn::LinearRecipe;

/// How a model computes, apart from its architecture.
#[derive(Clone, Debug)]
pub struct Options {
    /// Element type, and precision of the operands of the expert products.
    pub recipe: Recipe,
    /// Precision of the operands of the other linear layers.
    pub linear_recipe: LinearRecipe,
    /// Number of pieces in which a Mixture-of-Experts layer processes its tokens.
    pub chunks: usize,
    /// Largest worst case of such a piece, in bytes.
    pub memory_budget: u64,
    /// Coefficient of the auxiliary loss of one sequence, already divided by the sequences of a step; 0 for none.
    pub balance_coefficient: f64,
    /// What is done with activations between the forward and the backward pass.
    pub activations: Activations,
    /// Whether gradients and optimizer state are allocated.
    pub training: bool,
}

impl Default for Options {
    /// A forward pass alone, in bf16.
    fn default() -> Self {
        Options {
            recipe: Recipe::Bf16,
            linear_recipe: LinearRecipe::Bf16,
            chunks: 1,
            memory_budget: u64::MAX,
            balance_coefficient: 0.0,
            activations: Activations::default(),
            training: false,
        }
    }
}
