//! A Mixture-of-Experts layer as a problem: what comes out, forward and backward, on any number of in-process ranks of
//! any backend; and the same layer in f64.

use dropless_core::host::{Host, HostOptions};
use dropless_core::numerics::bf16;
use dropless_core::numerics::philox::philox4x32;
use dropless_core::numerics::reduce::tree;
use dropless_core::ops::{Cast, Fill, Score};
use dropless_core::{Backend, DType, Group, Memory, NumericModel, Result, Tensor};
use dropless_model::moe::{Moe, MoeExperts, MoePolicy, MoeSaved, Recipe, Router};
use dropless_model::nn::{Linear, LinearRecipe, Mlp, Tokens, Weight};

/// A layer and its input, on all ranks together.
#[derive(Clone, Debug)]
pub struct Problem {
    /// Sequences on all ranks.
    pub sequences: usize,
    /// Tokens of a sequence.
    pub sequence: usize,
    /// Gradient shards on all ranks.
    pub shards: usize,
    /// Expert shards on all ranks.
    pub expert_shards: usize,
    /// Hidden size.
    pub h: usize,
    /// Expert width.
    pub i: usize,
    /// Experts on all ranks.
    pub experts: usize,
    /// Experts of a token.
    pub k: usize,
    /// Expert groups.
    pub groups: usize,
    /// Groups that take part.
    pub top_groups: usize,
    /// Score function.
    pub score: Score,
    /// Factor of the weights.
    pub scale: f32,
    /// Coefficient of the auxiliary loss.
    pub balance: f32,
    /// Arithmetic of the expert products.
    pub recipe: Recipe,
    /// Arithmetic of the shared expert.
    pub linear_recipe: LinearRecipe,
    /// Arithmetic of the matrix units.
    pub numerics: NumericModel,
    /// Pieces.
    pub chunks: usize,
    /// With a shared expert.
    pub shared: bool,
    /// What becomes of activations.
    pub policy: MoePolicy,
    /// Threads of the host.
    pub threads: usize,
    /// The expert that every token chooses first, through its bias.
    pub favourite: Option<usize>,
    /// Factor of the gradient `dy`; 0 leaves the auxiliary loss alone.
    pub dy: f32,
    /// Selection bias.
    pub bias: Vec<f32>,
    /// Names the random numbers of the input.
    pub input: u32,
}

/// A small layer with everything in it.
pub fn problem() -> Problem {
    Problem {
        sequences: 4,
        sequence: 12,
        shards: 4,
        expert_shards: 1,
        h: 64,
        i: 32,
        experts: 8,
        k: 3,
        groups: 4,
        top_groups: 2,
        score: Score::Sigmoid,
        scale: 2.5,
        balance: 0.01,
        recipe: Recipe::Bf16,
        linear_recipe: LinearRecipe::Bf16,
        numerics: NumericModel::Hopper,
        chunks: 1,
        shared: true,
        policy: MoePolicy::default(),
        threads: 2,
        favourite: None,
        dy: 1.0,
        bias: vec![0.0; 8],
        input: 1,
    }
}

/// Everything that comes out, in global order, as bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// The result.
    pub y: Vec<f32>,
    /// Gradient of the input.
    pub dx: Vec<f32>,
    /// Gradient of the router, shards added.
    pub router: Vec<f32>,
    /// Gradients of the shared expert, shards added.
    pub shared: Vec<f32>,
    /// Gradients of the experts, expert shards added.
    pub gate_up: Vec<f32>,
    /// Gradients of the experts, expert shards added.
    pub down: Vec<f32>,
    /// Choices of each expert.
    pub counts: Vec<u32>,
    /// Chosen experts.
    pub ids: Vec<u32>,
    /// Auxiliary losses.
    pub balance: Vec<f32>,
}

impl Outcome {
    /// All of it as bits.
    pub fn bits(&self) -> Vec<u32> {
        let floats = [&self.y, &self.dx, &self.router, &self.shared, &self.gate_up, &self.down, &self.balance]
            .map(|v| v.as_slice());
        let mut bits: Vec<u32> = floats.concat().iter().map(|f| f.to_bits()).collect();
        bits.extend(&self.counts);
        bits.extend(&self.ids);
        bits
    }
}

/// Uniform in (-1, 1), by name and index.
pub fn random(name: u32, len: usize) -> Vec<f32> {
    (0..len)
        .map(|i| {
            let word = philox4x32([name, 7], [i as u32, 0, 0, 0])[0];
            (word >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Every value times a factor.
pub fn scaled(values: Vec<f32>, factor: f32) -> Vec<f32> {
    values.into_iter().map(|v| v * factor).collect()
}

/// A tensor holding these values, rounded to its type.
pub fn put(b: &dyn Backend, dtype: DType, shape: &[usize], values: &[f32]) -> Tensor {
    match dtype {
        DType::F32 => b.upload(dtype, shape, values).unwrap(),
        _ => {
            // Rounded there, so that a backend of a single op has something to do.
            let (x, out) =
                (b.upload(DType::F32, shape, values).unwrap(), b.alloc(dtype, shape, Memory::Device).unwrap());
            Cast { x: &x, out: &out }.run(b).unwrap();
            out
        }
    }
}

/// A tensor's values.
pub fn get(b: &dyn Backend, t: &Tensor) -> Vec<f32> {
    match t.dtype() {
        DType::F32 => b.download(t).unwrap(),
        _ => b.download::<u16>(t).unwrap().into_iter().map(bf16::to_f32).collect(),
    }
}

/// An f32 tensor of zeros.
pub fn zeros(b: &dyn Backend, shape: &[usize]) -> Tensor {
    let t = b.alloc(DType::F32, shape, Memory::Device).unwrap();
    Fill { out: &t, value: 0.0 }.run(b).unwrap();
    t
}

impl Problem {
    /// Tokens on all ranks.
    pub fn tokens(&self) -> usize {
        self.sequences * self.sequence
    }

    /// The layer's input.
    pub fn x(&self) -> Vec<f32> {
        random(self.input, self.tokens() * self.h)
    }

    fn router_weight(&self) -> Vec<f32> {
        let mut w = scaled(random(2, self.experts * self.h), 0.3);
        if let Some(favourite) = self.favourite {
            // Its score is one half for every token; the bias alone puts it first.
            w[favourite * self.h..(favourite + 1) * self.h].fill(0.0);
        }
        w
    }

    /// One rank's share of the layer.
    pub fn layer(&self, b: &dyn Backend) -> Moe {
        let caps = b.caps();
        let local = self.experts / caps.size(Group::Experts);
        let first = caps.place(Group::Experts) * local;
        let expert_shards = self.expert_shards / caps.size(Group::Replicas);
        let element = self.recipe.element();
        let shards = self.shards / caps.ranks;
        let mine = |name: u32, n: usize, k: usize, factor: f32| {
            let all = scaled(random(name, self.experts * n * k), factor);
            let part = &all[first * n * k..(first + local) * n * k];
            Weight { value: put(b, element, &[local, n, k], part), grad: Some(zeros(b, &[expert_shards, local, n, k])) }
        };
        let dense = |name: u32, n: usize, k: usize| {
            let value = put(b, element, &[1, n, k], &scaled(random(name, n * k), 0.2));
            Linear::new(Weight { value, grad: Some(zeros(b, &[shards, n, k])) }, self.linear_recipe)
        };
        let mut bias = self.bias.clone();
        if let Some(favourite) = self.favourite {
            bias[favourite] = 10.0;
        }
        Moe {
            router: Router {
                weight: Weight {
                    value: put(b, DType::F32, &[1, self.experts, self.h], &self.router_weight()),
                    grad: Some(zeros(b, &[shards, self.experts, self.h])),
                },
                bias: Some(put(b, DType::F32, &[self.experts], &bias)),
                score: self.score,
                top_k: self.k,
                groups: self.groups,
                top_groups: self.top_groups,
                normalize: true,
                scale: self.scale,
                balance: self.balance,
            },
            gate_up: mine(3, 2 * self.i, self.h, 0.2),
            down: mine(4, self.h, self.i, 0.2),
            recipe: self.recipe,
            shared: self.shared.then(|| Mlp { gate_up: dense(5, 2 * self.i, self.h), down: dense(6, self.h, self.i) }),
            chunks: self.chunks,
        }
    }

    /// The layer and its operands on one rank.
    pub fn operands(&self, b: &dyn Backend) -> Operands {
        let caps = b.caps();
        let sequences = self.sequences / caps.ranks;
        let tokens = Tokens::new(b, sequences, self.sequence, self.shards / caps.ranks).unwrap();
        let tokens = tokens.with_expert_shards(b, self.expert_shards).unwrap();
        let mut layer = self.layer(b);
        if let Some(shared) = &mut layer.shared {
            shared.prepare(b).unwrap();
        }
        let part = |all: Vec<f32>| {
            let n = all.len() / caps.ranks;
            put(b, self.recipe.element(), &[tokens.count(), self.h], &all[caps.rank * n..(caps.rank + 1) * n])
        };
        let (x, residual) = (part(self.x()), part(random(8, self.tokens() * self.h)));
        let dy = part(scaled(random(9, self.tokens() * self.h), self.dy));
        let counts = b.alloc(DType::U32, &[self.experts], Memory::Device).unwrap();
        let experts = layer.prepare(b).unwrap();
        let operands = Operands { layer, tokens, x, residual, dy, counts, experts, policy: self.policy };
        operands.clear(b);
        operands
    }

    /// Forward and backward on one rank.
    pub fn on_rank(&self, b: &dyn Backend) -> Outcome {
        let operands = self.operands(b);
        let results = operands.queue(b).unwrap();
        operands.outcome(b, &results)
    }
}

/// A layer and its operands on one rank.
#[derive(Debug)]
pub struct Operands {
    layer: Moe,
    tokens: Tokens,
    x: Tensor,
    residual: Tensor,
    dy: Tensor,
    counts: Tensor,
    experts: MoeExperts,
    policy: MoePolicy,
}

/// What a pass forward and backward makes, besides the gradients of the weights.
#[derive(Debug)]
pub struct Results {
    y: Tensor,
    dx: Tensor,
    ids: Tensor,
    balance: Option<Tensor>,
}

impl Operands {
    /// Replaces the input by that of another problem of the same shape, on one rank.
    pub fn set_input(&self, b: &dyn Backend, problem: &Problem) {
        let bytes: Vec<u8> = b.download(&put(b, self.x.dtype(), self.x.shape(), &problem.x())).unwrap();
        b.write(&self.x, &bytes).unwrap();
    }

    /// Sets to zero what a pass adds to.
    pub fn clear(&self, b: &dyn Backend) {
        let shared = self.layer.shared.iter().flat_map(|mlp| [&mlp.gate_up.weight, &mlp.down.weight]);
        let weights = [&self.layer.router.weight, &self.layer.gate_up, &self.layer.down];
        let grads = weights.into_iter().chain(shared).map(|w| w.grad().unwrap());
        for out in grads.chain([&self.counts]) {
            Fill { out, value: 0.0 }.run(b).unwrap();
        }
    }

    /// What the layer's formula says of its memory on this rank.
    pub fn working_bytes(&self, b: &dyn Backend) -> u64 {
        self.layer.working_bytes(b.caps().size(Group::Experts), &self.tokens)
    }

    /// Queues forward and backward.
    ///
    /// # Errors
    /// Those of the ops.
    pub fn queue(&self, b: &dyn Backend) -> Result<Results> {
        let Operands { layer, tokens, x, residual, dy, counts, experts, policy } = self;
        let mut saved = MoeSaved::default();
        let y = layer.forward(b, tokens, experts, x, None, Some(residual), counts, *policy, &mut saved)?;
        let (ids, balance) = (saved.choice()?.0.clone(), saved.balance_loss().cloned());
        let dx = layer.backward(b, tokens, experts, x, dy, saved)?;
        Ok(Results { y, dx, ids, balance })
    }

    /// Waits, and reads what came out.
    pub fn outcome(&self, b: &dyn Backend, results: &Results) -> Outcome {
        let Operands { layer, tokens, counts, .. } = self;
        let shared = layer.shared.as_ref().map_or(Vec::new(), |m| {
            // Parts of gate_up and of down, shard by shard.
            let (g, d) = (get(b, m.gate_up.weight.grad().unwrap()), get(b, m.down.weight.grad().unwrap()));
            let shards = tokens.shards();
            (0..shards)
                .flat_map(|s| {
                    let cut = |v: &[f32]| v[s * v.len() / shards..(s + 1) * v.len() / shards].to_vec();
                    [cut(&g), cut(&d)].concat()
                })
                .collect()
        });
        Outcome {
            y: get(b, &results.y),
            dx: get(b, &results.dx),
            router: get(b, layer.router.weight.grad().unwrap()),
            shared,
            gate_up: get(b, layer.gate_up.grad().unwrap()),
            down: get(b, layer.down.grad().unwrap()),
            counts: b.download(counts).unwrap(),
            ids: b.download(&results.ids).unwrap(),
            balance: results.balance.as_ref().map_or(Vec::new(), |t| b.download(t).unwrap()),
        }
    }
}

impl Problem {
    /// Forward and backward on in-process ranks of the host.
    pub fn run(&self, ranks: usize) -> Outcome {
        self.run_in_groups(ranks, ranks)
    }

    /// The same with `expert_ranks` ranks in an expert-parallel group.
    pub fn run_in_groups(&self, ranks: usize, expert_ranks: usize) -> Outcome {
        let (numerics, threads) = (self.numerics, self.threads);
        let options = HostOptions { numerics, threads, expert_ranks: Some(expert_ranks), ..HostOptions::default() };
        self.run_on(Host::ranks(ranks, options).unwrap())
    }

    /// Forward and backward on these ranks.
    pub fn run_on<B: Backend>(&self, ranks: Vec<B>) -> Outcome {
        let expert_ranks = ranks[0].caps().expert_ranks;
        let parts: Vec<Outcome> = std::thread::scope(|s| {
            let threads: Vec<_> = ranks.into_iter().map(|rank| s.spawn(move || self.on_rank(&rank))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        let cat = |f: fn(&Outcome) -> &Vec<f32>| -> Vec<f32> { parts.iter().flat_map(|p| f(p).clone()).collect() };
        let shards = |all: Vec<f32>| -> Vec<f32> {
            let n = all.len() / self.shards;
            (0..n).map(|i| tree(0, self.shards, &|s| Some(all[s * n + i])).unwrap()).collect()
        };
        let (local, owned) = (self.experts / expert_ranks, self.expert_shards * expert_ranks / parts.len());
        let experts = |f: fn(&Outcome) -> &Vec<f32>| -> Vec<f32> {
            let len = f(&parts[0]).len() / (owned * local);
            let value = |expert: usize, shard: usize, i: usize| {
                let rank = shard / owned * expert_ranks + expert / local;
                f(&parts[rank])[(shard % owned * local + expert % local) * len + i]
            };
            let sum = |at: usize| tree(0, self.expert_shards, &|shard| Some(value(at / len, shard, at % len))).unwrap();
            (0..self.experts * len).map(sum).collect()
        };
        let mut counts = vec![0; self.experts];
        for part in &parts {
            counts.iter_mut().zip(&part.counts).for_each(|(sum, c)| *sum += c);
        }
        Outcome {
            y: cat(|p| &p.y),
            dx: cat(|p| &p.dx),
            router: shards(cat(|p| &p.router)),
            shared: shards(cat(|p| &p.shared)),
            gate_up: experts(|p| &p.gate_up),
            down: experts(|p| &p.down),
            counts,
            ids: parts.iter().flat_map(|p| p.ids.clone()).collect(),
            balance: cat(|p| &p.balance),
        }
    }
}

/// The layer in f64: y, and the gradients of the router, of x and of the experts.
#[derive(Clone, Debug)]
pub struct Reference {
    /// The result.
    pub y: Vec<f64>,
    /// Gradient of the input.
    pub dx: Vec<f64>,
    /// Gradient of the router, shards added.
    pub router: Vec<f64>,
    /// Gradients of the experts.
    pub gate_up: Vec<f64>,
    /// Gradients of the experts.
    pub down: Vec<f64>,
}

/// Computes the layer in f64 for a given choice of experts (without the auxiliary loss).
pub fn reference(p: &Problem, ids: &[u32]) -> Reference {
    let wide = |v: Vec<f32>| -> Vec<f64> { v.into_iter().map(f64::from).collect() };
    let (t, h, i, e, k) = (p.tokens(), p.h, p.i, p.experts, p.k);
    let (x, residual) = (wide(p.x()), wide(random(8, t * h)));
    let dy = wide(scaled(random(9, t * h), p.dy));
    let router = wide(p.router_weight());
    let gate_up = wide(scaled(random(3, e * 2 * i * h), 0.2));
    let down = wide(scaled(random(4, e * h * i), 0.2));
    let shared = (wide(scaled(random(5, 2 * i * h), 0.2)), wide(scaled(random(6, h * i), 0.2)));
    let mut out = Reference {
        y: residual,
        dx: vec![0.0; t * h],
        router: vec![0.0; e * h],
        gate_up: vec![0.0; e * 2 * i * h],
        down: vec![0.0; e * h * i],
    };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for t in 0..t {
        let (x, dy) = (&x[t * h..(t + 1) * h], &dy[t * h..(t + 1) * h]);
        let chosen: Vec<usize> = ids[t * k..(t + 1) * k].iter().map(|&id| id as usize).collect();
        let scores: Vec<f64> = (0..e).map(|e| 1.0 / (1.0 + (-dot(&router[e * h..(e + 1) * h], x)).exp())).collect();
        let sum: f64 = chosen.iter().map(|&e| scores[e]).sum();
        let mut d_weight = vec![0.0; e];
        let mut expert = |w: f64, gu: &[f64], dn: &[f64], grads: Option<(&mut [f64], &mut [f64])>| -> f64 {
            let pre: Vec<f64> = (0..2 * i).map(|r| dot(&gu[r * h..(r + 1) * h], x)).collect();
            let sig: Vec<f64> = pre[..i].iter().map(|g| 1.0 / (1.0 + (-g).exp())).collect();
            let act: Vec<f64> = (0..i).map(|c| pre[c] * sig[c] * pre[i + c]).collect();
            let mut d_act = vec![0.0; i];
            for r in 0..h {
                out.y[t * h + r] += w * dot(&dn[r * i..(r + 1) * i], &act);
                (0..i).for_each(|c| d_act[c] += dy[r] * dn[r * i + c]);
            }
            let mut d_pre = vec![0.0; 2 * i];
            for c in 0..i {
                let silu = pre[c] * sig[c];
                d_pre[i + c] = w * d_act[c] * silu;
                d_pre[c] = w * d_act[c] * pre[i + c] * sig[c] * (1.0 + pre[c] * (1.0 - sig[c]));
            }
            for r in 0..2 * i {
                (0..h).for_each(|c| out.dx[t * h + c] += d_pre[r] * gu[r * h + c]);
            }
            if let Some((d_gu, d_dn)) = grads {
                (0..2 * i).for_each(|r| (0..h).for_each(|c| d_gu[r * h + c] += d_pre[r] * x[c]));
                (0..h).for_each(|r| (0..i).for_each(|c| d_dn[r * i + c] += dy[r] * w * act[c]));
            }
            dot(&d_act, &act)
        };
        for &e in &chosen {
            let w = f64::from(p.scale) * scores[e] / sum;
            let (g, d) = (e * 2 * i * h..(e + 1) * 2 * i * h, e * h * i..(e + 1) * h * i);
            let grads = (&mut out.gate_up[g.clone()], &mut out.down[d.clone()]);
            d_weight[e] = expert(w, &gate_up[g], &down[d], Some(grads));
        }
        if p.shared {
            expert(1.0, &shared.0, &shared.1, None);
        }
        let mean: f64 = chosen.iter().map(|&e| d_weight[e] * scores[e] / sum).sum();
        for &e in &chosen {
            let d_score = f64::from(p.scale) * (d_weight[e] - mean) / sum;
            let d_logit = d_score * scores[e] * (1.0 - scores[e]);
            (0..h).for_each(|c| out.router[e * h + c] += d_logit * x[c]);
            (0..h).for_each(|c| out.dx[t * h + c] += d_logit * router[e * h + c]);
        }
    }
    out
}

/// |a - b| / |b|, 2-norms.
pub fn distance(a: &[f32], b: &[f64]) -> f64 {
    let (mut d, mut n) = (0.0, 0.0);
    for (&a, &b) in a.iter().zip(b) {
        d += (f64::from(a) - b).powi(2);
        n += b * b;
    }
    assert_eq!(a.len(), b.len());
    (d / n).sqrt()
}
