//! Every function of the shared shader files against native f32, on random bit patterns that dwell on the edges:
//! subnormals, infinities, NaN, ties, cancellation. `DROPLESS_PATTERNS` sets their number.

use dropless_core::numerics::philox::philox4x32;
use dropless_core::numerics::{bf16, e2m1, e4m3, math, special, ue8m0};
use dropless_core::{Backend, DType, Memory};

use crate::WgpuOptions;
use crate::dispatch::Dispatch;
use crate::shader::{Binding, EX2, FORMATS, MATH, PRELUDE, SIGMOID, Shader, U32, scalars};

scalars!(
    /// Number of patterns.
    struct Patterns { patterns }
);

/// The shader's expression of `a`, `b` and `c`, and what it must give.
type Case = (&'static str, fn(u32, u32, u32) -> u32);

fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

const ARITHMETIC: &[Case] = &[
    ("f32_add(a, b)", |a, b, _| (f(a) + f(b)).to_bits()),
    ("f32_sub(a, b)", |a, b, _| (f(a) - f(b)).to_bits()),
    ("f32_mul(a, b)", |a, b, _| (f(a) * f(b)).to_bits()),
    ("f32_div(a, b)", |a, b, _| (f(a) / f(b)).to_bits()),
    ("f32_fma(a, b, c)", |a, b, c| f(a).mul_add(f(b), f(c)).to_bits()),
    ("f32_sqrt(a)", |a, _, _| f(a).sqrt().to_bits()),
    ("f32_from_u32(a)", |a, _, _| (a as f32).to_bits()),
    ("f32_from_i32(i32(a))", |a, _, _| (a.cast_signed() as f32).to_bits()),
];

const FUNCTIONS: &[Case] = &[
    ("f32_exp(a)", |a, _, _| math::exp(f(a)).to_bits()),
    ("f32_log(a)", |a, _, _| math::log(f(a)).to_bits()),
    ("f32_sigmoid(a)", |a, _, _| math::sigmoid(f(a)).to_bits()),
    ("f32_ex2(a)", |a, _, _| special::ex2(f(a)).to_bits()),
    ("f32_rcp(a)", |a, _, _| special::rcp(f(a)).to_bits()),
];

/// Integers and codes: compared as they are, also where they look like a NaN.
const CODES: &[Case] = &[
    ("select(0u, 1u, f32_lt(a, b))", |a, b, _| u32::from(f(a) < f(b))),
    ("select(0u, 1u, f32_le(a, b))", |a, b, _| u32::from(f(a) <= f(b))),
    ("select(0u, 1u, is_nan(a))", |a, _, _| u32::from(f(a).is_nan())),
    ("e4m3_from_f32(a)", |a, _, _| u32::from(e4m3::from_f32(f(a)))),
    ("e2m1_from_f32(a)", |a, _, _| u32::from(e2m1::from_f32(f(a)))),
    ("ue8m0_from_f32(f32_abs(a))", |a, _, _| u32::from(ue8m0::from_f32(f(a).abs()))),
    ("ue8m0_from_f32_floor(f32_abs(a))", |a, _, _| u32::from(ue8m0::from_f32_floor(f(a).abs()))),
];

/// Floats that come from codes, and the larger of two (zeros of both signs are equal, so `+ 0` hides which one it is).
const FLOATS: &[Case] = &[
    ("f32_add(f32_max(a, b), 0u)", |a, b, _| (f(a).max(f(b)) + 0.0).to_bits()),
    ("bf16_round(a)", |a, _, _| bf16::round(f(a)).to_bits()),
    ("bf16_to_f32(a & 0xFFFFu)", |a, _, _| bf16::to_f32((a & 0xFFFF) as u16).to_bits()),
    ("e4m3_to_f32(a & 0xFFu)", |a, _, _| e4m3::to_f32((a & 0xFF) as u8).to_bits()),
    ("e2m1_to_f32(a & 0xFu)", |a, _, _| e2m1::to_f32((a & 0xF) as u8).to_bits()),
    ("ue8m0_to_f32(a & 0xFFu)", |a, _, _| ue8m0::to_f32((a & 0xFF) as u8).to_bits()),
    ("ue8m0_reciprocal(a & 0xFFu)", |a, _, _| ue8m0::reciprocal((a & 0xFF) as u8).to_bits()),
];

/// The first words of Philox, counted.
struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(1);
        philox4x32([20260, 0], [self.0, 0, 0, 0])[0]
    }

    /// Any pattern; half of them an edge, a short fraction, a subnormal or a number of ordinary size.
    fn pattern(&mut self) -> u32 {
        const EDGES: [u32; 12] = [
            0,
            1,
            0x007F_FFFF,
            0x0080_0000,
            0x0080_0001,
            0x3F7F_FFFF,
            0x3F80_0000,
            0x3F80_0001,
            0x7F7F_FFFF,
            0x7F80_0000,
            0x7F80_0001,
            0x7FFF_FFFF,
        ];
        let (bits, sign) = (self.next(), self.next() & 0x8000_0000);
        match self.next() % 10 {
            0 => EDGES[bits as usize % EDGES.len()] | sign,
            1 => (bits & 0x7F80_0000) | ((bits & 7) << 20) | sign,
            2 => ((bits & 0x007F_FFFF) >> (self.next() % 24)) | sign,
            3 => ((bits & 0x007F_FFFF) + ((118 + self.next() % 20) << 23)) | sign,
            4 => ((bits & 0x0FFF_FFFF) + 0x3A00_0000) | sign,
            _ => bits,
        }
    }

    /// Three operands, in half of the cases such that sums cancel and quotients are nearly one.
    fn operands(&mut self) -> [u32; 3] {
        let (a, b) = (self.pattern(), self.pattern());
        match self.next() % 4 {
            0 => [a, near(a, self.next()), self.pattern()],
            1 => [a, b, near((f(a) * f(b)).to_bits(), self.next())],
            _ => [a, b, self.pattern()],
        }
    }
}

/// A pattern a few units and exponents away, of either sign.
fn near(bits: u32, by: u32) -> u32 {
    let units = (by & 7).wrapping_sub(3);
    let exponents = (((by >> 3) & 3).wrapping_sub(1)) << 23;
    bits.wrapping_add(units).wrapping_add(exponents) ^ (by & 0x8000_0000)
}

fn patterns() -> usize {
    std::env::var("DROPLESS_PATTERNS").map_or(1 << 20, |n| n.parse().expect("DROPLESS_PATTERNS is a number"))
}

/// Runs every case over the same operands. `same` decides whether two results agree.
fn compare(cases: &[Case], same: impl Fn(u32, u32) -> bool) {
    let Some(wgpu) = crate::test_backend(&WgpuOptions::default()) else { return };
    const CHUNK: usize = 1 << 20;
    let mut random = Random(0);
    let mut wrong = vec![0usize; cases.len()];
    let mut left = patterns();
    while left > 0 {
        let n = left.min(CHUNK);
        left -= n;
        let operands: Vec<[u32; 3]> = (0..n).map(|_| random.operands()).collect();
        let column = |i: usize| operands.iter().map(|o| o[i]).collect::<Vec<_>>();
        let [a, b, c] = [0, 1, 2].map(|i| (&wgpu as &dyn Backend).upload(DType::U32, &[n], &column(i)).unwrap());
        let out = wgpu.alloc(DType::U32, &[n], Memory::Device).unwrap();
        for (case, &(expression, native)) in cases.iter().enumerate() {
            wgpu.stream()
                .dispatch(Dispatch::new(
                    shader(expression),
                    Patterns { patterns: u32::try_from(n).unwrap() },
                    &[Some(&a), Some(&b), Some(&c), Some(&out)],
                    n.div_ceil(64),
                ))
                .unwrap();
            let got: Vec<u32> = (&wgpu as &dyn Backend).download(&out).unwrap();
            for (&[a, b, c], &got) in operands.iter().zip(&got) {
                let want = native(a, b, c);
                if !same(got, want) {
                    if wrong[case] < 5 {
                        println!("{expression}: {a:08x} {b:08x} {c:08x} gives {got:08x}, not {want:08x}");
                    }
                    wrong[case] += 1;
                }
            }
        }
    }
    let failed: Vec<_> = cases.iter().zip(&wrong).filter(|(_, wrong)| **wrong > 0).collect();
    assert!(failed.is_empty(), "mismatches: {failed:?}");
}

const BINDINGS: &[Binding] =
    &[Binding::read("x", U32), Binding::read("y", U32), Binding::read("z", U32), Binding::write("out", U32)];

/// A shader that evaluates one expression.
fn shader(expression: &'static str) -> &'static Shader<Patterns> {
    use std::collections::HashMap;
    use std::sync::{LazyLock, Mutex};
    static SHADERS: LazyLock<Mutex<HashMap<&'static str, &'static Shader<Patterns>>>> = LazyLock::new(Mutex::default);
    let make = || {
        let main = format!(
            "@compute @workgroup_size(64)
            fn main(
                @builtin(workgroup_id) group: vec3<u32>,
                @builtin(num_workgroups) groups: vec3<u32>,
                @builtin(local_invocation_index) lane: u32,
            ) {{
                let i = linear(group, groups) * 64u + lane;
                if i >= given.scalars.patterns {{
                    return;
                }}
                let a = x_at(i);
                let b = y_at(i);
                let c = z_at(i);
                out_set(i, {expression});
            }}"
        );
        let files = vec![PRELUDE, FORMATS, MATH, EX2, SIGMOID, main.leak()];
        let shader: &'static Shader<Patterns> = Box::leak(Box::new(Shader::new(expression, files.leak(), BINDINGS)));
        shader
    };
    SHADERS.lock().unwrap().entry(expression).or_insert_with(make)
}

/// Equal bits, or two NaN.
fn same_float(got: u32, want: u32) -> bool {
    got == want || (f(got).is_nan() && f(want).is_nan())
}

#[test]
fn arithmetic_is_ieee() {
    compare(ARITHMETIC, same_float);
}

#[test]
fn functions_are_those_of_the_host() {
    compare(FUNCTIONS, same_float);
}

#[test]
fn codes_are_those_of_the_host() {
    compare(CODES, |got, want| got == want);
    compare(FLOATS, same_float);
}
