//! The pieces that the MoE layer and a model around it share: the token layout of a step, weights with their gradient
//! shards, the operands of products under a recipe, linear layers, the SwiGLU MLP, and saved activations.

mod activation;
mod linear;
mod mlp;
mod norm;
pub(crate) mod quantized;
mod tokens;

pub use activation::{Policy, Saved};
pub use linear::{Linear, LinearRecipe, Weight, dgrad, forward, wgrad};
pub use mlp::{Mlp, MlpPolicy, MlpSaved};
pub use norm::{Norm, Normed};
pub use tokens::Tokens;
