//! The useful arithmetic of a model, by which speed is measured.

use crate::architecture::{Architecture, Feed};

impl Feed {
    /// Parameters in the products of a token: its experts, not all of them.
    fn active(&self, h: f64) -> f64 {
        match self {
            Feed::Dense { width } => 3.0 * h * *width as f64,
            Feed::Moe(moe) => {
                let widths = (moe.top_k * moe.width + moe.shared_width.unwrap_or(0)) as f64;
                h * (moe.experts as f64 + 3.0 * widths)
            }
        }
    }
}

impl Architecture {
    /// Parameters in the matrix products of a token: its experts, not all; the embedding is a look-up.
    pub fn active_parameters(&self) -> f64 {
        let h = self.hidden as f64;
        let modules = if self.next.is_some() { 1.0 } else { 0.0 };
        let layers = self.feeds().map(|feed| self.attention.parameters(self.hidden) + feed.active(h)).sum::<f64>();
        layers + modules * 2.0 * h * h + (1.0 + modules) * self.vocab as f64 * h
    }

    /// Useful floating-point operations of forward and backward for a token that attends to this many keys on average,
    /// itself included.
    ///
    /// `6 p + 6 layers heads (query + value) keys`. The first term: a product has 2 operations for each parameter
    /// in the forward pass and 4 in the backward pass, with p the
    /// [`active_parameters`](Architecture::active_parameters), the output matrix once more for a multi-token-prediction
    /// module. The second: scores and values, 2 operations for each element and key, three times that with the backward
    /// pass; keys are those that the mask leaves, about half a sequence where one document fills it, fewer otherwise.
    /// Activation checkpointing, padding and everything that is not a product do not count.
    pub fn flops_per_token(&self, keys: f64) -> f64 {
        let (qk, v) = self.attention.head_dims();
        let attention = 6 * self.feeds().count() * self.attention.heads() * (qk + v);
        6.0 * self.active_parameters() + attention as f64 * keys
    }
}
