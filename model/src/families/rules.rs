//! Rules that the values of several families have to keep. Each is one line naming fields and values.

use crate::architecture::Architecture;
use crate::rope::Scaling;

pub(super) type Check = Result<(), String>;

/// The largest of a rate or factor that makes any sense.
pub(super) const LARGE: f64 = 1e6;
/// With fewer parameters, no size of a tensor overflows.
const MOST_PARAMETERS: f64 = 1e13;
/// More layers than any model has; each is described before anything is counted.
const MOST_LAYERS: usize = 100_000;

pub(super) fn need(ok: bool, message: impl FnOnce() -> String) -> Check {
    if ok { Ok(()) } else { Err(message()) }
}

pub(super) fn positive(fields: &[(&str, usize)]) -> Check {
    fields.iter().try_for_each(|&(name, value)| need(value > 0, || format!("{name} is 0, expected at least 1")))
}

pub(super) fn between(name: &str, value: f64, low: f64, high: f64) -> Check {
    need((low..=high).contains(&value), || format!("{name} is {value}, expected {low} to {high}"))
}

/// The keys that every family has.
pub(super) struct Common<'a> {
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) max_position_embeddings: usize,
    pub(super) rms_norm_eps: f64,
    pub(super) rope_theta: f64,
    pub(super) initializer_range: f64,
    pub(super) rope_scaling: Option<&'a Scaling>,
}

/// The [`Common`] keys of a family's configuration.
macro_rules! common {
    ($model:expr) => {
        $crate::families::rules::Common {
            vocab_size: $model.vocab_size,
            hidden_size: $model.hidden_size,
            num_hidden_layers: $model.num_hidden_layers,
            num_attention_heads: $model.num_attention_heads,
            max_position_embeddings: $model.max_position_embeddings,
            rms_norm_eps: $model.rms_norm_eps,
            rope_theta: $model.rope_theta,
            initializer_range: $model.initializer_range,
            rope_scaling: $model.rope_scaling.as_ref(),
        }
    };
}
pub(super) use common;

impl Common<'_> {
    pub(super) fn check(&self) -> Check {
        positive(&[
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("max_position_embeddings", self.max_position_embeddings),
        ])?;
        let layers = self.num_hidden_layers;
        need(layers <= MOST_LAYERS, || format!("num_hidden_layers is {layers}, expected at most {MOST_LAYERS}"))?;
        between("rms_norm_eps", self.rms_norm_eps, 0.0, 1.0)?;
        between("rope_theta", self.rope_theta, 1.0, 1e12)?;
        between("initializer_range", self.initializer_range, 0.0, LARGE)?;
        self.rope_scaling.map_or(Ok(()), Scaling::check)
    }
}

/// A token chooses `top_k` of `experts` experts, each named by its key.
pub(super) fn choice(top_k: (&str, usize), experts: (&str, usize)) -> Check {
    positive(&[experts, top_k])?;
    need(top_k.1 <= experts.1, || {
        format!(
            "{} is {}, but model.{} is {} (a token visits each at most once)",
            top_k.0, top_k.1, experts.0, experts.1
        )
    })
}

/// What holds of the parts.
pub(super) fn size(model: &Architecture) -> Check {
    let parameters = model.parameters();
    need(parameters <= MOST_PARAMETERS, || {
        format!("[model] describes about {parameters:.1e} parameters, expected at most {MOST_PARAMETERS:.0e}")
    })
}
