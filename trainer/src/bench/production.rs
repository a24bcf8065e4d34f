//! Expert products at the sizes of published models, where a backend is fast enough for them.
//!
//! Rates count useful work only: 2 rows n k operations for a product, whatever the groups' sizes.

use dropless_core::ops::{
    BlockFormat, ColumnBlocks, GatherRows, GemmKind, GroupQuantize, GroupedGemm, Operand, RowBlocks,
};
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

impl std::fmt::Display for Routing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            Routing::Uniform => "uniform",
            Routing::Zipf => "zipf",
        })
    }
}

impl Shape {
    /// Outputs and inputs of gate with up, and of down.
    fn layers(&self) -> [[usize; 2]; 2] {
        [[2 * self.intermediate, self.hidden], [self.hidden, self.intermediate]]
    }

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
            for shape in &SHAPES {
                self.quantized_experts(shape, routing, &data)?;
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
        for [n, k] in shape.layers() {
            for kind in KINDS {
                let (x, dy, w) = (random(&[rows, k])?, random(&[rows, n])?, random(&[groups, n, k])?);
                let (a, b) = match kind {
                    GemmKind::Forward => (&x, &w),
                    GemmKind::Dgrad => (&dy, &w),
                    GemmKind::Wgrad => (&dy, &x),
                };
                let product = kind.product(groups, rows, n, k);
                let out = self.empty(DType::Bf16, &product.out_shape())?;
                let (a, b) = (Operand::plain(a), Operand::plain(b));
                rates.push(
                    self.rate(GroupedGemm { kind, a, b, offsets: &offsets, out: &out, accumulate: false }, rows)?,
                );
            }
        }
        self.text(&format!("experts {:14} {routing:8} TFLOP/s  {}", shape.name, rates.join(" ")));
        Ok(())
    }

    /// The same with factors in FP8 blocks, and the speed at which these are made, both ways from one reading.
    fn quantized_experts(&mut self, shape: &Shape, routing: Routing, data: &Tensor) -> Result<()> {
        let (groups, rows) = (shape.experts, shape.tokens * shape.top_k);
        let offsets = self.backend.upload(DType::U32, &[groups + 1], &shape.offsets(routing))?;
        let random = |shape: &[usize]| data.slice(0, shape.iter().product())?.reshape(shape);
        let (mut rates, mut speeds) = (Vec::new(), Vec::new());
        for [n, k] in shape.layers() {
            let [x, dy] = [k, n].map(|columns| -> Result<Blocks> {
                let blocks = self.empty_blocks(rows, columns, groups)?;
                let x = random(&[rows, columns])?;
                let time = self.time(|| blocks.of_rows(&x, &offsets).run(self.backend))?;
                // Two bytes are read, and two codes written.
                speeds.push(format!("{:5.0}", 1e-9 * (4 * rows * columns) as f64 / time.as_secs_f64()));
                Ok(blocks)
            });
            let (x, dy, w) = (x?, dy?, self.empty_squares(groups, n, k)?);
            w.of_squares(&random(&[groups, n, k])?).run(self.backend)?;
            for kind in KINDS {
                let (a, b, offsets) = match kind {
                    GemmKind::Forward => (x.along_columns(), w.along_columns(), &offsets),
                    GemmKind::Dgrad => (dy.along_columns(), w.along_rows(), &offsets),
                    GemmKind::Wgrad => (dy.along_rows(), x.along_rows(), &x.offsets),
                };
                let product = kind.product(groups, rows, n, k);
                let out = self.empty(DType::Bf16, &product.out_shape())?;
                rates.push(self.rate(GroupedGemm { kind, a, b, offsets, out: &out, accumulate: false }, rows)?);
            }
        }
        let (rates, speeds) = (rates.join(" "), speeds.join(" "));
        self.text(&format!("fp8-block {:12} {routing:8} TFLOP/s  {rates}  quantized at GB/s  {speeds}", shape.name));
        Ok(())
    }

    /// TFLOP/s of a product over so many rows.
    fn rate(&self, op: GroupedGemm<'_>, rows: usize) -> Result<String> {
        let time = self.time(|| op.run(self.backend))?;
        let product = op.product();
        let each = if product.ragged_chain() { product.m * product.n } else { product.n * product.k };
        Ok(format!("{:4.0}", 2e-12 * (rows * each) as f64 / time.as_secs_f64()))
    }

    fn empty_blocks(&self, rows: usize, columns: usize, groups: usize) -> Result<Blocks> {
        let padded = GroupQuantize::padded_rows(FP8, rows, groups);
        Ok(Blocks {
            row: [self.empty(DType::E4m3, &[rows, columns])?, self.empty(DType::F32, &[rows, columns.div_ceil(128)])?],
            column: [self.empty(DType::E4m3, &[columns, padded])?, self.empty(DType::F32, &[padded / 128, columns])?],
            offsets: self.empty(DType::U32, &[groups + 1])?,
        })
    }

    fn empty_squares(&self, groups: usize, n: usize, k: usize) -> Result<Blocks> {
        let [down, across] = [n, k].map(|extent| extent.div_ceil(128));
        Ok(Blocks {
            row: [self.empty(DType::E4m3, &[groups, n, k])?, self.empty(DType::F32, &[groups, down, across])?],
            column: [self.empty(DType::E4m3, &[groups, k, n])?, self.empty(DType::F32, &[groups, across, down])?],
            offsets: self.empty(DType::U32, &[groups + 1])?,
        })
    }
}

const KINDS: [GemmKind; 3] = [GemmKind::Forward, GemmKind::Dgrad, GemmKind::Wgrad];
const FP8: BlockFormat = BlockFormat::Fp8Block { f32_scale: false };

/// Codes and inverse scales of FP8 blocks along the columns and along the rows of each group, with the offsets of the
/// latter.
struct Blocks {
    row: [Tensor; 2],
    column: [Tensor; 2],
    offsets: Tensor,
}

impl Blocks {
    fn of_rows<'a>(&'a self, x: &'a Tensor, offsets: &'a Tensor) -> GroupQuantize<'a> {
        let column = self.columns(Some(&self.offsets));
        GroupQuantize { offsets: Some(offsets), square: false, column, ..self.of_squares(x) }
    }

    fn of_squares<'a>(&'a self, x: &'a Tensor) -> GroupQuantize<'a> {
        let [codes, scales] = &self.row;
        GroupQuantize {
            x,
            gather: None,
            offsets: None,
            format: FP8,
            square: true,
            row: Some(RowBlocks { codes, scales }),
            column: self.columns(None),
            amax: None,
        }
    }

    fn columns<'a>(&'a self, offsets: Option<&'a Tensor>) -> Option<ColumnBlocks<'a>> {
        let [codes, scales] = &self.column;
        Some(ColumnBlocks { codes, scales, offsets })
    }

    fn along_columns(&self) -> Operand<'_> {
        let [codes, scale_inv] = &self.row;
        Operand::Fp8Block { codes, scale_inv, gather: None }
    }

    fn along_rows(&self) -> Operand<'_> {
        let [codes, scale_inv] = &self.column;
        Operand::Fp8Block { codes, scale_inv, gather: None }
    }
}

#[cfg(test)]
mod tests {
    use dropless_core::host::{Host, HostOptions};

    use super::*;

    #[test]
    fn experts_are_timed_in_bf16_and_in_fp8_blocks() {
        let host = Host::new(HostOptions::default()).expect("the host is always there");
        let mut lines = Vec::new();
        let mut bench = Bench { backend: &host, out: &mut lines };
        let data = bench.plenty(1 << 24).unwrap();
        let tiny = shape("tiny", 136, 40, 3, 2, 9);
        bench.experts(&tiny, Routing::Uniform, &data).unwrap();
        bench.quantized_experts(&tiny, Routing::Zipf, &data).unwrap();
        let lines = String::from_utf8(lines).unwrap();
        let rates: Vec<usize> = lines.lines().map(|line| line.split_whitespace().count()).collect();
        // A name, a shape, a routing, a unit and six rates; and what quantizes four factors.
        assert_eq!(rates, [10, 17], "{lines}");
    }
}
