//! How much arithmetic a model needs: what speed is measured by.

use crate::config::{Config, ModelConfig};

/// Parameters in the matrix products of latent attention in one layer.
fn attention(m: &ModelConfig) -> usize {
    let (h, heads) = (m.hidden_size, m.num_attention_heads);
    let (nope, rope, v) = (m.qk_nope_head_dim, m.qk_rope_head_dim, m.v_head_dim);
    let query = heads * (nope + rope);
    let query = if m.q_lora_rank == 0 { h * query } else { m.q_lora_rank * (h + query) };
    query + h * (m.kv_lora_rank + rope) + m.kv_lora_rank * heads * (nope + v) + heads * v * h
}

/// Parameters in the products of a token in a layer's second half: its experts, not all of them.
fn feed(m: &ModelConfig, layer: usize) -> usize {
    if layer < m.first_k_dense_replace {
        return 3 * m.hidden_size * m.intermediate_size;
    }
    let experts = m.num_experts_per_tok + m.n_shared_experts;
    m.hidden_size * (m.n_routed_experts + 3 * m.moe_intermediate_size * experts)
}

/// Useful floating-point operations of forward and backward for a token.
///
/// `6 p + 3 layers heads (nope + rope + v) sequence`. The first term: a product has 2 operations for each parameter in the
/// forward pass and 4 in the backward pass, with p parameters in the token's products (its experts, not all; the embedding
/// is a look-up; the output matrix once more for a multi-token-prediction module). The second: scores and values, 2
/// operations for each element and key, over half the sequence on average, three times that with the backward pass.
/// Recomputation, padding and everything that is no product do not count.
pub fn per_token(config: &Config) -> f64 {
    let m = &config.model;
    let modules = m.num_nextn_predict_layers;
    let layers = m.num_hidden_layers + modules;
    let projections = modules * 2 * m.hidden_size * m.hidden_size;
    let heads = (1 + modules) * m.vocab_size * m.hidden_size;
    let products = (0..layers).map(|layer| attention(m) + feed(m, layer)).sum::<usize>() + projections + heads;
    let dims = m.qk_nope_head_dim + m.qk_rope_head_dim + m.v_head_dim;
    (6 * products + 3 * layers * m.num_attention_heads * dims * config.train.sequence_length) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(set: &[&str]) -> f64 {
        per_token(&Config::load(None, &set.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>()).unwrap())
    }

    #[test]
    fn the_default_model_by_hand() {
        // Query 128 * 128, latent 128 * 64, keys and values 48 * 192, output 128 * 128.
        let attention = 16384 + 8192 + 9216 + 16384;
        let dense = 3 * 128 * 256;
        let sparse = 128 * 16 + 3 * 128 * 64 * 3;
        let products = 4 * attention + dense + 3 * sparse + 288 * 128;
        assert_eq!(of(&[]), f64::from(6 * products + 3 * 4 * 4 * 64 * 128));
    }

    #[test]
    fn every_part_counts() {
        let base = of(&[]);
        // A low-rank query of rank 64 is as large as the plain one here; 32 saves 6 * 4 * 8192.
        assert_eq!(of(&["model.q_lora_rank=64"]), base);
        assert_eq!(of(&["model.q_lora_rank=32"]), base - 196_608.0);
        // One more expert a token in each of three layers.
        assert_eq!(of(&["model.num_experts_per_tok=3"]), base + 6.0 * 3.0 * 24576.0);
        // A module: a projection of 2 * 128 * 128, a sparse layer and the output matrix.
        let module = 6.0 * (32768.0 + 50176.0 + 75776.0 + 36864.0) + 3.0 * 4.0 * 64.0 * 128.0;
        assert_eq!(of(&["model.num_nextn_predict_layers=1"]), base + module);
        assert_eq!(of(&["train.sequence_length=64"]), base - 3.0 * 4.0 * 4.0 * 64.0 * 64.0);
    }
}
