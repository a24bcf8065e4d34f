//! The comparison of what two backends computed, bit by bit.

use std::fmt::Write;

use dropless_core::DType;
use dropless_core::numerics::bf16;

use super::maker::unwritten;

/// How many of the elements that differ are shown.
const SHOWN: usize = 8;

/// What the ops of one problem left on one backend.
#[derive(Debug)]
pub struct Outcome {
    /// Its name.
    pub backend: &'static str,
    /// The ops in words.
    pub ops: Vec<String>,
    /// What they wrote, rank by rank.
    pub outputs: Vec<Output>,
}

/// A tensor after the ops.
#[derive(Debug)]
pub struct Output {
    /// Its name in the problem.
    pub name: &'static str,
    /// Whose it is.
    pub rank: usize,
    /// The type of its elements.
    pub dtype: DType,
    /// Its extents.
    pub shape: Vec<usize>,
    /// Its elements.
    pub values: Vec<u8>,
    /// Whether the elements around it are what they were.
    pub guarded: bool,
}

/// Succeeds when both backends left the same bits. They must be two, so that nothing is compared with itself.
///
/// # Errors
/// What differs, for a person to act on.
#[expect(clippy::needless_pass_by_value, reason = "nobody can hand in one outcome twice")]
pub fn compare(want: Outcome, got: Outcome) -> Result<(), String> {
    if want.backend == got.backend {
        return Err(format!("{} was compared with itself", got.backend));
    }
    if want.outputs.is_empty() || want.outputs.len() != got.outputs.len() {
        return Err(format!("{} and {} outputs cannot be compared", want.outputs.len(), got.outputs.len()));
    }
    let mut report = String::new();
    for (want, got) in want.outputs.iter().zip(&got.outputs) {
        differences(&mut report, want, got);
    }
    if report.is_empty() {
        return Ok(());
    }
    Err(format!("{} differs from {}\n{report}  in {}", got.backend, want.backend, want.ops.join("\n  then ")))
}

fn differences(report: &mut String, want: &Output, got: &Output) {
    let Output { name, rank, dtype, shape, .. } = got;
    let what = format!("{name} ({dtype:?}{shape:?} of rank {rank})");
    if (want.dtype, &want.shape) != (*dtype, shape) {
        let _ = writeln!(report, "  {what} should be {:?}{:?}", want.dtype, want.shape);
        return;
    }
    for output in [want, got].into_iter().filter(|output| !output.guarded) {
        let whose = if std::ptr::eq(output, want) { " by the reference" } else { "" };
        let _ = writeln!(report, "  {what}: words around it were written{whose}");
    }
    let size = dtype.size();
    let pairs = want.values.chunks(size).zip(got.values.chunks(size));
    let wrong: Vec<_> = pairs.enumerate().filter(|(_, (want, got))| !same(*dtype, want, got)).collect();
    if !wrong.is_empty() {
        let _ = writeln!(report, "  {what}: {} of {} elements differ", wrong.len(), got.values.len() / size);
    }
    for (i, (want, got)) in wrong.into_iter().take(SHOWN) {
        let (want, got) = (show(*dtype, want), show(*dtype, got));
        let _ = writeln!(report, "    at {:?}: {got}, not {want}", index(i, shape));
    }
}

/// Equal bits, or two NaN; but an element that only one of them wrote differs.
fn same(dtype: DType, want: &[u8], got: &[u8]) -> bool {
    let written_nan = |bits: &[u8]| number(dtype, bits).is_some_and(f32::is_nan) && bits != unwritten(dtype);
    want == got || written_nan(want) && written_nan(got)
}

/// The value of an element whose type has more than one NaN.
fn number(dtype: DType, bits: &[u8]) -> Option<f32> {
    match dtype {
        DType::F32 => Some(f32::from_le_bytes(bits.try_into().unwrap())),
        DType::Bf16 => Some(bf16::to_f32(u16::from_le_bytes(bits.try_into().unwrap()))),
        _ => None,
    }
}

fn show(dtype: DType, bits: &[u8]) -> String {
    let hex: String = bits.iter().rev().map(|byte| format!("{byte:02x}")).collect();
    match number(dtype, bits) {
        _ if bits == unwritten(dtype) => format!("{hex} (not written)"),
        Some(value) => format!("{hex} ({value:e})"),
        None => hex,
    }
}

/// The place of element `i` in a tensor: (row, column) of a matrix.
fn index(mut i: usize, shape: &[usize]) -> Vec<usize> {
    let mut index: Vec<usize> = shape
        .iter()
        .rev()
        .map(|&extent| {
            let place = i % extent;
            i /= extent;
            place
        })
        .collect();
    index.reverse();
    index
}

#[cfg(test)]
mod tests {
    use super::{Outcome, Output, compare};
    use dropless_core::DType;

    fn outcome(backend: &'static str, values: &[u32]) -> Outcome {
        let values = bytemuck::cast_slice(values).to_vec();
        let output = Output { name: "out", rank: 0, dtype: DType::F32, shape: vec![2, 2], values, guarded: true };
        Outcome { backend, ops: vec!["Op".into()], outputs: vec![output] }
    }

    #[test]
    fn a_backend_is_not_compared_with_itself() {
        let error = compare(outcome("host", &[0; 4]), outcome("host", &[0; 4])).unwrap_err();
        assert_eq!(error, "host was compared with itself");
    }

    #[test]
    fn any_nan_equals_any_nan_but_what_was_not_written() {
        let [quiet, negative, unwritten] = [0x7FC0_0000, 0xFFC0_0001, 0xFFA5_A5A5];
        compare(outcome("host", &[quiet; 4]), outcome("wgpu", &[negative; 4])).unwrap();
        compare(outcome("host", &[unwritten; 4]), outcome("wgpu", &[unwritten; 4])).unwrap();
        compare(outcome("host", &[quiet; 4]), outcome("wgpu", &[unwritten; 4])).unwrap_err();
        compare(outcome("host", &[0; 4]), outcome("wgpu", &[quiet; 4])).unwrap_err();
    }

    #[test]
    fn the_report_names_places_and_bits() {
        let one = 1f32.to_bits();
        let error = compare(outcome("host", &[one; 4]), outcome("wgpu", &[one, one, one ^ 1, one])).unwrap_err();
        let what = "out (F32[2, 2] of rank 0): 1 of 4 elements differ";
        let place = "at [1, 0]: 3f800001 (1.0000001e0), not 3f800000 (1e0)";
        assert_eq!(error, format!("wgpu differs from host\n  {what}\n    {place}\n  in Op"));
    }

    #[test]
    fn words_around_an_output_are_guarded() {
        let mut got = outcome("wgpu", &[0; 4]);
        got.outputs[0].guarded = false;
        assert!(compare(outcome("host", &[0; 4]), got).unwrap_err().contains("words around it were written"));
    }
}
