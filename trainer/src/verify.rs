//! The comparison of a model with what another framework computed for it.
//!
//! Each tensor is measured by the 2-norm of its error over the 2-norm of the reference, in f64. The bounds are those of
//! f32 arithmetic in another order: 1e-5 for logits and loss, 1e-4 for gradients, which pass through more sums.

use std::collections::BTreeMap;
use std::fmt;

use crate::error::Result;
use dropless_model::hf::TensorFiles;

const OUTPUT_BOUND: f64 = 1e-5;
const GRADIENT_BOUND: f64 = 1e-4;
const GRADIENT: &str = "grad.";
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
    /// Why the two could not be compared.
    Unlike(String),
}

impl Row {
    /// Whether the tensor is within its bound. A NaN is not.
    pub fn passed(&self) -> bool {
        matches!(self.outcome, Outcome::Error(error) if error <= self.bound)
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
    pub fn compare(expected: &TensorFiles, computed: impl IntoIterator<Item = (String, Vec<f32>)>) -> Result<Report> {
        let mut computed: BTreeMap<String, Vec<f32>> = computed.into_iter().collect();
        let mut rows = Vec::new();
        for name in expected.names().filter(|name| *name != INPUT) {
            let reference = expected.values(name, expected.shape(name)?)?;
            let outcome = match computed.remove(name) {
                None => Outcome::Unlike("not computed".into()),
                Some(found) if found.len() != reference.len() => {
                    Outcome::Unlike(format!("{} elements, expected {}", found.len(), reference.len()))
                }
                Some(found) => Outcome::Error(normalised_error(&found, &reference)),
            };
            rows.push(Row { name: name.to_owned(), outcome, bound: bound(name) });
        }
        let unexpected = |name: String| {
            let outcome = Outcome::Unlike("not in the reference".into());
            Row { bound: bound(&name), name, outcome }
        };
        rows.extend(computed.into_keys().map(unexpected));
        rows.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(Report { rows })
    }

    /// Whether every tensor is within its bound, and there is one.
    pub fn passed(&self) -> bool {
        !self.rows.is_empty() && self.rows.iter().all(Row::passed)
    }
}

fn bound(name: &str) -> f64 {
    if name.starts_with(GRADIENT) { GRADIENT_BOUND } else { OUTPUT_BOUND }
}

/// |found - reference| / |reference|; where the reference is all zero, 0 if so is `found` and infinite if not.
fn normalised_error(found: &[f32], reference: &[f32]) -> f64 {
    let norm = |squares: &mut dyn Iterator<Item = f64>| libm::sqrt(squares.sum());
    let square = |x: f64| x * x;
    let error = norm(&mut found.iter().zip(reference).map(|(&f, &r)| square(f64::from(f) - f64::from(r))));
    let size = norm(&mut reference.iter().map(|&r| square(f64::from(r))));
    if error == 0.0 { 0.0 } else { error / size }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.name.len()).max().unwrap_or(0);
        for row in &self.rows {
            let verdict = if row.passed() { "ok" } else { "FAILED" };
            match &row.outcome {
                Outcome::Error(error) => {
                    writeln!(f, "{:width$}  {error:.2e}  (at most {:.0e})  {verdict}", row.name, row.bound)?;
                }
                Outcome::Unlike(why) => writeln!(f, "{:width$}  {why}  {verdict}", row.name)?,
            }
        }
        let failed = self.rows.iter().filter(|row| !row.passed()).count();
        write!(f, "{} tensors, {failed} past the bound", self.rows.len())
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
        let computed = [("logits.f32".to_owned(), logits.to_vec()), ("grad.w".to_owned(), gradient.to_vec())];
        Report::compare(&expected, computed).unwrap()
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
    fn tensors_of_one_side_only_fail() {
        let (_dir, expected) = reference();
        let one = |name: &str, values: &[f32]| (name.to_owned(), values.to_vec());
        let report = Report::compare(&expected, [one("logits.f32", &[3.0]), one("grad.x", &[0.0])]).unwrap();
        let outcomes: Vec<String> = report.rows.iter().map(|row| format!("{} {:?}", row.name, row.outcome)).collect();
        assert_eq!(
            outcomes,
            [
                "grad.w Unlike(\"not computed\")",
                "grad.x Unlike(\"not in the reference\")",
                "logits.f32 Unlike(\"1 elements, expected 2\")"
            ]
        );
        assert!(!report.passed());
    }
}
