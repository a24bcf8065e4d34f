//! What a model is made of, whatever its family: the parts, their extents, and the names of their tensors.

use dropless_core::ops::Score;

use crate::attention::AttentionConfig;
use crate::names::Names;
use crate::rope::Rope;

/// A decoder of attention and MLP or Mixture-of-Experts layers.
#[derive(Clone, Debug)]
pub struct Architecture {
    /// Vocabulary size.
    pub vocab: usize,
    /// Width of the residual stream, H.
    pub hidden: usize,
    /// The second half of each layer.
    pub layers: Vec<Feed>,
    /// Attention, the same in every layer.
    pub attention: AttentionConfig,
    /// Rotary positions.
    pub rope: Rope,
    /// Epsilon of the norms, added to the mean square.
    pub eps: f32,
    /// Longest sequence, in tokens.
    pub max_positions: usize,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Whether the embedding is also the output matrix.
    pub tied: bool,
    /// The second half of the layer of the multi-token-prediction module, if there is one.
    pub next: Option<Feed>,
    /// The names of tensors and keys.
    pub names: Names,
}

/// The second half of a layer.
#[derive(Clone, Debug)]
pub enum Feed {
    /// A SwiGLU MLP.
    Dense {
        /// Its width.
        width: usize,
    },
    /// A Mixture-of-Experts layer.
    Moe(MoeConfig),
}

/// A Mixture-of-Experts layer.
#[derive(Clone, Debug)]
pub struct MoeConfig {
    /// Number of experts, E.
    pub experts: usize,
    /// Experts per token, K.
    pub top_k: usize,
    /// Width of an expert, I.
    pub width: usize,
    /// Width of the shared expert, if there is one.
    pub shared_width: Option<usize>,
    /// Score function.
    pub score: Score,
    /// Groups of experts; 1 for none.
    pub groups: usize,
    /// Groups that a token may choose from.
    pub top_groups: usize,
    /// Whether a token's weights are divided by their sum.
    pub normalize: bool,
    /// Scaling factor of the weights.
    pub scale: f64,
    /// Whether a bias that balances the experts is added to the scores for selection.
    pub selection_bias: bool,
}

impl MoeConfig {
    /// Whether a token's weights are the same whatever the router says: one weight, divided by itself. The loss of the
    /// tokens then has no gradient in the router.
    pub fn constant_weights(&self) -> bool {
        self.top_k == 1 && self.normalize
    }
}

impl Architecture {
    /// Every layer's second half, that of the multi-token-prediction module last.
    pub fn feeds(&self) -> impl Iterator<Item = &Feed> {
        self.layers.iter().chain(&self.next)
    }

    /// The first Mixture-of-Experts layer; the others are like it. None in a dense model.
    pub fn moe(&self) -> Option<&MoeConfig> {
        self.feeds().find_map(|feed| match feed {
            Feed::Moe(moe) => Some(moe),
            Feed::Dense { .. } => None,
        })
    }

    /// Parameters of all matrices, in f64: no extents overflow it.
    pub fn parameters(&self) -> f64 {
        let h = self.hidden as f64;
        let attention = self.attention.parameters(self.hidden);
        let feed = |feed: &Feed| match feed {
            Feed::Dense { width } => 3.0 * h * *width as f64,
            Feed::Moe(moe) => {
                let widths = moe.experts as f64 * moe.width as f64 + moe.shared_width.unwrap_or(0) as f64;
                h * (moe.experts as f64 + 3.0 * widths)
            }
        };
        2.0 * self.vocab as f64 * h + self.feeds().map(|f| attention + feed(f)).sum::<f64>()
    }
}
