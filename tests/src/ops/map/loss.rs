//! Cross-entropy.

use dropless_core::DType;
use dropless_core::ops::{CrossEntropy, NONE};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] = &[Problem::new("cross_entropy", cross_entropy)];

fn cross_entropy(m: &mut Maker<'_>) {
    let (tokens, vocabulary) = (m.extent(20), m.extent(700));
    let [from, to] = [0; 2].map(|_| m.float());
    let logits = m.tensor(from, &[tokens, vocabulary]);
    let mut targets: Vec<u32> =
        (0..tokens).map(|_| if m.random.below(5) == 0 { NONE } else { m.random.below(vocabulary) as u32 }).collect();
    m.stray(&mut targets, vocabulary);
    let (targets, scale) = (m.integers(&[tokens], &targets), m.tensor(DType::F32, &[1]));
    let (loss, d_logits) = (m.output("loss", DType::F32, &[tokens]), m.output("d_logits", to, &[tokens, vocabulary]));
    let given = (m.below(3) > 0).then_some(&d_logits);
    m.run(
        CrossEntropy { logits: &logits, targets: &targets, scale: &scale, loss: &loss, d_logits: given },
        CrossEntropy::run,
    );
}

#[cfg(test)]
mod tests {
    use dropless_core::ops::{CrossEntropy, NONE};
    use dropless_core::{Backend, DType};

    use super::super::harness::*;

    struct Case {
        vocabulary: usize,
        logits: Vec<f32>,
        targets: Vec<u32>,
        scale: f32,
    }

    impl Case {
        /// Loss and gradient; the loss is the same when no gradient is asked for.
        fn run(&self, dtype: DType) -> [Vec<f32>; 2] {
            let (tokens, shape) = (self.targets.len(), [self.targets.len(), self.vocabulary]);
            let [loss, alone, d_logits] = everywhere(|b| {
                let (loss, alone) = (guarded(b, DType::F32, &[tokens]), guarded(b, DType::F32, &[tokens]));
                let d_logits = guarded(b, dtype, &shape);
                let op = CrossEntropy {
                    logits: &floats(b, dtype, &shape, &self.logits),
                    targets: &integers(b, &[tokens], &self.targets),
                    scale: &floats(b, DType::F32, &[1], &[self.scale]),
                    loss: &loss,
                    d_logits: Some(&d_logits),
                };
                op.run(b).unwrap();
                CrossEntropy { loss: &alone, d_logits: None, ..op }.run(b).unwrap();
                vec![read(b, &loss), read(b, &alone), read(b, &d_logits)]
            })
            .try_into()
            .unwrap();
            assert_eq!(
                loss.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                alone.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            );
            [loss, d_logits]
        }
    }

    fn exact(logits: &[f64], target: usize) -> f64 {
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        max + logits.iter().map(|x| (x - max).exp()).sum::<f64>().ln() - logits[target]
    }

    #[test]
    fn cross_entropy_and_its_derivative_are_within_their_bounds() {
        for dtype in FLOATS {
            for (tokens, vocabulary, size) in [(3, 2, 1.0), (7, 33, 2.0), (70, 100, 2.0), (3, 515, 8.0)] {
                let mut random = Random(vocabulary as u64);
                let case = Case {
                    vocabulary,
                    logits: random.floats(dtype, tokens * vocabulary, size),
                    targets: random.indices(tokens, vocabulary),
                    scale: 0.5,
                };
                let [loss, d_logits] = case.run(dtype);
                for t in 0..tokens {
                    let row = t * vocabulary..(t + 1) * vocabulary;
                    let (logits, target) = (wide(&case.logits[row.clone()]), case.targets[t] as usize);
                    let range = 2.0 * f64::from(size);
                    let want = exact(&logits, target);
                    // The exponentials, their arguments and their sum; the logarithm; the target's distance; the difference.
                    let sum_error = range + 2.0 + row_depth(vocabulary);
                    let logarithm = (vocabulary as f64).ln() + range;
                    close(DType::F32, &loss[t..=t], &[(want, (sum_error + 2.0 * logarithm + range + want) * U)]);
                    let want: Vec<_> = gradient(&logits, |logits| 0.5 * exact(logits, target))
                        .into_iter()
                        .map(|d| {
                            (
                                d,
                                (2.0 * sum_error + 6.0) * U * 0.5 * (d.abs() * 2.0 + f64::from(u8::from(d < 0.0)))
                                    + DIFFERENCES,
                            )
                        })
                        .collect();
                    close(dtype, &d_logits[row], &want);
                }
            }
        }
    }

    #[test]
    fn a_token_without_target_has_no_loss_and_no_gradient() {
        for dtype in FLOATS {
            let mut case =
                Case { vocabulary: 5, logits: Random(5).floats(dtype, 15, 1.0), targets: vec![1, NONE, 4], scale: 1.0 };
            case.logits[5..10].fill(f32::NAN);
            let [loss, d_logits] = case.run(dtype);
            assert_eq!(loss[1].to_bits(), 0);
            assert!(d_logits[5..10].iter().all(|d| d.to_bits() == 0));
            assert!(loss[0] > 0.0 && loss[2] > 0.0);
        }
    }

    #[test]
    fn b254_a_nan_logit_shows_in_loss_and_gradient() {
        let case = Case { vocabulary: 4, logits: vec![0.0, f32::NAN, 1.0, 2.0], targets: vec![0], scale: 1.0 };
        let [loss, d_logits] = case.run(DType::F32);
        assert!(loss[0].is_nan() && d_logits.iter().all(|d| d.is_nan()));
    }

    #[test]
    fn b255_large_logits_neither_overflow_nor_cancel() {
        let case = Case {
            vocabulary: 2,
            logits: vec![-1e30, -1e30, 999.0, 1000.0, 0.0, 1000.0],
            targets: vec![0, 0, 0],
            scale: 1.0,
        };
        let [loss, d_logits] = case.run(DType::F32);
        let (near, far) = (2f64.ln(), 1.0 + (1.0 + (-1.0f64).exp()).ln());
        close(DType::F32, &loss, &[(near, 4.0 * U), (far, 8.0 * U), (1000.0, 1000.0 * U)]);
        let p = 1.0 / (1.0 + (-1.0f64).exp());
        close(
            DType::F32,
            &d_logits,
            &[(-0.5, 2.0 * U), (0.5, 2.0 * U), (-p, 8.0 * U), (p, 8.0 * U), (-1.0, 0.0), (1.0, 0.0)],
        );
    }

    #[test]
    fn b241_a_target_outside_the_vocabulary_is_none() {
        for host in hosts() {
            let b = &host as &dyn Backend;
            let (loss, d_logits) = (guarded(b, DType::F32, &[4]), guarded(b, DType::F32, &[4, 2]));
            CrossEntropy {
                logits: &floats(b, DType::F32, &[4, 2], &[0.0; 8]),
                // -100 is what other libraries write for no target.
                targets: &integers(b, &[4], &[1, 2, 100u32.wrapping_neg(), NONE]),
                scale: &floats(b, DType::F32, &[1], &[1.0]),
                loss: &loss,
                d_logits: Some(&d_logits),
            }
            .run(b)
            .unwrap();
            assert_eq!(read(b, &loss)[1..], [0.0; 3]);
            assert_eq!(read(b, &d_logits), [0.5, -0.5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        }
    }
}
