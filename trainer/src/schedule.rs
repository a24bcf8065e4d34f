//! The learning rate and AdamW's bias corrections, as pure functions of the step. NUMERICS.md, "Schedule".
//!
//! Steps count from 1. Everything is computed in f64 with `libm` and rounded to f32 once, so every platform agrees and
//! a resumed run has the numbers of one that was never interrupted.

use dropless_model::optimizer::StepNumbers;

use crate::config::{Schedule, TrainConfig, single};

/// The learning rate of a step.
///
/// Rises linearly to `learning_rate` over `warmup_steps`; then `cosine` falls along half a cosine to
/// `min_learning_rate` at the last step, and `wsd` stays until `decay_steps` before the end and falls linearly.
pub fn learning_rate(config: &TrainConfig, step: u64) -> f32 {
    let (peak, low) = (config.learning_rate, config.min_learning_rate);
    let (step, warm, steps) = (step as f64, config.warmup_steps as f64, config.steps as f64);
    if step < warm {
        return single(peak * step / warm);
    }
    let from = match config.schedule {
        Schedule::Cosine => warm,
        Schedule::Wsd => steps - config.decay_steps as f64,
    };
    if step <= from {
        return single(peak);
    }
    let progress = ((step - from) / (steps - from)).min(1.0);
    let height = match config.schedule {
        Schedule::Cosine => 0.5 + 0.5 * libm::cos(std::f64::consts::PI * progress),
        Schedule::Wsd => 1.0 - progress,
    };
    single(low + (peak - low) * height)
}

/// `1 - beta^step` of both moments.
pub fn bias_corrections(config: &TrainConfig, step: u64) -> [f32; 2] {
    [config.beta1, config.beta2].map(|beta| single(1.0 - libm::pow(beta, step as f64)))
}

/// The optimizer's numbers of a step.
pub fn step_numbers(config: &TrainConfig, step: u64) -> StepNumbers {
    StepNumbers { learning_rate: learning_rate(config, step), bias_corrections: bias_corrections(config, step) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Config;

    fn config(overrides: &[&str]) -> TrainConfig {
        let overrides: Vec<String> = overrides.iter().map(|s| format!("train.{s}")).collect();
        Config::load(None, &overrides).unwrap().train
    }

    #[test]
    fn b191_the_rate_depends_on_the_step_alone() {
        let config = config(&["warmup_steps=10", "learning_rate=1e-3", "min_learning_rate=0.0"]);
        assert_eq!(learning_rate(&config, 5), 5e-4);
        assert_eq!(learning_rate(&config, 10), 1e-3);
    }

    #[test]
    fn cosine_goes_from_the_peak_through_the_middle_to_the_end() {
        let config = config(&[
            "warmup_steps=10",
            "steps=110",
            "learning_rate=3e-3",
            "min_learning_rate=1e-3",
            "schedule=cosine",
        ]);
        assert_eq!(learning_rate(&config, 10), 3e-3);
        assert_eq!(learning_rate(&config, 60), 2e-3);
        assert_eq!(learning_rate(&config, 110), 1e-3);
        assert_eq!(learning_rate(&config, 500), 1e-3);
        let rates: Vec<f32> = (10..=110).map(|step| learning_rate(&config, step)).collect();
        assert!(rates.is_sorted_by(|a, b| a > b));
    }

    #[test]
    fn warmup_stable_decay_has_its_three_parts() {
        let config = config(&[
            "warmup_steps=4",
            "steps=20",
            "decay_steps=8",
            "learning_rate=2.0",
            "min_learning_rate=1.0",
            "schedule=wsd",
        ]);
        let rates: Vec<f32> = [1, 4, 12, 16, 20, 21].map(|step| learning_rate(&config, step)).into();
        assert_eq!(rates, [0.5, 2.0, 2.0, 1.5, 1.0, 1.0]);
    }

    #[test]
    fn no_warmup_starts_at_the_peak() {
        let config = config(&["warmup_steps=0", "schedule=wsd", "steps=10", "decay_steps=0", "learning_rate=0.25"]);
        assert_eq!(learning_rate(&config, 1), 0.25);
        assert_eq!(learning_rate(&config, 10), 0.25);
    }

    #[test]
    fn bias_corrections_start_at_one_minus_beta() {
        let config = config(&["beta1=0.75", "beta2=0.5"]);
        assert_eq!(bias_corrections(&config, 1), [0.25, 0.5]);
        assert_eq!(bias_corrections(&config, 2), [0.4375, 0.75]);
    }
}
