//! The ops of a backend.

use std::convert::identity;
use std::io::Write;
use std::process::Command;
use std::time::{Duration, Instant};

use dropless_core::numerics::bf16;
use dropless_core::ops::{
    AdamW, Attention, AttentionForward, AttentionShape, BlockFormat, ColumnBlocks, GemmKind, GroupQuantize,
    GroupedGemm, Operand, RowBlocks,
};
use dropless_core::{Backend, DType, Memory, NumericModel, Result, Tensor};

use super::{medians, peer};
use crate::options::{BackendKind, TrainOptions};
use crate::system;
use dropless_model::init;

/// How long a sample takes at least.
const SAMPLE: Duration = Duration::from_millis(5);

/// Random data of a name, standard normal.
fn random(name: &str, len: usize) -> Vec<f32> {
    let mut values = vec![0.0; len];
    init::normal(0, name, 1.0, 0, &mut values);
    values
}

/// One machine under one numeric model.
pub(super) struct Bench<'a> {
    pub(super) backend: &'a dyn Backend,
    pub(super) out: &'a mut dyn Write,
}

/// Prints a line for each op of a backend.
///
/// # Errors
/// Those of the ops.
pub fn run(options: &TrainOptions, out: &mut dyn Write) -> crate::Result<()> {
    let threads = match options.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    };
    let machine = system::processor().unwrap_or_else(|| std::env::consts::ARCH.into());
    let commit = commit().unwrap_or_else(|| "commit unknown".into());
    let hopper = options.open_one(NumericModel::Hopper)?;
    let on = &hopper.caps().device;
    print(out, &format!("dropless {} ({commit}), {on}, {machine}", env!("CARGO_PKG_VERSION")));
    let mut bench = Bench { backend: &*hopper, out: &mut *out };
    for kind in [GemmKind::Forward, GemmKind::Dgrad, GemmKind::Wgrad] {
        bench.grouped_gemm(kind)?;
    }
    bench.quantize("mxfp8", BlockFormat::Mxfp8 { floor: false })?;
    bench.quantize("fp8 blocks", BlockFormat::Fp8Block { f32_scale: false })?;
    bench.attention()?;
    bench.adamw()?;
    if options.backend == BackendKind::Cuda {
        bench.production()?;
    }
    let f32 = options.open_one(NumericModel::F32)?;
    let mut bench = Bench { backend: &*f32, out };
    bench.f32_against_gemm(threads)?;
    Ok(())
}

/// A closed output ends the printing, not the measurement.
fn print(out: &mut dyn Write, line: &str) {
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// The commit of the sources that this program was built from, as far as they are still there.
fn commit() -> Option<String> {
    let git = Command::new("git").args(["-C", env!("CARGO_MANIFEST_DIR"), "describe", "--always", "--dirty"]).output();
    git.ok().filter(|git| git.status.success()).map(|git| String::from_utf8_lossy(&git.stdout).trim().to_owned())
}

/// `amount` a second, in 10^9.
fn giga(amount: usize, time: Duration) -> f64 {
    amount as f64 / time.as_secs_f64() / 1e9
}

impl Bench<'_> {
    pub(super) fn bf16(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        let codes: Vec<u16> = random(name, shape.iter().product()).into_iter().map(bf16::from_f32).collect();
        self.backend.upload(DType::Bf16, shape, &codes)
    }

    pub(super) fn f32(&self, name: &str, shape: &[usize]) -> Result<Tensor> {
        self.backend.upload(DType::F32, shape, &random(name, shape.iter().product()))
    }

    pub(super) fn empty(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.backend.alloc(dtype, shape, Memory::Device)
    }

    pub(super) fn time(&self, op: impl Fn() -> Result<()>) -> Result<Duration> {
        let run = |calls: u32| (0..calls).try_for_each(|_| op()).and_then(|()| self.backend.wait());
        // The first call may compile something.
        run(1)?;
        let started = Instant::now();
        run(1)?;
        let one = started.elapsed().max(Duration::from_micros(1));
        let calls = u32::try_from(SAMPLE.as_micros().div_ceil(one.as_micros())).expect("a few thousand");
        Ok(medians(&mut [&mut || run(calls)])?[0] / calls)
    }

    pub(super) fn line(&mut self, name: &str, time: Duration, rate: &str) {
        self.text(&format!("{name:44} {:9.3} ms  {rate}", time.as_secs_f64() * 1e3));
    }

    pub(super) fn text(&mut self, line: &str) {
        print(self.out, line);
    }

    /// Eight experts of unequal, partly empty loads.
    fn grouped_gemm(&mut self, kind: GemmKind) -> Result<()> {
        let (n, k) = (512, 512);
        let offsets = [0u32, 200, 200, 256, 300, 513, 640, 700, 1024];
        let (groups, rows) = (offsets.len() - 1, 1024);
        let product = kind.product(groups, rows, n, k);
        let [a, b] = product.sides.map(|side| side.shape());
        let (a, b) = (self.bf16("a", &a)?, self.bf16("b", &b)?);
        let out = self.empty(if product.ragged_chain() { DType::F32 } else { DType::Bf16 }, &product.out_shape())?;
        let offsets = self.backend.upload(DType::U32, &[groups + 1], &offsets)?;
        let (a, b) = (Operand::plain(&a), Operand::plain(&b));
        let op = GroupedGemm { kind, a, b, offsets: &offsets, out: &out, accumulate: false };
        let time = self.time(|| op.run(self.backend))?;
        let name = format!("grouped_gemm {kind:?} hopper bf16 {rows}x{n}x{k}");
        self.line(&name, time, &format!("{:.2} G multiply-adds/s", giga(rows * n * k, time)));
        Ok(())
    }

    fn f32_against_gemm(&mut self, threads: usize) -> Result<()> {
        const N: usize = 512;
        let (a, b) = (random("a", N * N), random("b", N * N));
        let (a_device, b_device) = (self.f32("a", &[N, N])?, self.f32("b", &[1, N, N])?);
        let out = self.empty(DType::F32, &[N, N])?;
        let offsets = self.backend.upload(DType::U32, &[2], &[0u32, 512])?;
        let (kind, a_operand, b_operand) = (GemmKind::Forward, Operand::plain(&a_device), Operand::plain(&b_device));
        let op = GroupedGemm { kind, a: a_operand, b: b_operand, offsets: &offsets, out: &out, accumulate: false };
        let mut theirs = vec![0.0; N * N];
        let times = medians(&mut [&mut || op.run(self.backend).and_then(|()| self.backend.wait()), &mut || {
            identity::<Result<()>>({
                peer::product(N, N, N, &a, &b, &mut theirs, threads);
                Ok(())
            })
        }])?;
        let rates = [giga(N * N * N, times[0]), giga(N * N * N, times[1])];
        let ratio = 100.0 * rates[0] / rates[1];
        self.line("grouped_gemm Forward f32 512x512x512", times[0], &format!("{:.2} G multiply-adds/s", rates[0]));
        let peer = format!("{:.2} G multiply-adds/s (dropless has {ratio:.0} % of it)", rates[1]);
        self.line("peer: the gemm crate, f32 512x512x512", times[1], &peer);
        Ok(())
    }

    fn quantize(&mut self, name: &str, format: BlockFormat) -> Result<()> {
        let (rows, cols, groups) = (2048, 1024, 4);
        let x = self.bf16("x", &[rows, cols])?;
        let offsets = self.backend.upload(DType::U32, &[groups + 1], &[0u32, 500, 500, 1500, 2048])?;
        let block = format.block();
        let padded = GroupQuantize::padded_rows(format, rows, groups);
        let scale = if matches!(format, BlockFormat::Mxfp8 { .. }) { DType::Ue8m0 } else { DType::F32 };
        // FP8 blocks store the column-wise result transposed.
        let columns = match format {
            BlockFormat::Fp8Block { .. } => [cols, padded],
            _ => [padded, cols],
        };
        let (row_codes, row_scales) =
            (self.empty(DType::E4m3, &[rows, cols])?, self.empty(scale, &[rows, cols / block])?);
        let (codes, scales) = (self.empty(DType::E4m3, &columns)?, self.empty(scale, &[padded / block, cols])?);
        let padded_offsets = self.empty(DType::U32, &[groups + 1])?;
        let op = GroupQuantize {
            x: &x,
            gather: None,
            offsets: Some(&offsets),
            format,
            square: false,
            row: Some(RowBlocks { codes: &row_codes, scales: &row_scales }),
            column: Some(ColumnBlocks { codes: &codes, scales: &scales, offsets: Some(&padded_offsets) }),
            amax: None,
        };
        let time = self.time(|| op.run(self.backend))?;
        let rate = format!("{:.2} G elements/s", giga(rows * cols, time));
        self.line(&format!("group_quantize {name}, both ways, {rows}x{cols}"), time, &rate);
        Ok(())
    }

    fn attention(&mut self) -> Result<()> {
        let shape =
            AttentionShape { batch: 2, sequence: 512, heads: 4, kv_heads: 4, qk_dim: 96, v_dim: 64, scale: 0.1 };
        let tokens = shape.batch * shape.sequence;
        let (qk, v) = (shape.heads * shape.qk_dim, shape.heads * shape.v_dim);
        let [q, k] = [self.bf16("q", &[tokens, qk])?, self.bf16("k", &[tokens, qk])?];
        let values = self.bf16("v", &[tokens, v])?;
        let (out, lse) = (self.empty(DType::Bf16, &[tokens, v])?, self.empty(DType::F32, &[tokens, shape.heads])?);
        let op = AttentionForward { q: &q, k: &k, v: &values, start: None, out: &out, lse: &lse, shape };
        let time = self.time(|| Attention::Forward(op).run(self.backend))?;
        // A row sees half the keys on average.
        let work = tokens * (shape.sequence + 1) / 2 * shape.heads * (shape.qk_dim + shape.v_dim);
        let rate = format!("{:.2} G multiply-adds/s", giga(work, time));
        self.line("attention forward hopper bf16 2x512, 4 heads", time, &rate);
        Ok(())
    }

    fn adamw(&mut self) -> Result<()> {
        let len = 1 << 20;
        let [grad, param] = [self.f32("grad", &[len])?, self.f32("param", &[len])?];
        let zeros = vec![0.0f32; len];
        let [m, v] =
            [self.backend.upload(DType::F32, &[len], &zeros)?, self.backend.upload(DType::F32, &[len], &zeros)?];
        let param_bf16 = self.empty(DType::Bf16, &[len])?;
        let clip = self.backend.upload(DType::F32, &[2], &[1.0f32, 1.0])?;
        let step = self.backend.upload(DType::F32, &[3], &[1e-3f32, 0.1, 0.05])?;
        let op = AdamW {
            grad: &grad,
            clip: &clip,
            step: &step,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: 0.1,
            param: &param,
            m: &m,
            v: &v,
            param_bf16: Some(&param_bf16),
        };
        let time = self.time(|| op.run(self.backend))?;
        self.line("adamw 2^20 parameters", time, &format!("{:.2} G parameters/s", giga(len, time)));
        Ok(())
    }
}
