//! SwiGLU and its gradient.

use dropless_core::DType;
use dropless_core::ops::{Swiglu, SwigluGrad};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] = &[
    Problem::new("swiglu", swiglu),
    Problem::new("swiglu_grad", swiglu_grad),
    Problem { varied: false, ..Problem::new("swiglu_grad_widths", widths_around_blocks) },
];

fn swiglu(m: &mut Maker<'_>) {
    let (rows, width, dtype) = (m.extent(30), m.extent(300), m.float());
    let (gate_up, weight) = (m.tensor(dtype, &[rows, 2 * width]), m.tensor(DType::F32, &[rows]));
    let mut count = [m.below(rows + 1) as u32];
    m.stray(&mut count, rows + 1);
    let (limit, out) = (m.integers(&[1], &count), m.output("out", dtype, &[rows, width]));
    let weight = m.flag().then_some(&weight);
    let limit = m.flag().then_some(&limit);
    m.run(Swiglu { gate_up: &gate_up, weight, limit, out: &out }, Swiglu::run);
}

fn swiglu_grad(m: &mut Maker<'_>) {
    let (rows, width, dtype) = (m.extent(20), m.extent(300), m.float());
    let weighted = m.flag();
    swiglu_grad_of(m, rows, width, dtype, weighted);
}

/// Around the blocks of the quad sum that is the weight's gradient, and around eight of them, which is what the cuda kernel
/// adds at a time.
fn widths_around_blocks(m: &mut Maker<'_>) {
    for width in [255, 256, 257, 511, 520, 2047, 2048, 2049, 4352, 4609] {
        for dtype in [DType::F32, DType::Bf16] {
            swiglu_grad_of(m, 5, width, dtype, true);
        }
    }
}

fn swiglu_grad_of(m: &mut Maker<'_>, rows: usize, width: usize, dtype: DType, weighted: bool) {
    let (gate_up, d_gate_up) = (m.tensor(dtype, &[rows, 2 * width]), m.output("d_gate_up", dtype, &[rows, 2 * width]));
    let (d_out, weight, d_weight) =
        (m.tensor(dtype, &[rows, width]), m.tensor(DType::F32, &[rows]), m.output("d_weight", DType::F32, &[rows]));
    let mut count = [m.below(rows + 1) as u32];
    m.stray(&mut count, rows + 1);
    let limit = m.integers(&[1], &count);
    let limit = m.flag().then_some(&limit);
    m.run(
        SwigluGrad {
            gate_up: &gate_up,
            weight: weighted.then_some(&weight),
            limit,
            d_out: &d_out,
            d_gate_up: &d_gate_up,
            d_weight: weighted.then_some(&d_weight),
        },
        SwigluGrad::run,
    );
}

#[cfg(test)]
mod tests {
    use dropless_core::DType;
    use dropless_core::ops::{Swiglu, SwigluGrad};

    use super::super::harness::*;

    fn exact(gate: f64, up: f64, weight: f64) -> f64 {
        gate / (1.0 + (-gate).exp()) * up * weight
    }

    struct Case {
        rows: usize,
        width: usize,
        gate_up: Vec<f32>,
        d_out: Vec<f32>,
        weight: Option<Vec<f32>>,
        limit: Option<u32>,
    }

    impl Case {
        fn random(dtype: DType, rows: usize, width: usize, weighted: bool, scale: f32) -> Case {
            let mut random = Random((rows * width) as u64);
            let gate_up = random.floats(dtype, rows * 2 * width, scale);
            let d_out = random.floats(dtype, rows * width, 1.0);
            let weight = weighted.then(|| random.floats(DType::F32, rows, 1.0));
            Case { rows, width, gate_up, d_out, weight, limit: None }
        }

        /// out, d_gate_up, d_weight.
        fn run(&self, dtype: DType) -> [Vec<f32>; 3] {
            let Case { rows, width, .. } = *self;
            everywhere(|b| {
                let gate_up = floats(b, dtype, &[rows, 2 * width], &self.gate_up);
                let weight = self.weight.as_ref().map(|weight| floats(b, DType::F32, &[rows], weight));
                let limit = self.limit.map(|limit| integers(b, &[1], &[limit]));
                let (out, d_gate_up) = (guarded(b, dtype, &[rows, width]), guarded(b, dtype, &[rows, 2 * width]));
                let d_weight = self.weight.as_ref().map(|_| guarded(b, DType::F32, &[rows]));
                Swiglu { gate_up: &gate_up, weight: weight.as_ref(), limit: limit.as_ref(), out: &out }.run(b).unwrap();
                SwigluGrad {
                    gate_up: &gate_up,
                    weight: weight.as_ref(),
                    limit: limit.as_ref(),
                    d_out: &floats(b, dtype, &[rows, width], &self.d_out),
                    d_gate_up: &d_gate_up,
                    d_weight: d_weight.as_ref(),
                }
                .run(b)
                .unwrap();
                vec![read(b, &out), read(b, &d_gate_up), d_weight.map_or_else(Vec::new, |d| read(b, &d))]
            })
            .try_into()
            .unwrap()
        }
    }

    #[test]
    fn swiglu_is_within_its_bound() {
        for dtype in FLOATS {
            for (rows, width, weighted) in [(1, 1, false), (5, 31, true), (200, 64, true), (3, 300, false)] {
                let case = Case::random(dtype, rows, width, weighted, 12.0);
                let [out, ..] = case.run(dtype);
                for r in 0..rows {
                    let (gate, up) = case.gate_up[r * 2 * width..(r + 1) * 2 * width].split_at(width);
                    let weight = case.weight.as_ref().map_or(1.0, |w| f64::from(w[r]));
                    // The exponent's factor and its product err by 2u of |g|; ex2 by 3u, rcp by 2u, four more roundings.
                    let want: Vec<_> = (gate.iter().zip(up))
                        .map(|(&g, &u)| (exact(f64::from(g), f64::from(u), weight), f64::from(g.abs())))
                        .map(|(y, g)| (y, y.abs() * (2.0 * g + 9.0) * U))
                        .collect();
                    close(dtype, &out[r * width..(r + 1) * width], &want);
                }
            }
        }
    }

    #[test]
    fn swiglu_grad_is_the_derivative_of_swiglu() {
        for dtype in FLOATS {
            for (rows, width, weighted) in [(1, 1, false), (5, 31, true), (40, 64, true), (2, 300, true)] {
                let case = Case::random(dtype, rows, width, weighted, 1.5);
                let [_, d_gate_up, d_weight] = case.run(dtype);
                for r in 0..rows {
                    let columns = r * 2 * width..(r + 1) * 2 * width;
                    let gate_up = wide(&case.gate_up[columns.clone()]);
                    let d_out = wide(&case.d_out[r * width..(r + 1) * width]);
                    let weight = case.weight.as_ref().map_or(1.0, |w| f64::from(w[r]));
                    let mut sum = (0.0, 0.0);
                    let mut want = vec![(0.0, 0.0); 2 * width];
                    for i in 0..width {
                        let (g, u, d) = (gate_up[i], gate_up[width + i], d_out[i]);
                        let slope = gradient(&[g, u, weight], |at| d * exact(at[0], at[1], at[2]));
                        want[i] = (slope[0], (d * weight * u).abs() * (1.0 + g.abs()) * 16.0 * U + DIFFERENCES);
                        want[width + i] = (slope[1], slope[1].abs() * 8.0 * U + DIFFERENCES);
                        sum.0 += slope[2];
                        sum.1 += slope[2].abs() * (quad_depth(width) + 8.0) * U + DIFFERENCES;
                    }
                    close(dtype, &d_gate_up[columns], &want);
                    if weighted {
                        close(DType::F32, &d_weight[r..=r], &[sum]);
                    }
                }
            }
        }
    }

    #[test]
    fn b120_rows_past_the_limit_are_neither_read_nor_written() {
        for dtype in FLOATS {
            let (rows, width, counted) = (16, 24, 8);
            let whole = Case::random(dtype, rows, width, true, 1.0);
            let clean = Case {
                rows: counted,
                gate_up: whole.gate_up[..counted * 2 * width].to_vec(),
                d_out: whole.d_out[..counted * width].to_vec(),
                weight: whole.weight.as_ref().map(|w| w[..counted].to_vec()),
                ..whole
            };
            let mut poisoned = Case { limit: Some(8), ..Case::random(dtype, rows, width, true, 1.0) };
            poisoned.gate_up[counted * 2 * width..].fill(f32::NAN);
            poisoned.d_out[counted * width..].fill(f32::NAN);
            poisoned.weight.as_mut().unwrap()[counted..].fill(f32::NAN);
            for (got, want) in poisoned.run(dtype).iter().zip(clean.run(dtype)) {
                let (counted, tail) = got.split_at(want.len());
                assert_eq!(counted, want);
                assert!(tail.len() == want.len() && tail.iter().all(|&x| x == rounded(dtype, GUARD) || x == GUARD));
            }
        }
    }

    #[test]
    fn b133_gate_comes_before_up() {
        let case =
            Case { rows: 1, width: 2, gate_up: vec![1.0, 1.0, 2.0, 2.0], ..Case::random(DType::F32, 1, 2, false, 1.0) };
        let want = 2.0 / (1.0 + (-1.0f64).exp());
        close(DType::F32, &case.run(DType::F32)[0], &[(want, want * 7.0 * U); 2]);
    }

    #[test]
    fn a_limit_past_the_rows_stands_for_all_rows() {
        for host in hosts() {
            let b = &host as &dyn dropless_core::Backend;
            let gate_up = floats(b, DType::F32, &[3, 4], &[1.0; 12]);
            let run = |limit: Option<u32>| {
                let (limit, out) = (limit.map(|limit| integers(b, &[1], &[limit])), guarded(b, DType::F32, &[3, 2]));
                Swiglu { gate_up: &gate_up, weight: None, limit: limit.as_ref(), out: &out }.run(b).unwrap();
                read(b, &out)
            };
            let all = run(None);
            assert!(all.iter().all(|&x| x > 0.0 && x < 1.0), "{all:?}");
            for beyond in [3, 4, u32::MAX] {
                assert_eq!(run(Some(beyond)), all, "limit {beyond}");
            }
        }
    }
}
