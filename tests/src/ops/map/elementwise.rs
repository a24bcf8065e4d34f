//! Fill, Cast, Add, CopyColumns.

use dropless_core::DType;
use dropless_core::ops::{Add, Cast, CopyColumns, Fill};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] = &[
    Problem::new("cast", cast),
    Problem::new("add", add),
    Problem::new("fill", fill),
    Problem::new("copy_columns", copy_columns),
];

fn cast(m: &mut Maker<'_>) {
    let (n, x, out) = (m.extent(3000), m.float(), m.float());
    let (x, out) = (m.tensor(x, &[n]), m.output("out", out, &[n]));
    m.run(Cast { x: &x, out: &out }, Cast::run);
}

fn add(m: &mut Maker<'_>) {
    let n = m.extent(3000);
    let [a, b, c] = [0; 3].map(|_| {
        let dtype = m.float();
        m.tensor(dtype, &[n])
    });
    let dtype = m.float();
    let out = m.output("out", dtype, &[n]);
    let c = m.flag().then_some(&c);
    m.run(Add { a: &a, b: &b, c, out: &out }, Add::run);
}

fn fill(m: &mut Maker<'_>) {
    let n = m.extent(3000);
    let types = [DType::F32, DType::Bf16, DType::U32, DType::E4m3, DType::Ue8m0, DType::E2m1x2];
    let dtype = m.one_of(&types);
    let out = m.output("out", dtype, &[n]);
    let value = if matches!(dtype, DType::F32 | DType::Bf16) { m.random.value() } else { 0.0 };
    m.run(Fill { out: &out, value }, Fill::run);
}

fn copy_columns(m: &mut Maker<'_>) {
    let (rows, width) = (m.extent(30), m.extent(70));
    let dtype = m.one_of(&[DType::F32, DType::Bf16, DType::U32]);
    let [x_column, out_column] = [0; 2].map(|_| m.below(9));
    let x = m.tensor(dtype, &[rows, x_column + width + 3]);
    let out = m.output("out", dtype, &[rows, out_column + width + 2]);
    m.run(CopyColumns { x: &x, x_column, out: &out, out_column, width }, CopyColumns::run);
}

#[cfg(test)]
mod tests {
    use dropless_core::numerics::bf16;
    use dropless_core::ops::{Add, Cast, CopyColumns, Fill};
    use dropless_core::{Backend, DType};

    use super::super::harness::*;

    /// More than one tile, and no multiple of one.
    const LEN: usize = 9001;

    #[test]
    fn fill_sets_every_element_and_clears_integers() {
        for (dtype, value) in [(DType::F32, 0.1f32), (DType::Bf16, 0.1), (DType::F32, -0.0)] {
            let [out] = everywhere(|b| {
                let out = guarded(b, dtype, &[LEN]);
                Fill { out: &out.slice(1, LEN - 1).unwrap(), value }.run(b).unwrap();
                vec![read(b, &out)]
            })
            .try_into()
            .unwrap();
            assert_eq!((out[0], out[LEN - 1]), (rounded(dtype, GUARD), rounded(dtype, GUARD)));
            assert!(out[1..LEN - 1].iter().all(|x| x.to_bits() == rounded(dtype, value).to_bits()));
        }
        for host in hosts() {
            let b = &host as &dyn Backend;
            let out = integers(b, &[5], &[7; 5]);
            Fill { out: &out, value: 0.0 }.run(b).unwrap();
            assert_eq!(b.download::<u32>(&out).unwrap(), [0; 5]);
        }
    }

    #[test]
    fn cast_rounds_to_nearest_even_and_widens_exactly() {
        let x = Random(1).floats(DType::F32, LEN, 3.0);
        for (from, to) in
            [(FLOATS[0], FLOATS[1]), (FLOATS[1], FLOATS[0]), (FLOATS[0], FLOATS[0]), (FLOATS[1], FLOATS[1])]
        {
            let out = everywhere(|b| {
                let out = guarded(b, to, &[LEN]);
                Cast { x: &floats(b, from, &[LEN], &x), out: &out }.run(b).unwrap();
                vec![read(b, &out)]
            });
            let narrow = from == DType::Bf16 || to == DType::Bf16;
            let want: Vec<f32> = x.iter().map(|&x| if narrow { bf16::round(x) } else { x }).collect();
            assert_eq!(out[0], want);
        }
    }

    #[test]
    fn add_rounds_once_after_two_sums_in_order() {
        let mut random = Random(2);
        for [a_type, b_type, c_type, out_type] in
            [[DType::F32; 4], [DType::Bf16; 4], [DType::F32, DType::Bf16, DType::F32, DType::Bf16]]
        {
            let (a, b) = (random.floats(a_type, LEN, 1.0), random.floats(b_type, LEN, 1e-3));
            let c = random.floats(c_type, LEN, 1.0);
            for third in [false, true] {
                let out = everywhere(|backend| {
                    let out = guarded(backend, out_type, &[LEN]);
                    let c = third.then(|| floats(backend, c_type, &[LEN], &c));
                    let (a, b) = (floats(backend, a_type, &[LEN], &a), floats(backend, b_type, &[LEN], &b));
                    Add { a: &a, b: &b, c: c.as_ref(), out: &out }.run(backend).unwrap();
                    vec![read(backend, &out)]
                });
                let sum = |i: usize| if third { (a[i] + b[i]) + c[i] } else { a[i] + b[i] };
                assert_eq!(out[0], (0..LEN).map(|i| rounded(out_type, sum(i))).collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn copy_columns_leaves_the_other_columns_alone() {
        let (rows, x_cols, out_cols, x_column, out_column, width) = (300, 7, 11, 2, 4, 5);
        for dtype in FLOATS {
            let x = Random(3).floats(dtype, rows * x_cols, 1.0);
            let out = everywhere(|b| {
                let (x, out) = (floats(b, dtype, &[rows, x_cols], &x), guarded(b, dtype, &[rows, out_cols]));
                CopyColumns { x: &x, x_column, out: &out, out_column, width }.run(b).unwrap();
                vec![read(b, &out)]
            });
            for (r, row) in out[0].chunks(out_cols).enumerate() {
                for (c, &value) in row.iter().enumerate() {
                    let inside = (out_column..out_column + width).contains(&c);
                    let source = (r * x_cols + x_column + c).wrapping_sub(out_column);
                    assert_eq!(value, if inside { x[source] } else { rounded(dtype, GUARD) });
                }
            }
        }
    }
}
