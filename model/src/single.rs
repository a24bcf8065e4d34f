//! Numbers of a configuration, which are f64, as the f32 that the ops take.

/// A configured number as the f32 that the ops take, rounded once.
#[expect(clippy::cast_possible_truncation, reason = "rounding to the nearest f32 is what is meant")]
pub fn single(x: f64) -> f32 {
    x as f32
}

/// The largest of a rate or factor that makes any sense.
const LARGE: f32 = 1e6;

/// What a key may be that becomes an f32: from `low` to `high` as an f32, or 0 where that has a meaning. A number that
/// f32 turns into another kind of number, as small ones into 0 and those just below 1 into 1, is none of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Single {
    /// Whether 0 is one of them.
    pub zero: bool,
    /// The smallest; the smallest number with all digits of an f32, or a larger one.
    pub low: f32,
    /// The largest.
    pub high: f32,
}

impl Single {
    /// A rate or coefficient, 0 for none.
    pub const RATE: Single = Single { zero: true, low: f32::MIN_POSITIVE, high: LARGE };
    /// A factor, without which nothing is left.
    pub const FACTOR: Single = Single { zero: false, ..Single::RATE };
    /// The decay of a mean over steps: so far below 1 that something of the new step enters.
    pub const DECAY: Single = Single { zero: true, low: f32::MIN_POSITIVE, high: 1.0 - f32::EPSILON / 2.0 };

    /// Verifies a key's value.
    ///
    /// # Errors
    /// A line with the key, the value, and the nearest that is usable.
    pub fn check(&self, key: &str, value: f64) -> Result<(), String> {
        let Single { zero, low, high } = *self;
        let rounded = single(value);
        if (low..=high).contains(&rounded) && value >= f64::from(low) || zero && value == 0.0 {
            return Ok(());
        }
        let becomes = match f64::from(rounded) != value && rounded.fract() == 0.0 && value.fract() != 0.0 {
            true => format!(", which is {rounded} in f32"),
            false => String::new(),
        };
        let expected = match (zero, low == f32::MIN_POSITIVE) {
            (true, _) => format!("0 to {high}"),
            (false, true) => format!("more than 0 and at most {high}"),
            (false, false) => format!("{low} to {high}"),
        };
        let nearest = match value {
            _ if value.is_nan() => return Err(format!("{key} is NaN, expected {expected}")),
            _ if zero && value < 0.0 => 0.0,
            _ => rounded.clamp(low, high),
        };
        Err(format!("{key} is {value:?}{becomes}, expected {expected}: the nearest usable value is {nearest:?}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f11_what_rounds_away_is_refused_with_the_nearest_usable_value() {
        let message = |limits: Single, value| limits.check("key", value).unwrap_err();
        assert_eq!(
            message(Single::DECAY, 0.99999999),
            "key is 0.99999999, which is 1 in f32, expected 0 to 0.99999994: the nearest usable value is 0.99999994"
        );
        assert_eq!(
            message(Single::RATE, 1e-50),
            "key is 1e-50, which is 0 in f32, expected 0 to 1000000: the nearest usable value is 1.1754944e-38"
        );
        assert!(message(Single::FACTOR, 0.0).contains("expected more than 0"));
        assert!(message(Single::RATE, -1.0).ends_with("is 0.0"));
        assert!(message(Single::RATE, f64::INFINITY).ends_with("is 1000000.0"));
        // The nearest usable value is usable, as it is written, and so is what every key may be.
        for limits in [Single::RATE, Single::FACTOR, Single::DECAY] {
            for value in [-1.0, 1e-310, 1e-50, 1e-39, 0.99999998, 1.0, 1e7, f64::INFINITY] {
                if let Err(message) = limits.check("key", value) {
                    let nearest: f64 = message.rsplit(' ').next().unwrap().parse().unwrap();
                    limits.check("key", nearest).unwrap();
                }
            }
            limits.check("key", 0.95).unwrap();
        }
        Single::RATE.check("key", 0.0).unwrap();
        Single::DECAY.check("key", 0.9999999).unwrap();
    }
}
