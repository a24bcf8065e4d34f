//! The scalar formats against roundings written another way: an ordered table of all values, searched in f64.

use dropless_core::numerics::{bf16, e2m1, e4m3, e5m2, ue8m0};

/// The code whose value is nearest to `x`, ties to the even code, saturating: by comparing with every code.
fn nearest(x: f32, codes: u8, sign: u8, nan: u8, value: impl Fn(u8) -> f64) -> u8 {
    if x.is_nan() {
        return nan;
    }
    let magnitude = f64::from(x).abs().min(value(codes - 1));
    let distance = |c: u8| (value(c) - magnitude).abs();
    let best = (0..codes).min_by(|&a, &b| distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1))));
    let best = best.expect("a format has codes");
    if x.is_sign_negative() { best | sign } else { best }
}

/// The value of a small float by the definition, for codes without sign.
fn defined(code: u8, fraction_bits: u32, bias: i32) -> f64 {
    let (exponent, fraction) = (i32::from(code >> fraction_bits), f64::from(code & ((1 << fraction_bits) - 1)));
    let fraction = fraction / f64::from(1 << fraction_bits);
    if exponent == 0 { fraction * 2f64.powi(1 - bias) } else { (1.0 + fraction) * 2f64.powi(exponent - bias) }
}

/// Every bf16 value, and every f32 within two steps of a value of the format or of the middle between two.
fn probes(value: impl Fn(u8) -> f64, codes: u8) -> Vec<f32> {
    let mut probes: Vec<f32> = (0..=u16::MAX).map(bf16::to_f32).collect();
    for code in 0..codes - 1 {
        for at in [value(code), (value(code) + value(code + 1)) / 2.0] {
            #[expect(clippy::cast_possible_truncation, reason = "both are values of f32")]
            let bits = (at as f32).to_bits();
            for bits in bits.saturating_sub(2)..=bits + 2 {
                probes.extend([f32::from_bits(bits), -f32::from_bits(bits)]);
            }
        }
    }
    probes
}

#[test]
fn e4m3_codes_and_roundings() {
    let value = |c: u8| defined(c, 3, 7);
    for code in 0..=0x7Eu8 {
        assert_eq!(f64::from(e4m3::to_f32(code)), value(code));
        assert_eq!(e4m3::to_f32(code | 0x80).to_bits(), (-e4m3::to_f32(code)).to_bits());
        assert_eq!(e4m3::from_f32(e4m3::to_f32(code)), code);
        assert_eq!(e4m3::from_f32(-e4m3::to_f32(code)), code | 0x80);
    }
    assert!(e4m3::to_f32(0x7F).is_nan() && e4m3::to_f32(0xFF).is_nan());
    for x in probes(value, 0x7F) {
        assert_eq!(e4m3::from_f32(x), nearest(x, 0x7F, 0x80, 0x7F, value), "{x:e}");
    }
}

#[test]
fn e5m2_codes_and_roundings() {
    let value = |c: u8| defined(c, 2, 15);
    for code in 0..0x7Cu8 {
        assert_eq!(f64::from(e5m2::to_f32(code)), value(code));
        assert_eq!(e5m2::from_f32(e5m2::to_f32(code)), code);
        assert_eq!(e5m2::from_f32(-e5m2::to_f32(code)), code | 0x80);
    }
    assert_eq!((e5m2::to_f32(0x7C), e5m2::to_f32(0xFC)), (f32::INFINITY, f32::NEG_INFINITY));
    for code in 0x7D..=0x7Fu8 {
        assert!(e5m2::to_f32(code).is_nan() && e5m2::to_f32(code | 0x80).is_nan());
    }
    for x in probes(value, 0x7C) {
        assert_eq!(e5m2::from_f32(x), nearest(x, 0x7C, 0x80, 0x7F, value), "{x:e}");
    }
}

#[test]
fn e2m1_codes_and_roundings() {
    let value = |c: u8| defined(c, 1, 1);
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(e2m1::to_f32), [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    for code in 0..8u8 {
        assert_eq!(e2m1::to_f32(code | 8).to_bits(), (-e2m1::to_f32(code)).to_bits());
        assert_eq!(e2m1::from_f32(-e2m1::to_f32(code)), code | 8);
    }
    for x in probes(value, 8) {
        assert_eq!(e2m1::from_f32(x), nearest(x, 8, 8, 7, value), "{x:e}");
    }
}

/// All 256 random bytes at once: the number of roundings upwards is the distance to the code below, in 1/256 of the
/// spacing, so the mean over the bytes is exact for inputs on that grid.
#[test]
fn e2m1_stochastic_rounding_has_the_right_mean() {
    for (x, below, spacing) in [(0.25f32, 0.0f32, 0.5f32), (1.25, 1.0, 0.5), (2.75, 2.0, 1.0), (5.5, 4.0, 2.0)] {
        for x in [x, -x] {
            let up = (0..=255u8)
                .filter(|&r| {
                    let rounded = e2m1::to_f32(e2m1::from_f32_stochastic(x, r));
                    assert!(rounded == below.copysign(x) || rounded == (below + spacing).copysign(x));
                    rounded.abs() > below
                })
                .count();
            assert_eq!(up as f32 / 256.0, (x.abs() - below) / spacing, "{x}");
        }
    }
    for code in 0..16u8 {
        assert!((0..=255).all(|r| e2m1::from_f32_stochastic(e2m1::to_f32(code), r) == code), "values stay");
    }
    for r in [0, 255] {
        assert_eq!(e2m1::from_f32_stochastic(1e30, r), 7);
        assert_eq!(e2m1::from_f32_stochastic(f32::NEG_INFINITY, r), 15);
        assert_eq!(e2m1::from_f32_stochastic(f32::NAN, r), 7);
    }
}

#[test]
fn ue8m0_rounds_up_and_down_to_powers_of_two() {
    for x in (0..=0x7F80u16).map(bf16::to_f32).chain([1.999, 448.0, 1.0 + f32::EPSILON]) {
        let clamped = f64::from(x).clamp(2f64.powi(-127), 2f64.powi(127));
        let up = (0..=254u8).find(|&c| 2f64.powi(i32::from(c) - 127) >= clamped).unwrap();
        let down = (0..=254u8).rev().find(|&c| 2f64.powi(i32::from(c) - 127) <= clamped).unwrap();
        assert_eq!((ue8m0::from_f32(x), ue8m0::from_f32_floor(x)), (up, down), "{x:e}");
    }
    assert_eq!((ue8m0::from_f32(f32::NAN), ue8m0::from_f32_floor(f32::NAN)), (0xFF, 0xFF));
}

#[test]
fn b050_every_ue8m0_code_decodes() {
    for code in 0..=254u8 {
        assert_eq!(f64::from(ue8m0::to_f32(code)), 2f64.powi(i32::from(code) - 127));
        assert_eq!(f64::from(ue8m0::reciprocal(code)), 2f64.powi(127 - i32::from(code)));
    }
    assert_eq!(ue8m0::to_f32(0).to_bits(), 0x0040_0000);
    assert_eq!(ue8m0::to_f32(134), 128.0);
    assert!(ue8m0::to_f32(255).is_nan() && ue8m0::reciprocal(255).is_nan());
}

#[test]
fn b060_casts_saturate_and_keep_nan() {
    let e4m3_cases = [
        (448.0, 0x7E),
        (449.0, 0x7E),
        (464.0, 0x7E),
        (465.0, 0x7E),
        (1000.0, 0x7E),
        (-1000.0, 0xFE),
        (3e10, 0x7E),
        (f32::INFINITY, 0x7E),
        (f32::NEG_INFINITY, 0xFE),
        (f32::NAN, 0x7F),
        (-f32::NAN, 0x7F),
        (1.0 / 512.0, 0x01),
        (1.0 / 1024.0, 0x00),
        (0.75 / 512.0, 0x01),
        (-0.0, 0x80),
    ];
    for (x, code) in e4m3_cases {
        assert_eq!(e4m3::from_f32(x), code, "{x:e}");
    }
    let e5m2_cases = [
        (57344.0, 0x7B),
        (61440.0, 0x7B),
        (1e6, 0x7B),
        (-1e6, 0xFB),
        (f32::INFINITY, 0x7B),
        (f32::NEG_INFINITY, 0xFB),
        (f32::NAN, 0x7F),
        (1.0 / 65536.0, 0x01),
        (1.0 / 131072.0, 0x00),
        (0.75 / 65536.0, 0x01),
        (-0.0, 0x80),
    ];
    for (x, code) in e5m2_cases {
        assert_eq!(e5m2::from_f32(x), code, "{x:e}");
    }
}
