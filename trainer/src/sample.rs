//! The choice of the next token from logits: temperature, then the nucleus of probability `top_p` (arXiv 1904.09751).

use dropless_model::init;

/// How to choose.
#[derive(Clone, Copy, Debug)]
pub struct Sampling {
    /// Seed of the choices.
    pub seed: u64,
    /// Divides the logits; 0 takes the largest (the first of equals).
    pub temperature: f64,
    /// The smallest set of most likely tokens with at least this probability is eligible; 1 for all.
    pub top_p: f64,
}

impl Sampling {
    /// The token chosen at `position`, a pure function of its arguments. A NaN is never chosen; None if nothing can be.
    pub fn choose(&self, logits: &[f32], position: u64) -> Option<u32> {
        let mut order: Vec<(u32, f64)> =
            (0..).zip(logits).filter(|(_, x)| !x.is_nan()).map(|(id, &x)| (id, f64::from(x))).collect();
        order.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
        let largest = order.first()?.1;
        if self.temperature == 0.0 || largest.is_infinite() {
            return Some(order[0].0);
        }
        for (_, x) in &mut order {
            *x = libm::exp((*x - largest) / self.temperature);
        }
        let sum: f64 = order.iter().map(|(_, p)| p).sum();
        let mut nucleus = 0.0;
        let eligible = order.iter().position(|(_, p)| {
            nucleus += p;
            nucleus >= self.top_p * sum
        });
        order.truncate(eligible.map_or(order.len(), |last| last + 1));
        let word = init::block(init::key(self.seed, "sample"), position)[0];
        let mut left = (f64::from(word) + 0.5) / 4_294_967_296.0 * order.iter().map(|(_, p)| p).sum::<f64>();
        let chosen = order.iter().find(|(_, p)| {
            left -= p;
            left < 0.0
        });
        chosen.or(order.last()).map(|&(id, _)| id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frequencies(sampling: Sampling, logits: &[f32], draws: u64) -> Vec<f64> {
        let mut counts = vec![0.0; logits.len()];
        for position in 0..draws {
            counts[sampling.choose(logits, position).unwrap() as usize] += 1.0 / draws as f64;
        }
        counts
    }

    #[test]
    fn temperature_zero_takes_the_first_of_the_largest() {
        let greedy = Sampling { seed: 0, temperature: 0.0, top_p: 1.0 };
        assert_eq!(greedy.choose(&[1.0, 3.0, 3.0, 2.0], 0), Some(1));
    }

    #[test]
    fn a_nan_is_never_chosen() {
        let greedy = Sampling { seed: 0, temperature: 0.0, top_p: 1.0 };
        assert_eq!(greedy.choose(&[f32::NAN, -1.0], 0), Some(1));
        assert_eq!(greedy.choose(&[f32::NAN], 0), None);
        assert_eq!(Sampling { temperature: 1.0, ..greedy }.choose(&[f32::INFINITY, f32::NAN, 0.0], 0), Some(0));
    }

    /// Four standard deviations of a binomial count around each probability.
    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [0.0f32, 1.0, 2.0];
        let draws = 20_000;
        for temperature in [0.5f64, 1.0, 2.0] {
            let weights: Vec<f64> = logits.iter().map(|&x| (f64::from(x) / temperature).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let found = frequencies(Sampling { seed: 3, temperature, top_p: 1.0 }, &logits, draws);
            for (found, weight) in found.iter().zip(&weights) {
                let p = weight / sum;
                assert!((found - p).abs() < 4.0 * (p * (1.0 - p) / draws as f64).sqrt(), "{found} for {p}");
            }
        }
    }

    #[test]
    fn the_nucleus_is_the_smallest_set_that_suffices() {
        // Probabilities 0.5, 0.3, 0.2.
        let logits = [0.5f32.ln(), 0.3f32.ln(), 0.2f32.ln()];
        let zeros = |top_p| {
            let found = frequencies(Sampling { seed: 5, temperature: 1.0, top_p }, &logits, 2000);
            found.iter().filter(|p| **p == 0.0).count()
        };
        assert_eq!([zeros(0.0), zeros(0.45), zeros(0.7), zeros(0.9), zeros(1.0)], [2, 2, 1, 0, 0]);
    }
}
