//! Rules that the values of several families have to keep. Each is one line naming fields and values.

use crate::Single;
use crate::architecture::Architecture;
use crate::rope::Scaling;

pub(super) type Check = Result<(), String>;

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
        Single { high: 1.0, ..Single::RATE }.check("rms_norm_eps", self.rms_norm_eps)?;
        // With the base 1, all pairs of a head would turn alike.
        Single { zero: false, low: 1.0 + f32::EPSILON, high: 1e12 }.check("rope_theta", self.rope_theta)?;
        Single::RATE.check("initializer_range", self.initializer_range)?;
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
