//! Random rows, one run on every kind of host, and comparison under an a-priori bound.

pub(super) use crate::differential::Random;
use dropless_core::host::{Host, HostOptions, Simd};
use dropless_core::numerics::bf16;
use dropless_core::{Backend, DType, Tensor};

/// The float types.
pub(super) const FLOATS: [DType; 2] = [DType::F32, DType::Bf16];

/// Unit roundoff of f32.
pub(super) const U: f64 = 1.0 / (1u64 << 24) as f64;

/// Unit roundoff of bf16.
const U_BF16: f64 = 1.0 / 256.0;

/// What memory that nothing may touch holds.
pub(super) const GUARD: f32 = -987.0;

/// `x` as `dtype` holds it.
pub(super) fn rounded(dtype: DType, x: f32) -> f32 {
    if dtype == DType::Bf16 { bf16::round(x) } else { x }
}

/// One host for each number of threads and each level of vector instructions.
pub(super) fn hosts() -> Vec<Host> {
    let host = |threads, simd| Host::new(HostOptions { threads, simd: Some(simd), ..HostOptions::default() }).unwrap();
    let levels = Simd::ALL.into_iter().filter(|simd| simd.available());
    std::iter::once(host(1, Simd::Plain)).chain(levels.map(|simd| host(2, simd))).collect()
}

/// The results of `run`, which must have the same bits on every kind of host.
pub(super) fn everywhere(run: impl Fn(&dyn Backend) -> Vec<Vec<f32>>) -> Vec<Vec<f32>> {
    let bits = |results: &[Vec<f32>]| -> Vec<Vec<u32>> {
        let canonical = |x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
        results.iter().map(|result| result.iter().map(canonical).collect()).collect()
    };
    let hosts = hosts();
    let first = run(&hosts[0]);
    for host in &hosts[1..] {
        assert!(bits(&run(host)) == bits(&first), "{:?} differs from one thread of plain code", host.simd());
    }
    first
}

/// A tensor of a float type.
pub(super) fn floats(backend: &dyn Backend, dtype: DType, shape: &[usize], values: &[f32]) -> Tensor {
    assert_eq!(shape.iter().product::<usize>(), values.len());
    if dtype == DType::Bf16 {
        let codes: Vec<u16> = values.iter().map(|&x| bf16::from_f32(x)).collect();
        backend.upload(dtype, shape, &codes).unwrap()
    } else {
        backend.upload(dtype, shape, values).unwrap()
    }
}

/// A tensor of integers.
pub(super) fn integers(backend: &dyn Backend, shape: &[usize], values: &[u32]) -> Tensor {
    backend.upload(DType::U32, shape, values).unwrap()
}

/// An output that starts with the guard value in every element.
pub(super) fn guarded(backend: &dyn Backend, dtype: DType, shape: &[usize]) -> Tensor {
    floats(backend, dtype, shape, &vec![rounded(dtype, GUARD); shape.iter().product()])
}

/// The elements of a float tensor.
pub(super) fn read(backend: &dyn Backend, tensor: &Tensor) -> Vec<f32> {
    if tensor.dtype() == DType::Bf16 {
        backend.download::<u16>(tensor).unwrap().into_iter().map(bf16::to_f32).collect()
    } else {
        backend.download(tensor).unwrap()
    }
}

/// Every element of `got`, stored as `dtype`, lies within its bound of the exact value; `want` holds (value, bound).
pub(super) fn close(dtype: DType, got: &[f32], want: &[(f64, f64)]) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &(want, bound))) in got.iter().zip(want).enumerate() {
        let rounding = if dtype == DType::Bf16 { U_BF16 * (want.abs() + bound) } else { 0.0 };
        let bound = bound + rounding + f64::from(f32::MIN_POSITIVE);
        let error = (f64::from(got) - want).abs();
        assert!(error <= bound, "element {i}: {got:e} instead of {want:e}, off by {error:e} (bound {bound:e})");
    }
}

/// The gradient of `f` at `x` by central differences; for f and x of magnitude about 1, exact to 1e-7.
pub(super) fn gradient(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const STEP: f64 = 1e-4;
    let mut at = x.to_vec();
    (0..x.len())
        .map(|i| {
            at[i] = x[i] + STEP;
            let above = f(&at);
            at[i] = x[i] - STEP;
            let below = f(&at);
            at[i] = x[i];
            (above - below) / (2.0 * STEP)
        })
        .collect()
}

/// What [`gradient`] may be off by.
pub(super) const DIFFERENCES: f64 = 1e-7;

pub(super) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

/// The longest chain of additions in a row reduction.
pub(super) fn row_depth(len: usize) -> f64 {
    (len.div_ceil(256) * 8 + 5) as f64
}

/// The longest chain of additions in a quad sum.
pub(super) fn quad_depth(len: usize) -> f64 {
    (len.min(256).div_ceil(8) * 2 + 2 + len.div_ceil(256)) as f64
}

/// The longest chain of additions in a token sum.
pub(super) fn token_depth(len: usize) -> f64 {
    (128 + len.div_ceil(128)) as f64
}

/// The text of the error that an op must give.
pub(super) fn refusal<T: std::fmt::Debug>(result: dropless_core::Result<T>) -> String {
    result.unwrap_err().to_string()
}

#[test]
#[should_panic(expected = "differs from one thread of plain code")]
fn a_result_that_depends_on_the_host_is_noticed() {
    let runs = std::cell::Cell::new(1.0f32);
    everywhere(|_| {
        runs.set(runs.get().next_up());
        vec![vec![runs.get()]]
    });
}

#[test]
#[should_panic(expected = "element 1")]
fn a_nan_is_never_close() {
    close(DType::Bf16, &[1.0, f32::NAN], &[(1.0, 0.0), (1.0, f64::INFINITY)]);
}
