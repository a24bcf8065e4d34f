//! Clipping, AdamW, and the bias of the selection.

use dropless_core::DType;
use dropless_core::ops::{AdamW, BiasUpdate, ClipScale};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] =
    &[Problem::new("adamw", adamw), Problem::new("clip_scale", clip_scale), Problem::new("bias_update", bias_update)];

fn adamw(m: &mut Maker<'_>) {
    let n = m.extent(2000);
    let grad = m.tensor(DType::F32, &[n]);
    let [param, moment, v] = ["param", "m", "v"].map(|name| m.in_place(name, DType::F32, &[n]));
    let (clip, step, param_bf16) =
        (m.tensor(DType::F32, &[2]), m.tensor(DType::F32, &[3]), m.output("param_bf16", DType::Bf16, &[n]));
    let param_bf16 = m.flag().then_some(&param_bf16);
    m.run(
        AdamW {
            grad: &grad,
            clip: &clip,
            step: &step,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: 0.1,
            param: &param,
            m: &moment,
            v: &v,
            param_bf16,
        },
        AdamW::run,
    );
}

fn clip_scale(m: &mut Maker<'_>) {
    let n = m.extent(300);
    let squares: Vec<f32> = (0..n).map(|_| m.random.value().abs()).collect();
    let squares = m.with_bytes(DType::F32, &[n], bytemuck::cast_slice(&squares));
    let out = m.output("out", DType::F32, &[2]);
    let max_norm = m.one_of(&[0.0, 1.0, 1e9]);
    m.run(ClipScale { squares: &squares, max_norm, out: &out }, ClipScale::run);
}

fn bias_update(m: &mut Maker<'_>) {
    let (parts, experts) = (m.extent(5), m.extent(70));
    let most = m.one_of(&[3, 1000, u32::MAX]);
    let counts: Vec<u32> = (0..parts * experts).map(|_| m.random.bits() % most).collect();
    let (counts, bias) = (m.integers(&[parts, experts], &counts), m.in_place("bias", DType::F32, &[experts]));
    m.run(BiasUpdate { counts: &counts, rate: 1e-3, bias: &bias }, BiasUpdate::run);
}

#[cfg(test)]
mod tests {
    use dropless_core::ops::{AdamW, BiasUpdate, ClipScale, SumSquares};
    use dropless_core::{Backend, DType};

    use super::super::harness::*;

    fn clip(squares: &[f32], max_norm: f32) -> [f32; 2] {
        let [result] = everywhere(|b| {
            let out = guarded(b, DType::F32, &[2]);
            ClipScale { squares: &floats(b, DType::F32, &[squares.len()], squares), max_norm, out: &out }
                .run(b)
                .unwrap();
            vec![read(b, &out)]
        })
        .try_into()
        .unwrap();
        [result[0], result[1]]
    }

    #[test]
    fn the_clip_factor_brings_the_norm_down_to_the_limit() {
        assert_eq!(clip(&[9.0, 16.0], 10.0), [5.0, 1.0]);
        assert_eq!(clip(&[9.0, 16.0], 5.0), [5.0, 1.0]);
        assert_eq!(clip(&[9.0, 16.0], 1.0), [5.0, 0.2]);
        assert_eq!(clip(&[9.0, 16.0], 0.0), [5.0, 1.0]);
        assert_eq!(clip(&[], 1.0), [0.0, 1.0]);
        // In order: ones vanish next to 2^24, but not when they come first.
        let (large, ones) = ([16_777_216.0], [1.0; 64]);
        assert_eq!(clip(&[&large[..], &ones].concat(), 0.0)[0], 4096.0);
        assert!(clip(&[&ones[..], &large].concat(), 0.0)[0] > 4096.0);
    }

    #[test]
    fn b254_one_nan_in_a_gradient_shows_in_its_norm_and_factor() {
        let mut gradient = vec![1.0f32; 1000];
        gradient[777] = f32::NAN;
        let squares = everywhere(|b| {
            let out = guarded(b, DType::F32, &[10]);
            SumSquares { x: &floats(b, DType::F32, &[10, 100], &gradient), out: &out }.run(b).unwrap();
            vec![read(b, &out)]
        });
        let finite: Vec<bool> = squares[0].iter().map(|s| s.is_finite()).collect();
        assert_eq!(finite, [true, true, true, true, true, true, true, false, true, true]);
        for max_norm in [0.0, 1.0] {
            assert!(clip(&squares[0], max_norm).iter().all(|x| x.is_nan()));
        }
    }

    /// One parameter's numbers.
    #[derive(Clone, Copy)]
    struct Rule {
        factor: f32,
        rate: f32,
        beta: [f32; 2],
        eps: f32,
        decay: f32,
        step: i32,
    }

    impl Rule {
        fn corrections(self) -> [f32; 2] {
            self.beta.map(|beta| (1.0 - f64::from(beta).powi(self.step)) as f32)
        }

        /// param, m, v, and the bf16 copy.
        fn run(self, [grad, param, m, v]: [&[f32]; 4]) -> [Vec<f32>; 4] {
            let len = grad.len();
            everywhere(|b| {
                let flat = |values: &[f32]| floats(b, DType::F32, &[values.len()], values);
                let [c1, c2] = self.corrections();
                let (param, m, v, param_bf16) = (flat(param), flat(m), flat(v), guarded(b, DType::Bf16, &[len]));
                let op = AdamW {
                    grad: &flat(grad),
                    clip: &flat(&[7.0, self.factor]),
                    step: &flat(&[self.rate, c1, c2]),
                    beta1: self.beta[0],
                    beta2: self.beta[1],
                    eps: self.eps,
                    decay: self.decay,
                    param: &param,
                    m: &m,
                    v: &v,
                    param_bf16: Some(&param_bf16),
                };
                op.run(b).unwrap();
                vec![read(b, &param), read(b, &m), read(b, &v), read(b, &param_bf16)]
            })
            .try_into()
            .unwrap()
        }
    }

    #[test]
    fn adamw_is_within_its_bound() {
        let rule = Rule { factor: 0.5, rate: 1e-2, beta: [0.9, 0.95], eps: 1e-8, decay: 0.1, step: 3 };
        let len = 9001;
        let mut random = Random(60);
        let [grad, param, m] = [1.0, 2.0, 0.5].map(|scale| random.floats(DType::F32, len, scale));
        let v: Vec<f32> = random.floats(DType::F32, len, 0.5).into_iter().map(f32::abs).collect();
        let [new_param, new_m, new_v, param_bf16] = rule.run([&grad, &param, &m, &v]);

        let [b1, b2] = rule.beta.map(f64::from);
        let [c1, c2] = rule.corrections().map(f64::from);
        let (rate, eps, decay) = (f64::from(rule.rate), f64::from(rule.eps), f64::from(rule.decay));
        let (mut want_m, mut want_v, mut want_param) = (Vec::new(), Vec::new(), Vec::new());
        for i in 0..len {
            let [g, p, m, v] = [grad[i] * rule.factor, param[i], m[i], v[i]].map(f64::from);
            let (next_m, next_v) = (b1 * m + (1.0 - b1) * g, b2 * v + (1.0 - b2) * g * g);
            let m_error = (1.0 - b1) * g.abs() * 2.0 * U + next_m.abs() * U;
            want_m.push((next_m, m_error));
            want_v.push((next_v, next_v * 5.0 * U));
            let root = (next_v / c2).sqrt() + eps;
            let u = next_m / c1 / root;
            let u_error = m_error / c1 / root + u.abs() * 8.0 * U;
            let next = p - rate * decay * p - rate * u;
            want_param.push((
                next,
                (p.abs() + next.abs() + 4.0 * rate * (decay * p).abs()) * U + rate * (u_error + u.abs() * U),
            ));
        }
        close(DType::F32, &new_m, &want_m);
        close(DType::F32, &new_v, &want_v);
        close(DType::F32, &new_param, &want_param);
        assert_eq!(param_bf16, new_param.iter().map(|&p| rounded(DType::Bf16, p)).collect::<Vec<_>>());
    }

    #[test]
    fn b262_epsilon_is_added_after_the_bias_correction() {
        for (eps, want) in [(1e-8, 0.998_900_0), (1.0, 0.999_809_09)] {
            let rule = Rule { factor: 1.0, rate: 1e-3, beta: [0.9, 0.95], eps, decay: 0.1, step: 1 };
            let [param, ..] = rule.run([&[0.1], &[1.0], &[0.0], &[0.0]]);
            // Half a unit of the last printed digit, and one of f32.
            close(DType::F32, &param, &[(want, 5e-9 + 2.0 * U)]);
        }
    }

    #[test]
    fn b194_steps_below_the_spacing_of_bf16_add_up_in_the_master_weight() {
        let mut state = [vec![1.0], vec![0.0], vec![0.0]];
        for step in 1..=100 {
            // A constant gradient: each update is the rate.
            let rule = Rule { factor: 1.0, rate: 6e-4, beta: [0.9, 0.95], eps: 1e-12, decay: 0.0, step };
            let [param, m, v, param_bf16] = rule.run([&[1.0], &state[0], &state[1], &state[2]]);
            assert_eq!(param_bf16[0], rounded(DType::Bf16, param[0]));
            state = [param, m, v];
        }
        assert!((state[0][0] - 0.94).abs() < 1e-5, "{}", state[0][0]);
        assert_eq!(rounded(DType::Bf16, state[0][0]), 0.941_406_25);
    }

    #[test]
    fn b263_weight_decay_is_decoupled_and_the_moments_are_f32() {
        let rule = Rule { factor: 1.0, rate: 0.1, beta: [0.9, 0.999], eps: 1e-8, decay: 0.1, step: 1 };
        let [param, m, v, param_bf16] = rule.run([&[0.0], &[1.0], &[0.0], &[0.0]]);
        assert_eq!((param[0], m[0], v[0]), (0.99, 0.0, 0.0));
        assert_eq!(param_bf16[0], rounded(DType::Bf16, 0.99));
        for host in hosts() {
            let b = &host as &dyn Backend;
            let flat = |dtype, len: usize| guarded(b, dtype, &[len]);
            let (f32s, param_bf16) = ([(); 5].map(|()| flat(DType::F32, 3)), flat(DType::Bf16, 3));
            let op = AdamW {
                grad: &f32s[0],
                clip: &flat(DType::F32, 2),
                step: &f32s[1],
                beta1: 0.9,
                beta2: 0.95,
                eps: 1e-8,
                decay: 0.0,
                param: &f32s[2],
                m: &param_bf16,
                v: &f32s[3],
                param_bf16: None,
            };
            assert_eq!(refusal(op.run(b)), "adamw: m is Bf16[3], expected one of [F32]");
        }
    }

    #[test]
    fn the_bias_moves_against_the_load_and_rests_at_the_mean() {
        let counts = [3, 5, 4, 0, 2, 1, 2, 7];
        let bias = everywhere(|b| {
            let bias = floats(b, DType::F32, &[4], &[0.0, 0.0, 0.25, 1.0]);
            BiasUpdate { counts: &integers(b, &[2, 4], &counts), rate: 0.125, bias: &bias }.run(b).unwrap();
            vec![read(b, &bias)]
        });
        // Totals 5, 6, 6, 7 with mean 6.
        assert_eq!(bias[0], [0.125, 0.0, 0.25, 0.875]);
    }

    #[test]
    fn the_bias_compares_counts_exactly_past_the_precision_of_f32() {
        let bias = everywhere(|b| {
            let bias = floats(b, DType::F32, &[2], &[0.0; 2]);
            BiasUpdate { counts: &integers(b, &[1, 2], &[u32::MAX, u32::MAX - 1]), rate: 1.0, bias: &bias }
                .run(b)
                .unwrap();
            vec![read(b, &bias)]
        });
        assert_eq!(bias[0], [-1.0, 1.0]);
    }
}
