//! Tiles of the `F32` model: one fused multiply-add after the other along the chain. NUMERICS.md, "Matrix products".

use super::blocks::{Kernel, Left, Right};
use super::lanes::Lanes;
use crate::numerics::mma::Tensorcore;

/// f32 arithmetic.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fused;

impl Kernel for Fused {
    const STEP: usize = 1;
    const UNIT: Option<Tensorcore> = None;

    fn rows<V: Lanes>() -> usize {
        V::FUSED_ROWS
    }

    #[inline(always)]
    fn tile<V: Lanes, const R: usize>(
        self,
        lanes: V,
        left: Left<'_>,
        right: Right<'_>,
        c: &mut [f32],
        _exact: &dyn Fn(usize, usize, usize, f32) -> f32,
    ) {
        let width = 2 * V::N;
        let mut acc = [[lanes.splat(0.0); 2]; R];
        for (acc, c) in acc.iter_mut().zip(c.chunks_exact(width)) {
            *acc = [lanes.load(c), lanes.load(&c[V::N..])];
        }
        for (a, b) in left.values.as_chunks::<R>().0.iter().zip(right.values.chunks_exact(width)) {
            let b = [lanes.load(b), lanes.load(&b[V::N..])];
            for (acc, &a) in acc.iter_mut().zip(a) {
                let a = lanes.splat(a);
                *acc = [lanes.fma(a, b[0], acc[0]), lanes.fma(a, b[1], acc[1])];
            }
        }
        for (acc, c) in acc.into_iter().zip(c.chunks_exact_mut(width)) {
            lanes.store(acc[0], c);
            lanes.store(acc[1], &mut c[V::N..]);
        }
    }
}
