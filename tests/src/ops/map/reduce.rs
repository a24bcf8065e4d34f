//! Sums over rows, squares, and the tree over parts.

use dropless_core::DType;
use dropless_core::ops::{SumRows, SumSquares, TreeSum};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] =
    &[Problem::new("sum_rows", sum_rows), Problem::new("sum_squares", sum_squares), Problem::new("tree_sum", tree_sum)];

fn sum_rows(m: &mut Maker<'_>) {
    let (groups, each, cols, dtype) = (1 + m.below(3), m.extent(400), m.extent(70), m.float());
    let (x, out) = (m.tensor(dtype, &[groups * each, cols]), m.output("out", DType::F32, &[groups, cols]));
    m.run(SumRows { x: &x, out: &out }, SumRows::run);
}

fn sum_squares(m: &mut Maker<'_>) {
    let (rows, cols, dtype) = (m.extent(20), m.extent(1000), m.float());
    let (x, out) = (m.tensor(dtype, &[rows, cols]), m.output("out", DType::F32, &[rows]));
    m.run(SumSquares { x: &x, out: &out }, SumSquares::run);
}

fn tree_sum(m: &mut Maker<'_>) {
    let (parts, n) = (m.extent(40), m.extent(300));
    let (x, out) = (m.tensor(DType::F32, &[parts, n]), m.output("out", DType::F32, &[n]));
    m.run(TreeSum { parts: &x, out: &out }, TreeSum::run);
}

#[cfg(test)]
mod tests {
    use dropless_core::DType;
    use dropless_core::numerics::reduce;
    use dropless_core::ops::{SumRows, SumSquares, TreeSum};

    use super::super::harness::*;

    fn sum_rows(dtype: DType, groups: usize, rows: usize, cols: usize, x: &[f32]) -> Vec<f32> {
        everywhere(|b| {
            let out = guarded(b, DType::F32, &[groups, cols]);
            SumRows { x: &floats(b, dtype, &[rows, cols], x), out: &out }.run(b).unwrap();
            vec![read(b, &out)]
        })
        .remove(0)
    }

    #[test]
    fn sum_rows_follows_the_token_sum_rule_within_its_bound() {
        for dtype in FLOATS {
            for (groups, tokens, cols) in [(1, 1, 1), (1, 128, 3), (2, 129, 5), (3, 300, 70), (1, 1000, 2)] {
                let x = Random(tokens as u64).floats(dtype, groups * tokens * cols, 1.0);
                let got = sum_rows(dtype, groups, groups * tokens, cols, &x);
                for (at, got) in got.iter().enumerate() {
                    let column: Vec<f32> =
                        (0..tokens).map(|t| x[(at / cols * tokens + t) * cols + at % cols]).collect();
                    let (exact, size) =
                        column.iter().fold((0.0, 0.0), |(s, m), &x| (s + f64::from(x), m + f64::from(x).abs()));
                    close(DType::F32, &[*got], &[(exact, size * token_depth(tokens) * U)]);
                    assert_eq!(got.to_bits(), reduce::tokens(tokens, |t| column[t]).to_bits());
                }
            }
        }
    }

    #[test]
    fn b12a_a_bias_gradient_takes_only_the_rows_that_count() {
        let mut dy = Random(8).floats(DType::F32, 8 * 3, 1.0);
        dy[5 * 3..].fill(f32::NAN);
        let [sum] = everywhere(|b| {
            let (all, out) = (floats(b, DType::F32, &[8, 3], &dy), guarded(b, DType::F32, &[1, 3]));
            SumRows { x: &all.slice(0, 5).unwrap(), out: &out }.run(b).unwrap();
            vec![read(b, &out)]
        })
        .try_into()
        .unwrap();
        let want: Vec<f32> = (0..3).map(|c| (1..5).fold(dy[c], |sum, r| sum + dy[r * 3 + c])).collect();
        assert_eq!(sum, want);
    }

    #[test]
    fn sum_squares_is_within_its_bound() {
        for dtype in FLOATS {
            for (rows, cols) in [(1, 1), (700, 9), (3, 255), (3, 256), (2, 5000)] {
                let x = Random(cols as u64).floats(dtype, rows * cols, 1.0);
                let got = everywhere(|b| {
                    let out = guarded(b, DType::F32, &[rows]);
                    SumSquares { x: &floats(b, dtype, &[rows, cols], &x), out: &out }.run(b).unwrap();
                    vec![read(b, &out)]
                });
                let exact = |row: &[f32]| row.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>();
                let want: Vec<_> = x.chunks(cols).map(exact).map(|s| (s, s * (row_depth(cols) + 1.0) * U)).collect();
                close(DType::F32, &got[0], &want);
            }
        }
    }

    #[test]
    fn tree_sum_follows_the_tree() {
        for (parts, len) in [(1, 5), (2, 3000), (3, 1025), (7, 9), (64, 100)] {
            let x = Random(parts as u64).floats(DType::F32, parts * len, 1.0);
            let got = everywhere(|b| {
                let out = guarded(b, DType::F32, &[len]);
                TreeSum { parts: &floats(b, DType::F32, &[parts, len], &x), out: &out }.run(b).unwrap();
                vec![read(b, &out)]
            });
            for (i, got) in got[0].iter().enumerate() {
                let want = reduce::tree(0, parts, &|part| Some(x[part * len + i])).unwrap();
                assert_eq!(got.to_bits(), want.to_bits());
            }
        }
    }
}
