//! The `gemm` crate's f32 product, the peer of the host's f32 model.

/// `out = a b^T` for row-major a `[m, k]`, b `[n, k]`, out `[m, n]`.
pub(super) fn product(m: usize, n: usize, k: usize, a: &[f32], b: &[f32], out: &mut [f32], threads: usize) {
    let covers = |x: &[f32], rows: usize, columns: usize| rows.checked_mul(columns) == Some(x.len());
    assert!(covers(a, m, k) && covers(b, n, k) && covers(out, m, n), "lengths");
    let stride = |x: usize| isize::try_from(x).unwrap_or(isize::MAX);
    let parallelism = if threads == 1 { gemm::Parallelism::None } else { gemm::Parallelism::Rayon(threads) };
    // SAFETY: the three slices have the lengths that the extents and strides reach (asserted above), `out` is borrowed
    // mutably and so overlaps neither factor, and f32 is one of the types that gemm takes.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            stride(n),
            false,
            a.as_ptr(),
            1,
            stride(k),
            b.as_ptr(),
            stride(k),
            1,
            0.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_peer_computes_a_product_with_the_transpose() {
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.0, 0.0, 0.0, 0.0, 1.0, 1.0]);
        let mut out = [0.0; 4];
        super::product(2, 2, 3, &a, &b, &mut out, 1);
        assert_eq!(out, [1.0, 5.0, 4.0, 11.0]);
    }
}
