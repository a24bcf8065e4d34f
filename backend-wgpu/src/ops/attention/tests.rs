//! Attention in many pieces. One piece is compared with the host in tests/attention.rs.

use dropless_core::numerics::bf16;
use dropless_core::ops::{AttentionBackward, AttentionForward};
use dropless_core::{Backend, Memory};

use super::*;
use crate::{Wgpu, WgpuOptions};

fn shape(batch: usize, sequence: usize, heads: usize, kv_heads: usize) -> AttentionShape {
    AttentionShape { batch, sequence, heads, kv_heads, qk_dim: 20, v_dim: 12, scale: 0.25 }
}

/// Every result's bits.
fn results(wgpu: &Wgpu, scratch: usize, shape: AttentionShape, dtype: DType) -> Vec<Vec<u8>> {
    let backend: &dyn Backend = wgpu;
    let tokens = shape.batch * shape.sequence;
    let mut state = 1u32;
    let mut values = |columns: usize| {
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 22) as f32 - 2.0
        };
        let values: Vec<f32> = (0..tokens * columns).map(|_| next()).collect();
        match dtype {
            DType::F32 => backend.upload(dtype, &[tokens, columns], &values),
            _ => {
                let codes: Vec<u16> = values.into_iter().map(bf16::from_f32).collect();
                backend.upload(dtype, &[tokens, columns], &codes)
            }
        }
        .unwrap()
    };
    let (q, k) = (values(shape.heads * shape.qk_dim), values(shape.kv_heads * shape.qk_dim));
    let (v, d_out) = (values(shape.kv_heads * shape.v_dim), values(shape.heads * shape.v_dim));
    let [out, d_q, d_k, d_v] =
        [&d_out, &q, &k, &v].map(|like| backend.alloc(dtype, like.shape(), Memory::Device).unwrap());
    let lse = backend.alloc(DType::F32, &[tokens, shape.heads], Memory::Device).unwrap();
    let starts: Vec<u32> = (0..tokens).map(|t| if t % shape.sequence < 150 { 0 } else { 75 }).collect();
    let start = backend.upload(DType::U32, &[tokens], &starts).unwrap();
    let (start, model) = (Some(&start), wgpu.caps().numerics);
    let forward = AttentionForward { q: &q, k: &k, v: &v, start, out: &out, lse: &lse, shape };
    let checked = Attention::Forward(forward).check(wgpu.caps()).unwrap();
    run_within(scratch, wgpu.stream(), &checked, model).unwrap();
    let backward = AttentionBackward {
        q: &q,
        k: &k,
        v: &v,
        start,
        out: &out,
        lse: &lse,
        d_out: &d_out,
        d_q: &d_q,
        d_k: &d_k,
        d_v: &d_v,
        shape,
    };
    let checked = Attention::Backward(backward).check(wgpu.caps()).unwrap();
    run_within(scratch, wgpu.stream(), &checked, model).unwrap();
    [out, lse, d_q, d_k, d_v].iter().map(|x| backend.download(x).unwrap()).collect()
}

#[test]
fn pieces_change_no_bit() {
    for numerics in [NumericModel::Hopper, NumericModel::F32] {
        let options = WgpuOptions { numerics, ..WgpuOptions::default() };
        let Some(wgpu) = crate::test_backend(&options) else { return };
        for (dtype, shape) in [(DType::Bf16, shape(2, 300, 4, 2)), (DType::F32, shape(3, 130, 2, 2))] {
            let one = results(&wgpu, SCRATCH, shape, dtype);
            // Blocks of 64 rows; a pair at a time; two pairs at a time.
            let pair = padded(shape.sequence) * (4 * padded(shape.sequence) + 32);
            for scratch in [1, pair, 2 * pair] {
                assert!(results(&wgpu, scratch, shape, dtype) == one, "{dtype:?} in {scratch} words");
            }
        }
    }
}
