//! The comparison of a model with what another framework computed for it.
//!
//! Each tensor is measured by the 2-norm of its error over the 2-norm of the reference, in f64. The bounds are those of
//! f32 arithmetic in another order: 1e-5 for logits and loss, 1e-4 for gradients, which pass through more sums. Everything
//! that the reference has is compared; what it does not have is listed.

use std::collections::BTreeMap;
use std::fmt;

use dropless_core::escape::escaped;
use dropless_model::hf::TensorFiles;
use dropless_model::words::count;

use crate::error::Result;
use crate::train::reference::{Computed, GRADIENT};

const OUTPUT_BOUND: f64 = 1e-5;
const GRADIENT_BOUND: f64 = 1e-4;
/// A gradient that is zero in exact arithmetic is rounding alone: at most so much of the norm of all gradients.
const ROUNDING: f64 = 1e-6;
/// The one tensor of a reference that is an input.
const INPUT: &str = "input_ids";

/// One tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct Row {
    /// Its name.
    pub name: String,
    /// What the comparison found.
    pub outcome: Outcome,
    /// The largest normalised error that passes.
    pub bound: f64,
}

/// What the comparison of a tensor found.
#[derive(Clone, Debug, PartialEq)]
pub enum Outcome {
    /// |error| / |reference|; NaN if there is a NaN.
    Error(f64),
    /// Why the two could not be compared, though the reference has the tensor.
    Unlike(String),
    /// Why there is nothing to compare.
    Nothing(&'static str),
}

impl Row {
    /// Whether the tensor is within its bound, or there is nothing to compare. A NaN is not.
    pub fn passed(&self) -> bool {
        match self.outcome {
            Outcome::Error(error) => error <= self.bound,
            Outcome::Unlike(_) => false,
            Outcome::Nothing(_) => true,
        }
    }
}

/// The comparison of all tensors, in the order of their names.
#[derive(Clone, Debug)]
pub struct Report {
    /// One row for each tensor on either side.
    pub rows: Vec<Row>,
}

impl Report {
    /// Compares what was computed with `expected`.
    ///
    /// # Errors
    /// Those of reading `expected`.
    pub fn compare(expected: &TensorFiles, computed: Computed) -> Result<Report> {
        let mut found: BTreeMap<String, Vec<f32>> = computed.tensors.into_iter().collect();
        let names = || expected.names().filter(|name| *name != INPUT);
        let mut squares = 0.0;
        for name in names().filter(|name| name.starts_with(GRADIENT)) {
            squares += norm(&expected.values(name, expected.shape(name)?)?).powi(2);
        }
        let rounding = ROUNDING * libm::sqrt(squares);
        let mut rows = Vec::new();
        for name in names() {
            let reference = expected.values(name, expected.shape(name)?)?;
            let outcome = match found.remove(name) {
                None if reference.is_empty() => Outcome::Nothing("has no elements"),
                None => Outcome::Unlike("not computed".into()),
                Some(found) if found.len() != reference.len() => {
                    Outcome::Unlike(format!("{} elements, expected {}", found.len(), reference.len()))
                }
                Some(found) if computed.zero.iter().any(|zero| zero == name) => {
                    match norm(&found).max(norm(&reference)) <= rounding {
                        true => {
                            Outcome::Nothing("zero but for rounding: a token's only weight is 1 whatever the logits")
                        }
                        false => Outcome::Error(normalised_error(&found, &reference)),
                    }
                }
                Some(found) => Outcome::Error(normalised_error(&found, &reference)),
            };
            rows.push(Row { name: name.to_owned(), outcome, bound: bound(name) });
        }
        let more = found.into_keys().map(|name| Row {
            bound: bound(&name),
            name,
            outcome: Outcome::Nothing("not in the reference"),
        });
        rows.extend(more);
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Report { rows })
    }

    /// Whether every tensor is within its bound, and there is one that was compared.
    pub fn passed(&self) -> bool {
        self.compared() > 0 && self.rows.iter().all(Row::passed)
    }

    /// How many tensors of the reference there are to compare.
    fn compared(&self) -> usize {
        self.rows.iter().filter(|row| !matches!(row.outcome, Outcome::Nothing(_))).count()
    }
}

fn bound(name: &str) -> f64 {
    if name.starts_with(GRADIENT) { GRADIENT_BOUND } else { OUTPUT_BOUND }
}

/// The 2-norm, in f64.
fn norm(x: &[f32]) -> f64 {
    libm::sqrt(x.iter().map(|&x| f64::from(x) * f64::from(x)).sum())
}

/// |found - reference| / |reference|; where the reference is all zero, 0 if so is `found` and infinite if not.
fn normalised_error(found: &[f32], reference: &[f32]) -> f64 {
    let square = |(&f, &r): (&f32, &f32)| (f64::from(f) - f64::from(r)) * (f64::from(f) - f64::from(r));
    let error = libm::sqrt(found.iter().zip(reference).map(square).sum());
    if error == 0.0 { 0.0 } else { error / norm(reference) }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<String> = self.rows.iter().map(|row| escaped(&row.name).to_string()).collect();
        let width = names.iter().map(String::len).max().unwrap_or(0);
        for (row, name) in self.rows.iter().zip(&names) {
            let verdict = if row.passed() { "ok" } else { "FAILED" };
            match &row.outcome {
                Outcome::Error(error) => {
                    writeln!(f, "{name:width$}  {error:.2e}  (at most {:.0e})  {verdict}", row.bound)?;
                }
                Outcome::Unlike(why) => writeln!(f, "{name:width$}  {why}  {verdict}")?,
                Outcome::Nothing(why) => writeln!(f, "{name:width$}  not compared: {why}")?,
            }
        }
        let failed = self.rows.iter().filter(|row| !row.passed()).count();
        write!(f, "{}, {failed} past the bound", count(self.compared(), "tensor"))?;
        match self.rows.len() - self.compared() {
            0 => Ok(()),
            others => write!(f, ", {others} not compared"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A reference with logits [3, 4] and a gradient [0, 0].
    fn reference() -> (tempfile::TempDir, TensorFiles) {
        let dir = tempfile::tempdir().unwrap();
        let header = r#"{"logits.f32":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
            "grad.w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]},
            "input_ids":{"dtype":"I64","shape":[1],"data_offsets":[16,24]}}"#;
        let data: Vec<u8> = [3f32, 4.0, 0.0, 0.0, 0.0, 0.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
        std::fs::write(dir.path().join("expected.safetensors"), bytes).unwrap();
        let files = TensorFiles::open(dir.path(), "expected").unwrap();
        (dir, files)
    }

    fn compare(logits: &[f32], gradient: &[f32]) -> Report {
        let (_dir, expected) = reference();
        Report::compare(&expected, computed(&[("logits.f32", logits), ("grad.w", gradient)])).unwrap()
    }

    fn computed(tensors: &[(&str, &[f32])]) -> Computed {
        let tensors = tensors.iter().map(|(name, values)| ((*name).to_owned(), values.to_vec())).collect();
        Computed { tensors, zero: Vec::new() }
    }

    #[test]
    fn equal_tensors_pass() {
        let report = compare(&[3.0, 4.0], &[0.0, 0.0]);
        assert!(report.passed());
        assert!(report.to_string().ends_with("2 tensors, 0 past the bound"));
    }

    #[test]
    fn the_error_is_that_of_the_whole_tensor() {
        let report = compare(&[3.0, 4.5], &[0.0, 0.0]);
        assert_eq!(report.rows[1].outcome, Outcome::Error(0.1));
        assert!(!report.passed());
        assert!(report.to_string().contains("logits.f32  1.00e-1  (at most 1e-5)  FAILED"));
    }

    #[test]
    fn errors_are_held_against_the_bound_of_their_kind() {
        assert!(compare(&[3.0, 4.0 + 4e-5], &[0.0, 0.0]).passed());
        assert!(!compare(&[3.0, 4.0 + 6e-5], &[0.0, 0.0]).passed());
    }

    #[test]
    fn nan_and_an_error_against_zero_fail() {
        assert!(!compare(&[3.0, f32::NAN], &[0.0, 0.0]).passed());
        assert!(!compare(&[3.0, 4.0], &[0.0, 1e-30]).passed());
    }

    #[test]
    fn a_tensor_of_the_reference_alone_fails_and_one_that_it_lacks_is_listed() {
        let (_dir, expected) = reference();
        let one_sided = computed(&[("logits.f32", &[3.0]), ("grad.x", &[0.0])]);
        let report = Report::compare(&expected, one_sided).unwrap();
        let outcomes: Vec<String> = report.rows.iter().map(|row| format!("{} {:?}", row.name, row.outcome)).collect();
        assert_eq!(
            outcomes,
            [
                "grad.w Unlike(\"not computed\")",
                "grad.x Nothing(\"not in the reference\")",
                "logits.f32 Unlike(\"1 elements, expected 2\")"
            ]
        );
        assert!(!report.passed());
        let more = computed(&[("logits.f32", &[3.0, 4.0]), ("grad.w", &[0.0, 0.0]), ("grad.x", &[1.0])]);
        let report = Report::compare(&expected, more).unwrap();
        assert!(report.passed());
        assert!(report.to_string().contains("grad.x      not compared: not in the reference"), "{report}");
        assert!(report.to_string().ends_with("2 tensors, 0 past the bound, 1 not compared"), "{report}");
    }

    #[test]
    fn with_nothing_to_compare_nothing_passes() {
        let dir = tempfile::tempdir().unwrap();
        let header = r#"{"grad.w":{"dtype":"F32","shape":[0,2],"data_offsets":[0,0]}}"#;
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
        std::fs::write(dir.path().join("expected.safetensors"), bytes).unwrap();
        let expected = TensorFiles::open(dir.path(), "expected").unwrap();
        let report = Report::compare(&expected, computed(&[("grad.x", &[1.0])])).unwrap();
        assert!(report.rows.iter().all(Row::passed) && !report.passed(), "{report}");
    }

    #[test]
    fn a_gradient_that_is_zero_in_exact_arithmetic_has_to_be_small_on_both_sides() {
        let dir = tempfile::tempdir().unwrap();
        let header = r#"{"grad.v":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},
            "grad.w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#;
        let data: Vec<u8> = [1f32, 1e-8].iter().flat_map(|x| x.to_le_bytes()).collect();
        let bytes = [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat();
        std::fs::write(dir.path().join("expected.safetensors"), bytes).unwrap();
        let expected = TensorFiles::open(dir.path(), "expected").unwrap();
        let passed = |w: f32, zero: &[&str]| {
            let zero = zero.iter().map(|name| (*name).to_owned()).collect();
            let all = Computed { zero, ..computed(&[("grad.v", &[1.0]), ("grad.w", &[w])]) };
            Report::compare(&expected, all).unwrap().passed()
        };
        assert!(passed(0.0, &["grad.w"]) && passed(-2e-8, &["grad.w"]));
        assert!(!passed(1e-3, &["grad.w"]));
        assert!(!passed(0.0, &[]));
    }
}
