//! The speed of the grouped product: `cargo run --release -p dropless-wgpu --example grouped_gemm_speed -- rows n k`.

use std::time::Instant;

use dropless_core::numerics::bf16;
use dropless_core::ops::{GemmKind, GroupedGemm, Operand};
use dropless_core::{Backend, DType, Memory, NumericModel, Result};
use dropless_wgpu::{Wgpu, WgpuOptions};

/// Values of ordinary size: what a product of zeros costs says nothing.
fn values(len: usize) -> Vec<u16> {
    let mut state = 1u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(state >> 16).expect("16 bits")) / 32768.0 - 1.0
    };
    (0..len).map(|_| bf16::from_f32(next())).collect()
}

fn main() -> Result<()> {
    let sizes: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let [rows, n, k] = if let [rows, n, k] = sizes[..] { [rows, n, k] } else { [256, 512, 512] };
    for numerics in [NumericModel::Hopper, NumericModel::F32] {
        let wgpu = Wgpu::new(&WgpuOptions { numerics, ..WgpuOptions::default() })?;
        let backend: &dyn Backend = &wgpu;
        let offsets = backend.upload(DType::U32, &[2], &[0, u32::try_from(rows).unwrap_or(u32::MAX)])?;
        for kind in [GemmKind::Forward, GemmKind::Dgrad, GemmKind::Wgrad] {
            let (a, b, out): (Vec<usize>, Vec<usize>, Vec<usize>) = match kind {
                GemmKind::Forward => (vec![rows, k], vec![1, n, k], vec![rows, n]),
                GemmKind::Dgrad => (vec![rows, n], vec![1, n, k], vec![rows, k]),
                GemmKind::Wgrad => (vec![rows, n], vec![rows, k], vec![1, n, k]),
            };
            let put = |shape: &[usize]| backend.upload(DType::Bf16, shape, &values(shape.iter().product()));
            let (a, b) = (put(&a)?, put(&b)?);
            let out = backend.alloc(DType::F32, &out, Memory::Device)?;
            let run = || {
                let start = Instant::now();
                let (a, b) = (Operand::plain(&a), Operand::plain(&b));
                GroupedGemm { kind, a, b, offsets: &offsets, out: &out, accumulate: false }.run(backend)?;
                backend.wait().map(|()| start.elapsed().as_secs_f64())
            };
            let first = run()?;
            let mut times = [run()?, run()?, run()?];
            times.sort_by(f64::total_cmp);
            let rate = (rows * n * k) as f64 / times[1] / 1e9;
            println!(
                "{} {numerics:?} {kind:?} {rows}x{n}x{k}: {:.1} ms, {rate:.3} G multiply-adds/s (first run {:.0} ms)",
                wgpu.adapter(),
                times[1] * 1e3,
                first * 1e3
            );
        }
    }
    Ok(())
}
