//! Expert products at the sizes of published models, where a backend is fast enough for them.
//!
//! Rates count useful work only: 2 rows n k operations for a product, whatever the groups' sizes.

use dropless_core::ops::{GatherRows, GemmKind, GroupedGemm, Operand};
use dropless_core::{DType, Result, Tensor};

use super::ops::Bench;

/// The experts of a published model, on one rank.
struct Shape {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    tokens: usize,
}

const fn shape(
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    experts: usize,
    top_k: usize,
    tokens: usize,
) -> Shape {
    Shape { name, hidden, intermediate, experts, top_k, tokens }
}

const SHAPES: [Shape; 11] = [
    shape("olmoe", 2048, 1024, 64, 8, 16384),
    shape("qwen3-30b-8k", 2048, 768, 128, 8, 8192),
    shape("qwen3-30b", 2048, 768, 128, 8, 32768),
    shape("qwen3-235b", 4096, 1536, 128, 8, 8192),
    shape("dsv2-lite", 2048, 1408, 64, 6, 8192),
    shape("gpt-oss-120b", 2880, 2880, 128, 4, 16384),
    shape("glm-4.5-air", 4096, 1408, 128, 8, 8192),
    shape("mixtral-8x7b", 4096, 14336, 8, 2, 8192),
    shape("dsv3-ep32", 7168, 2048, 8, 1, 32768),
    shape("dsv3-8k", 7168, 2048, 64, 2, 8192),
    shape("sonic-7b", 1536, 256, 128, 8, 24576),
];

/// How tokens choose experts.
#[derive(Clone, Copy)]
enum Routing {
    Uniform,
    /// The expert in place i of a random order has a weight of 1 / i.
    Zipf,
}

impl Shape {
    /// Offsets of the experts' rows when every token draws distinct experts.
    fn offsets(&self, routing: Routing) -> Vec<u32> {
        let mut random = Draws(0);
        let weights = (1..=self.experts).map(|place| match routing {
            Routing::Uniform => 1.0,
            Routing::Zipf => 1.0 / place as f64,
        });
        let sums: Vec<f64> =
            weights.scan(0.0, |sum, weight| Some(*sum + weight).inspect(|&next| *sum = next)).collect();
        let mut order: Vec<usize> = (0..self.experts).collect();
        (1..self.experts).rev().for_each(|last| order.swap(last, random.below(last + 1)));
        let mut counts = vec![0u32; self.experts];
        for _ in 0..self.tokens {
            let mut chosen = Vec::with_capacity(self.top_k);
            while chosen.len() < self.top_k {
                let at = random.unit() * sums[self.experts - 1];
                let expert = order[sums.partition_point(|&sum| sum <= at).min(self.experts - 1)];
                if !chosen.contains(&expert) {
                    chosen.push(expert);
                    counts[expert] += 1;
                }
            }
        }
        std::iter::once(0)
            .chain(counts.into_iter().scan(0, |sum, count| {
                *sum += count;
                Some(*sum)
            }))
            .collect()
    }
}

/// Random numbers of a seed, block by block.
struct Draws(u64);

impl Draws {
    fn unit(&mut self) -> f64 {
        self.0 += 1;
        f64::from(dropless_model::init::block([7, 0], self.0)[0]) / 4_294_967_296.0
    }

    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "below `n`")]
    fn below(&mut self, n: usize) -> usize {
        (self.unit() * n as f64) as usize
    }
}

impl Bench<'_> {
    /// Products of experts, and attention, at production sizes.
    pub(super) fn production(&mut self) -> Result<()> {
        let data = self.plenty(1 << 31)?;
        for routing in [Routing::Uniform, Routing::Zipf] {
            for shape in &SHAPES {
                self.experts(shape, routing, &data)?;
            }
        }
        self.attention_shapes(&data)?;
        self.router()
    }

    /// DeepSeek-V3's router in f32, 8192 tokens in two gradient shards.
    fn router(&mut self) -> Result<()> {
        let (shards, rows, n, k) = (2, 8192, 256, 7168);
        let (x, dy, w) = (self.f32("x", &[rows, k])?, self.f32("dy", &[rows, n])?, self.f32("w", &[1, n, k])?);
        let whole = self.backend.upload(DType::U32, &[2], &[0u32, 8192])?;
        let halves = self.backend.upload(DType::U32, &[3], &[0u32, 4096, 8192])?;
        for (kind, a, b, offsets, out) in [
            (GemmKind::Forward, &x, &w, &whole, self.empty(DType::F32, &[rows, n])?),
            (GemmKind::Dgrad, &dy, &w, &whole, self.empty(DType::F32, &[rows, k])?),
            (GemmKind::Wgrad, &dy, &x, &halves, self.empty(DType::F32, &[shards, n, k])?),
        ] {
            let (a, b) = (Operand::plain(a), Operand::plain(b));
            let op = GroupedGemm { kind, a, b, offsets, out: &out, accumulate: false };
            let time = self.time(|| op.run(self.backend))?;
            let rate = format!("{:.1} TFLOP/s", 2e-12 * (rows * n * k) as f64 / time.as_secs_f64());
            self.line(&format!("router f32 {kind:?} 8192x256x7168"), time, &rate);
        }
        Ok(())
    }

    /// A bf16 tensor of `len` elements: 2^24 random ones, over and over in another order.
    pub(super) fn plenty(&self, len: usize) -> Result<Tensor> {
        const ROW: usize = 1 << 14;
        let (rows, all) = (1 << 10, len / ROW);
        let x = self.bf16("x", &[rows, ROW])?;
        let index: Vec<u32> =
            (0..all).map(|i| u32::try_from((i * 331 + i / rows) % rows).expect("below 2^10")).collect();
        let index = self.backend.upload(DType::U32, &[all], &index)?;
        let out = self.empty(DType::Bf16, &[all, ROW])?;
        GatherRows { x: &x, index: &index, out: &out }.run(self.backend)?;
        out.reshape(&[len])
    }

    fn experts(&mut self, shape: &Shape, routing: Routing, data: &Tensor) -> Result<()> {
        let (groups, rows) = (shape.experts, shape.tokens * shape.top_k);
        let offsets = self.backend.upload(DType::U32, &[groups + 1], &shape.offsets(routing))?;
        let random = |shape: &[usize]| data.slice(0, shape.iter().product())?.reshape(shape);
        let mut rates = Vec::new();
        for (n, k) in [(2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)] {
            for kind in [GemmKind::Forward, GemmKind::Dgrad, GemmKind::Wgrad] {
                let (x, dy, w) = (random(&[rows, k])?, random(&[rows, n])?, random(&[groups, n, k])?);
                let (a, b, out) = match kind {
                    GemmKind::Forward => (&x, &w, self.empty(DType::Bf16, &[rows, n])?),
                    GemmKind::Dgrad => (&dy, &w, self.empty(DType::Bf16, &[rows, k])?),
                    GemmKind::Wgrad => (&dy, &x, self.empty(DType::Bf16, &[groups, n, k])?),
                };
                let (a, b) = (Operand::plain(a), Operand::plain(b));
                let op = GroupedGemm { kind, a, b, offsets: &offsets, out: &out, accumulate: false };
                let time = self.time(|| op.run(self.backend))?;
                rates.push(format!("{:4.0}", 2e-12 * (rows * n * k) as f64 / time.as_secs_f64()));
            }
        }
        let routing = match routing {
            Routing::Uniform => "uniform",
            Routing::Zipf => "zipf",
        };
        self.text(&format!("experts {:14} {routing:8} TFLOP/s  {}", shape.name, rates.join(" ")));
        Ok(())
    }
}
