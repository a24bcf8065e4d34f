//! exp and log against f64 over the bit patterns of f32; ex2 and rcp against the results of an H200.

use dropless_core::numerics::math::{exp, log, sigmoid, silu};
use dropless_core::numerics::special::{ex2, rcp};
use sha2::{Digest, Sha256};

/// What the documentation of exp and log promises.
const EXP_ULP: f64 = 0.81;
const LOG_ULP: f64 = 0.85;

/// The spacing of f32 at `exact`.
fn spacing(exact: f64) -> f64 {
    2f64.powi(libm::ilogb(exact).max(-126) - 23)
}

/// The largest distance of `f` from `exact` in ULP over `inputs`, and where it is. What f64 rounds to infinity, zero or
/// NaN in f32 must be exactly that.
fn worst(inputs: impl Iterator<Item = f32>, f: impl Fn(f32) -> f32, exact: impl Fn(f64) -> f64) -> (f64, f32) {
    let mut worst = (0.0, 0.0);
    for x in inputs {
        let (got, want) = (f(x), exact(f64::from(x)));
        #[expect(clippy::cast_possible_truncation, reason = "rounding is what is asked for")]
        let rounded = want as f32;
        if rounded.is_finite() && got.is_finite() {
            let distance = (f64::from(got) - want).abs() / spacing(want);
            if distance > worst.0 {
                worst = (distance, x);
            }
        } else {
            assert!(got == rounded || (got.is_nan() && rounded.is_nan()), "f({x:e}) = {got:e}, not {rounded:e}");
        }
    }
    worst
}

/// Bit patterns spread over all of f32 (coprime to every power of two), and all those in `dense`.
fn patterns(dense: [f32; 2]) -> impl Iterator<Item = f32> {
    let spread = (0..=u32::MAX).step_by(97);
    spread.chain(dense[0].to_bits()..dense[1].to_bits()).map(f32::from_bits)
}

#[test]
fn exp_is_within_its_bound() {
    // Dense: from -1 to -1.5, and the passage through the subnormals to zero.
    let (ulp, at) = worst(patterns([-1.0, -1.25]).chain(patterns([-87.0, -104.5])), exp, libm::exp);
    assert!(ulp <= EXP_ULP, "{ulp} ULP at {at:e}");
}

#[test]
fn log_is_within_its_bound() {
    let (ulp, at) = worst(patterns([0.625, 1.5]), log, libm::log);
    assert!(ulp <= LOG_ULP, "{ulp} ULP at {at:e}");
}

/// Minutes; the bounds in the documentation come from here.
#[test]
fn every_input_is_within_the_bounds() {
    if std::env::var_os("DROPLESS_EXHAUSTIVE").is_none() {
        println!("skipped: takes minutes; set DROPLESS_EXHAUSTIVE to run it");
        return;
    }
    // Below 2^-26 e^x rounds to 1 or a neighbour; outside the range it is infinity or zero.
    let magnitudes = 2f32.powi(-26).to_bits()..=104.5f32.to_bits();
    let inputs = magnitudes.flat_map(|bits| [f32::from_bits(bits), -f32::from_bits(bits)]);
    let (ulp, at) = worst(inputs, exp, libm::exp);
    println!("exp: {ulp:.4} ULP at {at:e}");
    assert!(ulp <= EXP_ULP, "exp: {ulp} ULP at {at:e}");
    let (ulp, at) = worst((1..f32::INFINITY.to_bits()).map(f32::from_bits), log, libm::log);
    println!("log: {ulp:.4} ULP at {at:e}");
    assert!(ulp <= LOG_ULP, "log: {ulp} ULP at {at:e}");
}

#[test]
fn special_values() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    assert_eq!(exp(0.0).to_bits(), 1f32.to_bits());
    assert_eq!(exp(-0.0).to_bits(), 1f32.to_bits());
    assert_eq!(exp(-inf).to_bits(), 0);
    assert_eq!(exp(-104.0).to_bits(), 0);
    assert_eq!(exp(-103.9).to_bits(), 1, "the least subnormal");
    assert_eq!(exp(inf), inf);
    assert!(exp(f32::from_bits(0x42B1_7217)).is_finite(), "ln of the largest value lies between these two");
    assert_eq!(exp(f32::from_bits(0x42B1_7218)), inf);
    assert!(exp(nan).is_nan());
    assert!(exp(f32::from_bits(0xFFFF_FFFF)).is_nan());

    assert_eq!(log(1.0).to_bits(), 0);
    assert_eq!(log(0.0), -inf);
    assert_eq!(log(-0.0), -inf);
    assert_eq!(log(inf), inf);
    assert!(log(-inf).is_nan() && log(-1.0).is_nan() && log(-1e-45).is_nan() && log(nan).is_nan());

    assert_eq!(sigmoid(0.0), 0.5);
    assert_eq!((sigmoid(-inf), sigmoid(inf)), (0.0, 1.0));
    assert_eq!(silu(0.0).to_bits(), 0);
    assert_eq!(silu(-200.0).to_bits(), (-0f32).to_bits());
    assert_eq!(silu(200.0), 200.0);
    assert_eq!(silu(inf), inf);
    assert!(silu(-inf).is_nan(), "infinity times 0");
    assert!(silu(nan).is_nan() && sigmoid(nan).is_nan());
}

/// The SHA-256 of a function's results, little-endian.
fn binade(f: fn(f32) -> f32, inputs: impl Iterator<Item = f32>) -> String {
    let mut hash = Sha256::new();
    inputs.for_each(|x| hash.update(f(x).to_bits().to_le_bytes()));
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn ex2_and_rcp_are_those_of_the_special_function_unit() {
    let fractions = || (0..1u32 << 23).map(|f| f as f32 / 8_388_608.0);
    assert_eq!(binade(ex2, fractions()), "b2a42c4a626469c986e33e43f16f41bde9d84de94347cd9ceaa1bd68d36bcdf0");
    assert_eq!(
        binade(rcp, fractions().map(|f| 1.0 + f)),
        "c408381446132e07fa5581e930dc33fb790bea7ec4276ef3621e322df2492a55"
    );
}

#[test]
fn ex2_of_other_binades_and_special_values() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for (x, expected) in
        [(0.0, 1.0), (-0.0, 1.0), (1e-45, 1.0), (-1e-45, 1.0), (127.0, 2f32.powi(127)), (-126.0, 2f32.powi(-126))]
    {
        assert_eq!(ex2(x), expected, "{x:e}");
    }
    // 2^-23 of the fraction is the last that counts.
    assert_eq!(ex2(2f32.powi(-24)), 1.0);
    assert_eq!(ex2(-2f32.powi(-24)), 1.0);
    assert!(ex2(127.99999).is_finite());
    assert_eq!((ex2(128.0), ex2(inf)), (inf, inf));
    assert_eq!((ex2(-126.00001).to_bits(), ex2(-inf).to_bits()), (0, 0));
    assert_eq!((ex2(nan).to_bits(), ex2(-nan).to_bits()), (0x7FFF_FFFF, 0x7FFF_FFFF));
    // A whole number moves the exponent and nothing else; a negative fraction is the ones' complement.
    for whole in [1u16, 0x4321, 0x7FFF] {
        let fraction = |f: u32| f as f32 / 8_388_608.0;
        let f = u32::from(whole) << 8;
        assert_eq!(ex2(fraction(f) + 8.0), ex2(fraction(f) + 4.0) * 16.0, "{f}");
        assert_eq!(ex2(-fraction(f)), ex2(fraction(0x7F_FFFF - f)) / 2.0, "{f}");
    }
}

#[test]
fn rcp_of_other_binades_and_special_values() {
    let inf = f32::INFINITY;
    for sign in [1f32, -1.0] {
        assert_eq!(rcp(sign * inf).to_bits(), (sign * 0.0).to_bits());
        assert_eq!(rcp(sign * 0.0), sign * inf);
        assert_eq!(rcp(sign * f32::from_bits(0x007F_FFFF)), sign * inf, "subnormal");
        assert_eq!(rcp(sign * 2f32.powi(-126)), sign * 2f32.powi(126));
        assert_eq!(rcp(sign * 2f32.powi(126)), sign * 2f32.powi(-126));
        assert_eq!(rcp(sign * 2f32.powi(127)).to_bits(), (sign * 0.0).to_bits(), "below 2^-126");
        assert_eq!(rcp(sign * 3.0 * 2f32.powi(40)), rcp(sign * 3.0) * 2f32.powi(-40));
    }
    assert_eq!(rcp(f32::NAN).to_bits(), 0x7FFF_FFFF);
}
