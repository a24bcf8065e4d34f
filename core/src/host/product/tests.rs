//! Every kernel at every level of vector instructions against the specification, bit for bit.

use super::*;
use crate::numerics::philox::philox4x32;

/// Philox under this key, its words counted.
struct Random {
    key: u32,
    count: u32,
}

impl Random {
    fn next(&mut self) -> u64 {
        self.count += 1;
        let [low, high, ..] = philox4x32([self.key, 0], [self.count, 0, 0, 0]);
        u64::from(high) << 32 | u64::from(low)
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn code(&mut self) -> u16 {
        (self.next() & 0xFFFF).try_into().unwrap()
    }

    /// A bf16 with its exponent within `spread` of `center` (as exponent fields).
    fn near(&mut self, center: u64, spread: u64) -> u16 {
        let field = u16::try_from(center + self.below(2 * spread + 1) - spread).unwrap();
        field << 7 | self.code() & 0x807F
    }
}

/// What the operands look like.
#[derive(Clone, Copy, Debug)]
enum Regime {
    /// As in training: a few binades, some zeros.
    Usual,
    /// Any bits.
    Raw,
    /// Finite values from subnormal to huge.
    Wide,
    /// The largest significands, one sign: sums that do not fit an i32 together with the accumulator.
    Full,
    /// Results near the smallest and near the largest exponents.
    Ends,
    /// Zeros of both signs, subnormals, and little else.
    Small,
    /// Usual, with a rare NaN or infinity.
    Specials,
}

const REGIMES: [Regime; 7] =
    [Regime::Usual, Regime::Raw, Regime::Wide, Regime::Full, Regime::Ends, Regime::Small, Regime::Specials];

fn bf16_code(regime: Regime, random: &mut Random) -> u16 {
    match regime {
        Regime::Usual if random.below(8) == 0 => random.code() & 0x8000,
        Regime::Usual => random.near(125, 4),
        Regime::Raw => random.code(),
        Regime::Wide => random.near(127, 126),
        Regime::Full => 0x3FFF - u16::try_from(random.below(2)).unwrap(),
        Regime::Ends => {
            let center = [73, 180, 184, 188, 191][usize::try_from(random.below(5)).unwrap()];
            random.near(center, 2)
        }
        Regime::Small => match random.below(4) {
            0 => random.code() & 0x8000,
            1 => random.code() & 0x807F,
            2 => random.near(10, 9),
            _ => random.near(200, 40),
        },
        Regime::Specials if random.below(300) == 0 => 0x7F80 | random.code() & 0x8001,
        Regime::Specials => random.near(127, 3),
    }
}

fn e4m3_code(regime: Regime, random: &mut Random) -> u8 {
    let code = u8::try_from(random.below(256)).unwrap();
    match regime {
        Regime::Full => 0x7E,
        Regime::Small => code & 0x8F,
        Regime::Raw => code,
        _ if code & 0x7F == 0x7F => 0,
        _ => code,
    }
}

fn f32_value(regime: Regime, random: &mut Random) -> f32 {
    f32::from_bits(u32::from(bf16_code(regime, random)) << 16 | u32::from(random.code()))
}

fn accumulator(regime: Regime, random: &mut Random) -> f32 {
    match random.below(4) {
        0 => 0.0,
        1 => -0.0,
        // Just below 2, the largest that keeps the exponent of the products in `Full`.
        _ if matches!(regime, Regime::Full) => f32::from_bits(0x3FFF_FFFF),
        _ => f32_value(regime, random),
    }
}

/// Row indices or none.
type Gather = Option<Vec<u32>>;

/// A factor of `rows` by `k` in one of four layouts, with `margin` elements in front.
struct Stored<T> {
    data: Vec<T>,
    rows: usize,
    strides: [usize; 2],
    gathers: [Gather; 2],
    margin: usize,
}

impl<T: Copy> Stored<T> {
    fn new(rows: usize, k: usize, layout: u64, random: &mut Random, mut one: impl FnMut(&mut Random) -> T) -> Self {
        let margin = usize::try_from(random.below(3)).unwrap();
        let (row_stride, chain_stride) = if layout & 1 == 0 { (k + 3, 1) } else { (1, rows + 5) };
        let data = (0..margin + (rows + 5) * (k + 3)).map(|_| one(random)).collect();
        let mut pick = |n: usize| (0..n).map(|_| u32::try_from(random.below(n as u64)).unwrap()).collect();
        let gathers = match layout >> 1 {
            0 => [None, None],
            1 => [Some(pick(rows)), None],
            _ => [None, Some(pick(k))],
        };
        Stored { data, rows, strides: [row_stride, chain_stride], gathers, margin }
    }

    fn matrix<'a>(&'a self, elements: impl Fn(&'a [T]) -> Elements<'a>) -> Matrix<'a> {
        let [row, chain] = [0, 1].map(|d| Axis { stride: self.strides[d], gather: self.gathers[d].as_deref() });
        Matrix { data: elements(&self.data), offset: self.margin, rows: self.rows, row, chain }
    }

    fn row(&self, i: usize, k: usize) -> Vec<T> {
        let index = |d: usize, i: usize| self.gathers[d].as_ref().map_or(i, |g| g[i] as usize) * self.strides[d];
        (0..k).map(|t| self.data[self.margin + index(0, i) + index(1, t)]).collect()
    }
}

const SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [3, 5, 15],
    [4, 32, 16],
    [7, 33, 17],
    [2, 16, 33],
    [13, 31, 64],
    [9, 65, 130],
    [130, 3, 40],
    [5, 258, 96],
];

/// All shapes, layouts and regimes for one element type under one model.
fn check<T: Copy>(
    model: NumericModel,
    code: impl Fn(Regime, &mut Random) -> T,
    elements: impl for<'a> Fn(&'a [T]) -> Elements<'a>,
    dot: impl Fn(&[T], &[T], f32) -> f32,
) {
    let mut random = Random { key: 7, count: 0 };
    for regime in REGIMES {
        for (layout, [m, n, k]) in SHAPES.into_iter().cycle().take(18).enumerate() {
            let layout = layout as u64;
            let a = Stored::new(m, k, layout % 6, &mut random, |random| code(regime, random));
            let b = Stored::new(n, k, layout / 3 % 6, &mut random, |random| code(regime, random));
            let ldc = n + 2;
            let before: Vec<f32> = (0..m * ldc).map(|_| accumulator(regime, &mut random)).collect();
            let mut want = before.clone();
            let columns: Vec<_> = (0..n).map(|j| b.row(j, k)).collect();
            for i in 0..m {
                let row = a.row(i, k);
                for j in 0..n {
                    want[i * ldc + j] = dot(&row, &columns[j], before[i * ldc + j]);
                }
            }
            for simd in Simd::ALL.into_iter().filter(|simd| simd.available()) {
                let mut got = before.clone();
                product(model, simd, a.matrix(&elements), b.matrix(&elements), k, &mut got, ldc);
                for (at, (got, want)) in got.iter().zip(&want).enumerate() {
                    assert!(
                        got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()),
                        "{model:?} {simd:?} {regime:?} {m}x{n}x{k} layout {layout} at {at}: {:08x} for {:08x}",
                        got.to_bits(),
                        want.to_bits(),
                    );
                }
            }
        }
    }
}

#[test]
fn bf16_products_have_the_bits_of_the_matrix_unit() {
    let model = NumericModel::Hopper;
    check(model, bf16_code, |x| Elements::Bf16(x), |a, b, acc| mma::dot_bf16(model, a, b, acc));
}

#[test]
fn e4m3_products_have_the_bits_of_the_matrix_unit() {
    for model in [NumericModel::Hopper, NumericModel::Blackwell] {
        check(model, e4m3_code, |x| Elements::E4m3(x), |a, b, acc| mma::dot_e4m3(model, a, b, acc));
    }
}

#[test]
fn f32_products_are_chains_of_fused_multiply_adds() {
    let model = NumericModel::F32;
    check(model, f32_value, |x| Elements::F32(x), mma::dot_f32);
    check(model, bf16_code, |x| Elements::Bf16(x), |a, b, acc| mma::dot_bf16(model, a, b, acc));
    check(model, e4m3_code, |x| Elements::E4m3(x), |a, b, acc| mma::dot_e4m3(model, a, b, acc));
}

/// A chain may pause at any multiple of a step.
#[test]
fn a_chain_continues_from_call_to_call() {
    let mut random = Random { key: 11, count: 0 };
    let model = NumericModel::Hopper;
    let [a, b] = [6, 40].map(|rows| Stored::new(rows, 96, 0, &mut random, |r| bf16_code(Regime::Usual, r)));
    let run = |parts: &[usize]| {
        let mut c = vec![0.0; 6 * 40];
        let mut from = 0;
        for &k in parts {
            let [a, b] = [&a, &b].map(|x| {
                let whole = x.matrix(Elements::Bf16);
                Matrix { offset: whole.offset + from, ..whole }
            });
            product(model, Simd::best(), a, b, k, &mut c, 40);
            from += k;
        }
        c.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(run(&[96]), run(&[32, 64]));
    assert_eq!(run(&[90]), run(&[64, 26]));
}
