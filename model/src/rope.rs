//! Rotary position embedding (arXiv 2104.09864): the tables, and the ways to extend them to longer contexts. Computed in
//! f64 with `libm`, so that every platform has the same table.

use dropless_core::{Backend, DType, Result, Tensor};
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::{Single, fields, single};

/// Rotary positions of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Elements of a head that are rotated, an even number.
    pub dim: usize,
    /// Base of the frequencies.
    pub theta: f64,
    /// Context extension.
    pub scaling: Option<Scaling>,
    /// Whether the scores' factor has the squared temperature of YaRN's `mscale_all_dim` (DeepSeek).
    pub scaled_scores: bool,
}

/// How frequencies change for contexts longer than the original, in the names of a Hugging Face `config.json`.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Scaling {
    /// Every frequency is divided by the factor (position interpolation, arXiv 2306.15595).
    Linear(Linear),
    /// YaRN (arXiv 2309.00071).
    Yarn(Yarn),
    /// As Llama 3.1: slow frequencies are divided, fast ones left alone, with a ramp between two wavelengths.
    Llama3(Llama3),
}

/// The parameter of position interpolation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Linear {
    /// New length over original length.
    pub factor: f64,
}

/// The parameters of YaRN.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Yarn {
    /// New length over original length.
    pub factor: f64,
    /// Original length.
    pub original_max_position_embeddings: usize,
    /// Rotations above which a frequency is left alone.
    #[serde(default = "beta_fast")]
    pub beta_fast: f64,
    /// Rotations below which a frequency is divided by the factor.
    #[serde(default = "beta_slow")]
    pub beta_slow: f64,
    /// Temperature of the tables; absent or 0 for that of the factor alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mscale: Option<f64>,
    /// Temperature that the scores' factor takes over from the tables; absent or 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mscale_all_dim: Option<f64>,
    /// Factor of the tables, instead of what the temperatures say.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attention_factor: Option<f64>,
    /// Whether the ramp begins and ends at whole pairs.
    #[serde(default = "truncate")]
    pub truncate: bool,
}

fn beta_fast() -> f64 {
    32.0
}

fn beta_slow() -> f64 {
    1.0
}

fn truncate() -> bool {
    true
}

/// The parameters of Llama 3.1's extension.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Llama3 {
    /// New length over original length.
    pub factor: f64,
    /// Original length.
    pub original_max_position_embeddings: usize,
    /// Original length over the wavelength above which a frequency is divided.
    pub low_freq_factor: f64,
    /// Original length over the wavelength below which a frequency is left alone.
    pub high_freq_factor: f64,
}

/// Written out, since a derived implementation for a tagged enum does not name the field whose value it refuses.
impl<'de> Deserialize<'de> for Scaling {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Scaling, D::Error> {
        let mut given = Map::<String, Value>::deserialize(deserializer)?;
        let method = given.remove("type").unwrap_or_default();
        let scaling = match method.as_str() {
            Some("linear") => fields::read(given).map(Scaling::Linear),
            Some("yarn") => fields::read(given).map(Scaling::Yarn),
            Some("llama3") => fields::read(given).map(Scaling::Llama3),
            _ => Err(format!("type is {method}, expected linear, yarn or llama3")),
        };
        scaling.map_err(D::Error::custom)
    }
}

impl Scaling {
    /// Verifies the values.
    ///
    /// # Errors
    /// A line with the field and the value that is out of range.
    pub fn check(&self) -> std::result::Result<(), String> {
        let above = |name: &str, value: f64, low: f64| match value.is_finite() && value >= low && value <= LARGE {
            true => Ok(()),
            false => Err(format!("rope_scaling.{name} is {value}, expected {low} to {LARGE}")),
        };
        let ordered = |small: (&str, f64), large: (&str, f64)| match small.1 > 0.0 && large.1 > small.1 {
            true => Ok(()),
            false => Err(format!(
                "rope_scaling.{} is {} and {} is {}, expected {0} > {2} > 0",
                large.0, large.1, small.0, small.1
            )),
        };
        let original = |length: usize| match length {
            0 => Err("rope_scaling.original_max_position_embeddings is 0, expected at least 1".to_owned()),
            _ => Ok(()),
        };
        match self {
            Scaling::Linear(linear) => above("factor", linear.factor, 1.0),
            Scaling::Yarn(yarn) => {
                above("factor", yarn.factor, 1.0)?;
                original(yarn.original_max_position_embeddings)?;
                above("beta_fast", yarn.beta_fast, 0.0)?;
                ordered(("beta_slow", yarn.beta_slow), ("beta_fast", yarn.beta_fast))?;
                above("mscale", yarn.mscale.unwrap_or(0.0), 0.0)?;
                above("mscale_all_dim", yarn.mscale_all_dim.unwrap_or(0.0), 0.0)?;
                // By 0, no token would see another one before others.
                Single::FACTOR.check("rope_scaling.attention_factor", yarn.attention_factor.unwrap_or(1.0))
            }
            Scaling::Llama3(llama) => {
                above("factor", llama.factor, 1.0)?;
                original(llama.original_max_position_embeddings)?;
                above("high_freq_factor", llama.high_freq_factor, 0.0)?;
                ordered(("low_freq_factor", llama.low_freq_factor), ("high_freq_factor", llama.high_freq_factor))
            }
        }
    }
}

/// The largest of a factor that makes any sense.
const LARGE: f64 = 1e6;

impl Rope {
    /// The angle that a position adds, for each pair: `theta^(-2i / dim)`, changed by the extension.
    fn frequencies(&self) -> Vec<f64> {
        let dim = self.dim as f64;
        let plain = (0..self.dim / 2).map(|i| libm::pow(self.theta, -2.0 * i as f64 / dim));
        match &self.scaling {
            None => plain.collect(),
            Some(Scaling::Linear(linear)) => plain.map(|w| w / linear.factor).collect(),
            Some(Scaling::Llama3(llama)) => plain.map(|w| llama.scaled(w)).collect(),
            Some(Scaling::Yarn(yarn)) => {
                let (low, high) = yarn.ramp(dim, self.theta);
                let interpolated = |i: usize| ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                plain.enumerate().map(|(i, w)| mix(w / yarn.factor, w, interpolated(i))).collect()
            }
        }
    }

    /// Factor of the tables.
    fn table_factor(&self) -> f64 {
        match &self.scaling {
            Some(Scaling::Yarn(yarn)) => yarn.table_factor(),
            _ => 1.0,
        }
    }

    /// The factor of the attention scores for queries of `dim` elements: `1 / sqrt(dim)`, under YaRN with `mscale_all_dim`
    /// and scaled scores times the squared temperature.
    pub(crate) fn softmax_scale(&self, dim: usize) -> f32 {
        let temperature = match &self.scaling {
            Some(Scaling::Yarn(yarn)) if self.scaled_scores => {
                yarn.mscale_all_dim.filter(|&m| m != 0.0).map_or(1.0, |m| temperature(yarn.factor, m))
            }
            _ => 1.0,
        };
        single(temperature * temperature / libm::sqrt(dim as f64))
    }
}

/// `a * share + b * (1 - share)`.
fn mix(a: f64, b: f64, share: f64) -> f64 {
    a * share + b * (1.0 - share)
}

/// The attention temperature `0.1 mscale ln(factor) + 1`; 1 without an extension.
fn temperature(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * mscale * libm::log(factor) + 1.0 }
}

impl Yarn {
    /// The pairs where the ramp between untouched and divided frequencies begins and ends.
    fn ramp(&self, dim: f64, theta: f64) -> (f64, f64) {
        // The pair whose frequency turns `rotations` times over the original length.
        let pair = |rotations: f64| {
            let length = self.original_max_position_embeddings as f64;
            dim * libm::log(length / (rotations * 2.0 * std::f64::consts::PI)) / (2.0 * libm::log(theta))
        };
        let (low, high) = (pair(self.beta_fast), pair(self.beta_slow));
        let (low, high) = if self.truncate { (libm::floor(low), libm::ceil(high)) } else { (low, high) };
        let (low, high) = (low.max(0.0), high.min(dim - 1.0));
        (low, if low == high { high + 0.001 } else { high })
    }

    /// DeepSeek's configurations give both temperatures, and their quotient is used.
    fn table_factor(&self) -> f64 {
        match (self.attention_factor, self.mscale.unwrap_or(0.0), self.mscale_all_dim.unwrap_or(0.0)) {
            (Some(factor), _, _) => factor,
            (None, mscale, all) if mscale != 0.0 && all != 0.0 => {
                temperature(self.factor, mscale) / temperature(self.factor, all)
            }
            _ => temperature(self.factor, 1.0),
        }
    }
}

impl Llama3 {
    fn scaled(&self, w: f64) -> f64 {
        let turns = self.original_max_position_embeddings as f64 * w / (2.0 * std::f64::consts::PI);
        if turns < self.low_freq_factor {
            w / self.factor
        } else if turns > self.high_freq_factor {
            w
        } else {
            mix(w, w / self.factor, (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor))
        }
    }
}

/// Cosines and sines, f32 `[positions, dim / 2]`.
#[derive(Debug)]
pub(crate) struct Tables {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
}

impl Tables {
    pub(crate) fn new(backend: &dyn Backend, rope: &Rope, positions: usize) -> Result<Tables> {
        let (frequencies, factor) = (rope.frequencies(), rope.table_factor());
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
