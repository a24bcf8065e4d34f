//! RmsNorm and its gradient.

use dropless_core::DType;
use dropless_core::ops::{RmsNorm, RmsNormGrad};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] =
    &[Problem::new("rms_norm", rms_norm), Problem::new("rms_norm_grad", rms_norm_grad)];

fn rms_norm(m: &mut Maker<'_>) {
    let (rows, cols, dtype) = (m.extent(20), m.extent(1000), m.float());
    let (x, weight) = (m.tensor(dtype, &[rows, cols]), m.tensor(DType::F32, &[cols]));
    let (out, rstd) = (m.output("out", dtype, &[rows, cols]), m.output("rstd", DType::F32, &[rows]));
    m.run(RmsNorm { x: &x, weight: &weight, eps: 1e-6, out: &out, rstd: &rstd }, RmsNorm::run);
}

fn rms_norm_grad(m: &mut Maker<'_>) {
    let (groups, each, cols, dtype) = (1 + m.below(3), m.extent(200), m.extent(300), m.float());
    let rows = groups * each;
    let [dy, x, residual] = [0; 3].map(|_| m.tensor(dtype, &[rows, cols]));
    let dx = m.output("dx", dtype, &[rows, cols]);
    let (weight, rstd) = (m.tensor(DType::F32, &[cols]), m.tensor(DType::F32, &[rows]));
    let d_weight = m.in_place("d_weight", DType::F32, &[groups, cols]);
    let residual = m.flag().then_some(&residual);
    m.run(
        RmsNormGrad { dy: &dy, x: &x, weight: &weight, rstd: &rstd, residual, dx: &dx, d_weight: &d_weight },
        RmsNormGrad::run,
    );
}

#[cfg(test)]
mod tests {
    use dropless_core::DType;
    use dropless_core::ops::{RmsNorm, RmsNormGrad};

    use super::super::harness::*;

    const EPS: f32 = 1e-6;

    fn exact_rstd(x: &[f64]) -> f64 {
        let squares: f64 = x.iter().map(|x| x * x).sum();
        1.0 / (squares / x.len() as f64 + f64::from(EPS)).sqrt()
    }

    /// Relative error of rstd: half that of the mean square, then a root and a quotient.
    fn rstd_error(cols: usize) -> f64 {
        ((row_depth(cols) + 3.0) / 2.0 + 2.0) * U
    }

    #[test]
    fn rms_norm_is_within_its_bound_for_every_width() {
        for dtype in FLOATS {
            for (rows, cols) in [(1, 1), (3, 7), (70, 64), (9, 255), (9, 256), (5, 257), (3, 1000)] {
                let mut random = Random((rows * cols) as u64);
                let (x, weight) = (random.floats(dtype, rows * cols, 2.0), random.floats(DType::F32, cols, 2.0));
                let [out, rstd] = everywhere(|b| {
                    let (out, rstd) = (guarded(b, dtype, &[rows, cols]), guarded(b, DType::F32, &[rows]));
                    let (x, weight) = (floats(b, dtype, &[rows, cols], &x), floats(b, DType::F32, &[cols], &weight));
                    RmsNorm { x: &x, weight: &weight, eps: EPS, out: &out, rstd: &rstd }.run(b).unwrap();
                    vec![read(b, &out), read(b, &rstd)]
                })
                .try_into()
                .unwrap();
                for r in 0..rows {
                    let row = r * cols..(r + 1) * cols;
                    let exact = exact_rstd(&wide(&x[row.clone()]));
                    close(DType::F32, &rstd[r..=r], &[(exact, exact * rstd_error(cols))]);
                    let want: Vec<_> = (x[row.clone()].iter().zip(&weight))
                        .map(|(&x, &w)| f64::from(x) * exact * f64::from(w))
                        .map(|y| (y, y.abs() * (rstd_error(cols) + 3.0 * U)))
                        .collect();
                    close(dtype, &out[row], &want);
                }
            }
        }
    }

    #[test]
    fn rms_norm_grad_is_the_derivative_of_rms_norm() {
        for dtype in FLOATS {
            for (groups, rows, cols) in [(1, 5, 7), (2, 4, 33), (1, 3, 264)] {
                let mut random = Random(40 + cols as u64);
                let [x, dy, residual] = [(); 3].map(|()| random.floats(dtype, rows * cols, 1.0));
                let (weight, before) =
                    (random.floats(DType::F32, cols, 1.0), random.floats(DType::F32, groups * cols, 1.0));
                let rstd: Vec<f32> = x.chunks(cols).map(|row| exact_rstd(&wide(row)) as f32).collect();
                for with_residual in [false, true] {
                    let [dx, d_weight] = everywhere(|b| {
                        let matrix = |values: &[f32]| floats(b, dtype, &[rows, cols], values);
                        let dx = guarded(b, dtype, &[rows, cols]);
                        let d_weight = floats(b, DType::F32, &[groups, cols], &before);
                        let residual = with_residual.then(|| matrix(&residual));
                        RmsNormGrad {
                            dy: &matrix(&dy),
                            x: &matrix(&x),
                            weight: &floats(b, DType::F32, &[cols], &weight),
                            rstd: &floats(b, DType::F32, &[rows], &rstd),
                            residual: residual.as_ref(),
                            dx: &dx,
                            d_weight: &d_weight,
                        }
                        .run(b)
                        .unwrap();
                        vec![read(b, &dx), read(b, &d_weight)]
                    })
                    .try_into()
                    .unwrap();

                    let wide_weight = wide(&weight);
                    let mut d_weight_want: Vec<(f64, f64)> =
                        before.iter().map(|&d| (f64::from(d), U * f64::from(d).abs())).collect();
                    for r in 0..rows {
                        let row = r * cols..(r + 1) * cols;
                        let (x, dy) = (wide(&x[row.clone()]), wide(&dy[row.clone()]));
                        let loss = |x: &[f64], w: &[f64]| -> f64 {
                            let rstd = exact_rstd(x);
                            (0..cols).map(|i| dy[i] * x[i] * rstd * w[i]).sum()
                        };
                        let exact = exact_rstd(&x);
                        let error = rstd_error(cols);
                        let along: f64 =
                            (0..cols).map(|i| (dy[i] * wide_weight[i] * x[i]).abs()).sum::<f64>() / cols as f64;
                        let want: Vec<_> = gradient(&x, |x| loss(x, &wide_weight))
                            .into_iter()
                            .enumerate()
                            .map(|(i, d)| {
                                let added = if with_residual { f64::from(residual[row.start + i]) } else { 0.0 };
                                let size =
                                    exact * ((dy[i] * wide_weight[i]).abs() + x[i].abs() * exact * exact * along);
                                (
                                    d + added,
                                    size * (3.0 * error + (row_depth(cols) + 8.0) * U) + added.abs() * U + DIFFERENCES,
                                )
                            })
                            .collect();
                        close(dtype, &dx[row], &want);
                        let group = r / (rows / groups);
                        for i in 0..cols {
                            let want = &mut d_weight_want[group * cols + i];
                            let term = dy[i] * x[i] * exact;
                            want.0 += term;
                            want.1 += term.abs() * (error + (token_depth(rows) + 4.0) * U);
                        }
                    }
                    close(DType::F32, &d_weight, &d_weight_want);
                }
            }
        }
    }

    #[test]
    fn rms_norm_grad_sums_tokens_by_the_rule() {
        let (groups, rows, cols) = (2, 2 * 300, 5);
        let mut random = Random(50);
        let [x, dy] = [(); 2].map(|()| random.floats(DType::F32, rows * cols, 1.0));
        let rstd = random.floats(DType::F32, rows, 1.0);
        let d_weight = everywhere(|b| {
            let matrix = |values: &[f32]| floats(b, DType::F32, &[rows, cols], values);
            let d_weight = floats(b, DType::F32, &[groups, cols], &[0.0; 10]);
            RmsNormGrad {
                dy: &matrix(&dy),
                x: &matrix(&x),
                weight: &floats(b, DType::F32, &[cols], &[1.0; 5]),
                rstd: &floats(b, DType::F32, &[rows], &rstd),
                residual: None,
                dx: &guarded(b, DType::F32, &[rows, cols]),
                d_weight: &d_weight,
            }
            .run(b)
            .unwrap();
            vec![read(b, &d_weight)]
        });
        for (at, &got) in d_weight[0].iter().enumerate() {
            let (group, c) = (at / cols, at % cols);
            let want = dropless_core::numerics::reduce::tokens(300, |t| {
                let r = group * 300 + t;
                dy[r * cols + c] * (x[r * cols + c] * rstd[r])
            });
            assert_eq!(got.to_bits(), want.to_bits());
        }
    }
}
