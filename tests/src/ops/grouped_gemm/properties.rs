//! The grouped product of the host backend against one chain of `mma` for each element.

use super::SPLIT_EDGES;
use super::problem::{
    Data, FORMATS, Format, GUARD, KINDS, MODELS, Problem, Random, assert_same, host, levels, sizes_for,
};
use dropless_core::numerics::{bf16, mma};
use dropless_core::ops::{GemmKind, GroupedGemm, Operand, SPLIT_BLOCK, Split};
use dropless_core::{Backend, DType, NumericModel};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed};

#[test]
fn every_kind_and_format_follows_the_model() {
    for kind in KINDS {
        for format in FORMATS {
            let mut problem = Problem::new(kind, format, &sizes_for(kind, format, &[5, 0, 33, 1]), 160, 96, 1);
            problem.check();
            problem.out = DType::Bf16;
            problem.check_with(&[NumericModel::Hopper], GUARD);
            problem.out = DType::F32;
            problem.accumulate = true;
            problem.check_with(&[NumericModel::Hopper], 0x3FC0_0000);
        }
    }
}

#[test]
fn gathered_rows_are_the_rows_they_name() {
    let mut random = Random(2);
    for kind in KINDS {
        for format in [Format::F32, Format::Bf16] {
            for sides in [[true, false], [false, true], [true, true]] {
                if sides[1] && kind != GemmKind::Wgrad {
                    continue;
                }
                let mut problem = Problem::new(kind, format, &[7, 0, 20], 24, 40, 3);
                // The source has as many rows as there are slots; indices repeat.
                problem.gather = sides.map(|on| on.then(|| (0..27).map(|_| random.below(27) as u32).collect()));
                problem.check();
            }
        }
    }
}

/// Both operands' rows and the output's rows past the last offset.
#[test]
fn rows_past_the_last_offset_are_neither_read_nor_written() {
    for kind in KINDS {
        for format in FORMATS {
            let sizes = sizes_for(kind, format, &[3, 0, 5]);
            let exact = Problem::new(kind, format, &sizes, 64, 32, 4);
            let mut longer = exact.clone();
            longer.add_rows(if format == Format::Fp8Block { 128 } else { 32 });
            for simd in levels() {
                let host = host(NumericModel::Hopper, simd);
                let (want, got) = (exact.run(&host, GUARD).unwrap(), longer.run(&host, GUARD).unwrap());
                assert_same(&got[..want.len()], &want, || format!("{simd:?} {longer}"));
                assert!(
                    got[want.len()..].iter().all(|x| x.to_bits() == GUARD),
                    "{simd:?} {longer}: wrote past the end"
                );
            }
        }
    }
}

/// Root mean square error of the elements against f64, relative to their root mean square.
fn error(got: &[f32], exact: &[f64]) -> f64 {
    let square = |sum: f64, x: f64| sum + x * x;
    let wrong = got.iter().zip(exact).map(|(&got, exact)| f64::from(got) - exact).fold(0.0, square);
    (wrong / exact.iter().copied().fold(0.0, square)).sqrt()
}

/// The figures of NUMERICS.md, "Split operands": 32 additions in f32 and 2^-24 in each part bound the first; a chain that
/// is never cut loses most, since each of its steps truncates at the size of the sum.
#[test]
fn split_products_are_nearer_than_chains_of_f32() {
    const ROWS: usize = 64;
    const COLUMNS: usize = 48;
    const TERMS: usize = 4096;
    let mut random = Random(11);
    let mut uniform = |count: usize| -> Vec<f32> {
        (0..count).map(|_| (random.bits() as i32 as f64 / 2f64.powi(31)) as f32).collect()
    };
    let x: Vec<u16> = uniform(ROWS * TERMS).into_iter().map(bf16::from_f32).collect();
    let w = uniform(COLUMNS * TERMS);
    let pairs: Vec<(&[u16], usize)> = x.chunks(TERMS).flat_map(|x| (0..COLUMNS).map(move |j| (x, j * TERMS))).collect();
    let all = || pairs.iter().copied();
    let wide = |code: u16| bf16::to_f32(code);
    let exact: Vec<f64> =
        all().map(|(x, j)| x.iter().zip(&w[j..]).map(|(&x, &w)| f64::from(wide(x)) * f64::from(w)).sum()).collect();

    let mut problem = Problem::new(GemmKind::Forward, Format::SplitRight, &[ROWS], COLUMNS, TERMS, 0);
    problem.data = [Data::Bf16(x.clone()), Data::F32(w.clone())];
    let split = problem.run(&host(NumericModel::Hopper, levels().last().unwrap()), GUARD).unwrap();
    let plain: Vec<f32> =
        all().map(|(x, j)| x.iter().zip(&w[j..]).fold(0.0, |acc, (&x, &w)| wide(x).mul_add(w, acc))).collect();
    let parts: Vec<[u16; 3]> = w.iter().map(|&w| Split::of(w).parts()).collect();
    let uncut: Vec<f32> = all()
        .map(|(x, j)| {
            (0..TERMS).step_by(SPLIT_BLOCK).fold(0.0, |acc, from| {
                (0..3).fold(acc, |acc, k| {
                    let part: Vec<u16> = parts[j + from..][..SPLIT_BLOCK].iter().map(|parts| parts[k]).collect();
                    mma::dot_bf16(NumericModel::Hopper, &x[from..][..SPLIT_BLOCK], &part, acc)
                })
            })
        })
        .collect();
    let [split, plain, uncut] = [split, plain, uncut].map(|got| error(&got, &exact));
    println!("split {split:.2e}, f32 {plain:.2e}, uncut {uncut:.2e}");
    assert!(split < 4e-7 && 3.0 * split < plain && plain < uncut, "{split:.2e}, {plain:.2e}, {uncut:.2e}");
}

/// The low, the middle and the high part, as NUMERICS.md has them.
fn parts(x: f32) -> [u16; 3] {
    let round = |x: f32| bf16::to_f32(bf16::from_f32(x));
    let (high, middle) = (round(x), round(x - round(x)));
    [x - high - middle, middle, high].map(bf16::from_f32)
}

/// The order of the pairs of NUMERICS.md, "Split operands", which the backends take from one table: written here once more.
/// The results are subnormal, where a chain is cut to multiples of 2^-149 after each step, so that no change of the order
/// hides below the products of the high parts.
#[test]
fn the_parts_go_by_in_the_order_of_the_contract() {
    const SIDE: usize = 16;
    // Two whole blocks, and one that is no multiple of a step.
    const TERMS: usize = 300;
    const LOW: usize = 0;
    const MIDDLE: usize = 1;
    const HIGH: usize = 2;
    type Pairs = Vec<[usize; 2]>;
    let orders: [(Format, Pairs); 3] = [
        (Format::SplitRight, vec![[HIGH, LOW], [HIGH, MIDDLE], [HIGH, HIGH]]),
        (Format::SplitLeft, vec![[LOW, HIGH], [MIDDLE, HIGH], [HIGH, HIGH]]),
        (Format::Split, vec![[LOW, HIGH], [MIDDLE, MIDDLE], [HIGH, LOW], [MIDDLE, HIGH], [HIGH, MIDDLE], [HIGH, HIGH]]),
    ];
    let model = NumericModel::Hopper;
    for (format, order) in orders {
        let mut problem = Problem::new(GemmKind::Forward, format, &[SIDE], SIDE, TERMS, 0);
        let mut random = Random(12);
        let mut tiny = || random.floats(DType::F32, SIDE * TERMS, 2f32.powi(-65));
        let factors = [0, 1].map(|side| {
            let values = tiny();
            if format.splits(side) {
                problem.data[side] = Data::F32(values.clone());
                return values;
            }
            // A bf16 value is its own high part.
            let codes: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
            problem.data[side] = Data::Bf16(codes.clone());
            codes.into_iter().map(bf16::to_f32).collect()
        });
        let planes = factors.map(|factor| {
            let parts: Vec<_> = factor.into_iter().map(parts).collect();
            [LOW, MIDDLE, HIGH].map(|k| parts.iter().map(|parts| parts[k]).collect::<Vec<u16>>())
        });
        let [a, b] = &planes;
        // A pair from the chain of those before it, for each block of each output.
        let outputs = |chain: &dyn Fn(usize, usize, usize) -> f32| -> Vec<u32> {
            let blocks = |i: usize, j: usize| {
                (0..TERMS).step_by(128).map(move |from| (i * TERMS + from, j * TERMS + from, 128.min(TERMS - from)))
            };
            let output = |i, j| blocks(i, j).fold(0.0, |sum, (a, b, len)| sum + chain(a, b, len));
            (0..SIDE * SIDE).map(|at| f32::to_bits(output(at / SIDE, at % SIDE))).collect()
        };
        let in_order = |order: &[[usize; 2]]| {
            outputs(&|i, j, len| {
                let pair = |acc, &[x, y]: &[usize; 2]| mma::dot_bf16(model, &a[x][i..][..len], &b[y][j..][..len], acc);
                order.iter().fold(0.0, pair)
            })
        };
        let want = in_order(&order);
        for simd in levels() {
            let got: Vec<u32> = problem.run(&host(model, simd), GUARD).unwrap().into_iter().map(f32::to_bits).collect();
            assert!(got == want, "{simd:?} {format:?}");
        }
        // The controls: neighbours exchanged, and pairs that do not begin with a step of their own.
        for i in 1..order.len() {
            let mut other = order.clone();
            other.swap(i - 1, i);
            assert!(in_order(&other) != want, "{format:?}: the order of pairs {} and {i} does not show", i - 1);
        }
        let unbroken = outputs(&|i, j, len| {
            let line = |factor: &[Vec<u16>; 3], side: usize, from: usize| -> Vec<u16> {
                order.iter().flat_map(|pair| factor[pair[side]][from..][..len].iter().copied()).collect()
            };
            mma::dot_bf16(model, &line(a, 0, i), &line(b, 1, j), 0.0)
        });
        assert!(unbroken != want, "{format:?}: where a pair begins does not show");
    }
}

/// Infinity, NaN, what rounds to infinity, what underflows: in one row of either factor, in every block of the chain.
#[test]
fn edges_of_split_factors_follow_the_model() {
    for (kind, format) in
        KINDS.into_iter().flat_map(|kind| [Format::Split, Format::SplitLeft, Format::SplitRight].map(|f| (kind, f)))
    {
        let mut problem = Problem::new(kind, format, &[131, 0, 20], 140, 150, 21);
        for data in &mut problem.data {
            let Data::F32(values) = data else { continue };
            // A prime distance: every edge comes to rows and columns of its own, most of which have one edge only.
            let places = (0..values.len()).step_by(1543);
            places.zip(SPLIT_EDGES.into_iter().cycle()).for_each(|(at, edge)| values[at] = edge);
        }
        problem.check();
        let results = problem.expected(NumericModel::Hopper, GUARD);
        let of = |kind: fn(f32) -> bool| results.iter().filter(|&&x| kind(x)).count();
        let counts = [of(f32::is_finite), of(f32::is_infinite), of(f32::is_nan)];
        assert!(counts.iter().all(|&count| count > 0), "{problem}: finite, infinite, NaN: {counts:?}");
    }
}

#[test]
fn f32_beside_a_split_factor_is_refused() {
    let host = host(NumericModel::Hopper, levels().last().unwrap());
    let backend: &dyn Backend = &host;
    let w = backend.upload(DType::F32, &[1, 4, 8], &[1.0f32; 32]).unwrap();
    let offsets = backend.upload(DType::U32, &[2], &[0u32, 2]).unwrap();
    let out = backend.upload(DType::F32, &[2, 4], &[0.0f32; 8]).unwrap();
    let run = |dtype: DType, bytes: &[u8]| {
        let x = backend.upload(dtype, &[2, 8], bytes).unwrap();
        let (kind, a, b) = (GemmKind::Forward, Operand::plain(&x), Operand::Split { values: &w });
        GroupedGemm { kind, a, b, offsets: &offsets, out: &out, accumulate: false }.run(backend)
    };
    let error = run(DType::F32, &[0; 64]).unwrap_err().to_string();
    assert!(error.contains("bf16 beside a split operand"), "{error}");
    run(DType::Bf16, &[0; 32]).unwrap();
}

fn fixed(cases: u32) -> Config {
    Config { cases, rng_seed: RngSeed::Fixed(0), ..Config::default() }
}

proptest! {
    #![proptest_config(fixed(40))]

    #[test]
    fn any_product_follows_the_model(
        kind in prop::sample::select(&KINDS[..]),
        format in prop::sample::select(&[Format::F32, Format::Bf16, Format::Split, Format::SplitLeft, Format::SplitRight][..]),
        model in prop::sample::select(&MODELS[..]),
        sizes in prop::collection::vec(prop_oneof![Just(0), Just(1), 15..18usize, 0..40usize], 1..6),
        n in prop_oneof![1..4usize, 31..34usize, 1..70usize],
        k in prop_oneof![1..4usize, 15..18usize, 1..140usize],
        gather in any::<bool>(),
        accumulate in any::<bool>(),
        out in prop::sample::select(&[DType::F32, DType::Bf16][..]),
        seed in any::<u64>(),
    ) {
        let mut problem = Problem::new(kind, format, &sizes, n, k, seed);
        problem.out = out;
        problem.accumulate = accumulate && out == DType::F32;
        if gather {
            let mut random = Random(seed);
            problem.gather[0] = Some((0..problem.rows).map(|_| random.below(problem.rows) as u32).collect());
        }
        problem.check_with(&[model], if problem.accumulate { 0x3FC0_0000 } else { GUARD });
    }

    /// A row's bits depend on that row, its group's matrix and k: not on the order of the rows or on the other rows.
    #[test]
    fn a_row_does_not_depend_on_its_batch(
        kind in prop::sample::select(&[GemmKind::Forward, GemmKind::Dgrad][..]),
        model in prop::sample::select(&MODELS[..]),
        sizes in prop::collection::vec(0..40usize, 1..5),
        more in 0..200usize,
        seed in any::<u64>(),
    ) {
        let alone = Problem::new(kind, Format::Bf16, &sizes, 40, 56, seed);
        let mut batch = alone.clone();
        let mut random = Random(seed);
        let (mut rows, mut ends) = (vec![], vec![0]);
        for group in 0..alone.groups() {
            let mut mine: Vec<u32> = alone.group(group).map(|row| row as u32).collect();
            if alone.rows > 0 {
                mine.extend((0..random.below(more + 1)).map(|_| random.below(alone.rows) as u32));
            }
            for i in (1..mine.len()).rev() {
                mine.swap(i, random.below(i + 1));
            }
            rows.extend(mine);
            ends.push(rows.len() as u32);
        }
        batch.rows = rows.len();
        batch.offsets = ends;
        batch.gather[0] = Some(rows.clone());
        for simd in levels() {
            let host = host(model, simd);
            let (one, many) = (alone.run(&host, GUARD).unwrap(), batch.run(&host, GUARD).unwrap());
            let cols = alone.out_shape()[1];
            for group in 0..batch.groups() {
                for row in batch.group(group) {
                    let source = rows[row] as usize;
                    if alone.group(group).contains(&source) {
                        let what = || format!("{model:?} {simd:?} {batch}: row {source} as row {row}");
                        assert_same(&many[row * cols..][..cols], &one[source * cols..][..cols], what);
                    }
                }
            }
        }
    }
}
