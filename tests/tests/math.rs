//! exp and log against f64 over the bit patterns of f32.

use dropless_core::numerics::math::{exp, log, sigmoid, silu};

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
    assert!(silu(nan).is_nan());
}
