//! Rotary tables, with YaRN (arXiv 2309.00071) when the configuration asks for it. Computed in f64 with `libm`, so that
//! every platform has the same table.

use dropless_core::{Backend, DType, Tensor};

use crate::config::{ModelConfig, RopeScaling, single};
use crate::error::Result;

/// Cosines and sines, f32 `[positions, rope / 2]`.
#[derive(Debug)]
pub(super) struct Tables {
    pub(super) cos: Tensor,
    pub(super) sin: Tensor,
}

impl Tables {
    pub(super) fn new(backend: &dyn Backend, model: &ModelConfig, positions: usize) -> Result<Tables> {
        let frequencies = frequencies(model);
        let factor = model.rope_scaling.as_ref().map_or(1.0, table_factor);
        let table = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..positions).flat_map(|p| frequencies.iter().map(move |w| single(f(p as f64 * w) * factor))).collect()
        };
        let shape = [positions, frequencies.len()];
        Ok(Tables {
            cos: backend.upload(DType::F32, &shape, &table(libm::cos))?,
            sin: backend.upload(DType::F32, &shape, &table(libm::sin))?,
        })
    }
}

/// `theta^(-2i / rope)`; under YaRN slow ones are divided by the factor, fast ones left alone, with a ramp in between.
fn frequencies(model: &ModelConfig) -> Vec<f64> {
    let rope = model.qk_rope_head_dim;
    let plain = (0..rope / 2).map(|i| libm::pow(model.rope_theta, -2.0 * i as f64 / rope as f64));
    let Some(yarn) = &model.rope_scaling else { return plain.collect() };
    // The pair whose frequency turns `rotations` times over the original length.
    let pair = |rotations: f64| {
        let length = yarn.original_max_position_embeddings as f64;
        rope as f64 * libm::log(length / (rotations * 2.0 * std::f64::consts::PI)) / (2.0 * libm::log(model.rope_theta))
    };
    let low = libm::floor(pair(yarn.beta_fast)).max(0.0);
    let mut high = libm::ceil(pair(yarn.beta_slow)).min(rope as f64 - 1.0);
    if low == high {
        high += 0.001;
    }
    plain
        .enumerate()
        .map(|(i, w)| {
            let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            w / yarn.factor * interpolated + w * (1.0 - interpolated)
        })
        .collect()
}

/// The attention temperature `0.1 mscale ln(factor) + 1`.
fn temperature(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 }
}

/// Factor of the tables. DeepSeek's configurations give both scales, and their quotient is used.
fn table_factor(yarn: &RopeScaling) -> f64 {
    if yarn.mscale != 0.0 && yarn.mscale_all_dim != 0.0 {
        temperature(yarn.factor, yarn.mscale) / temperature(yarn.factor, yarn.mscale_all_dim)
    } else {
        temperature(yarn.factor, 1.0)
    }
}

/// The factor of the attention scores: `1 / sqrt(qk dim)`, times the squared temperature under YaRN.
pub(super) fn softmax_scale(model: &ModelConfig) -> f32 {
    let dim = (model.qk_nope_head_dim + model.qk_rope_head_dim) as f64;
    let m = match &model.rope_scaling {
        Some(yarn) if yarn.mscale_all_dim != 0.0 => temperature(yarn.factor, yarn.mscale_all_dim),
        _ => 1.0,
    };
    single(m * m / libm::sqrt(dim))
}
