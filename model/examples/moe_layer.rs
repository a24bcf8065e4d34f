//! The dropless Mixture-of-Experts layer alone, forward and backward, on the host. Any other backend gives the same bits.
//!
//! `cargo run -p dropless-model --example moe_layer`

use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::{Fill, Score};
use dropless_core::{Backend, DType, Memory, Result, Tensor};
use dropless_model::moe::{Moe, MoePolicy, MoeSaved, Recipe, Router};
use dropless_model::nn::{Tokens, Weight};

const TOKENS: usize = 64;
const HIDDEN: usize = 32;
const WIDTH: usize = 16;
const EXPERTS: usize = 8;
const TOP_K: usize = 2;

/// Numbers in [-1, 1) that look random.
fn values(name: u32, shape: &[usize], backend: &dyn Backend) -> Result<Tensor> {
    let number =
        |i: u32| (i.wrapping_mul(2_654_435_761) ^ name.wrapping_mul(40_503)) as i32 as f32 / (1u32 << 31) as f32;
    let values: Vec<f32> = (0u32..).map(number).take(shape.iter().product()).collect();
    backend.upload(DType::F32, shape, &values)
}

/// A weight with room for its gradient, which has one part: the tokens are one shard.
fn weight(name: u32, shape: [usize; 3], grad: &[usize], backend: &dyn Backend) -> Result<Weight> {
    let grad = backend.alloc(DType::F32, grad, Memory::Device)?;
    Fill { out: &grad, value: 0.0 }.run(backend)?;
    Ok(Weight { value: values(name, &shape, backend)?, grad: Some(grad) })
}

fn main() -> Result<()> {
    let host = Host::new(HostOptions::default())?;
    let backend: &dyn Backend = &host;
    let router = Router::new(weight(1, [1, EXPERTS, HIDDEN], &[1, EXPERTS, HIDDEN], backend)?, Score::Softmax, TOP_K);
    let gate_up = weight(2, [EXPERTS, 2 * WIDTH, HIDDEN], &[1, EXPERTS, 2 * WIDTH, HIDDEN], backend)?;
    let down = weight(3, [EXPERTS, HIDDEN, WIDTH], &[1, EXPERTS, HIDDEN, WIDTH], backend)?;
    let layer = Moe::new(router, gate_up, down, Recipe::F32);
    let tokens = Tokens::new(backend, 1, TOKENS, 1)?;
    let (x, dy) = (values(4, &[TOKENS, HIDDEN], backend)?, values(5, &[TOKENS, HIDDEN], backend)?);
    let counts = backend.alloc(DType::U32, &[EXPERTS], Memory::Device)?;
    Fill { out: &counts, value: 0.0 }.run(backend)?;

    let (experts, mut saved) = (layer.prepare(backend)?, MoeSaved::default());
    let policy = MoePolicy::default();
    let y = layer.forward(backend, &tokens, &experts, &x, None, None, &counts, policy, &mut saved)?;
    let dx = layer.backward(backend, &tokens, &experts, &x, &dy, saved)?;

    let norm = |t: &Tensor| Ok::<f32, dropless_core::Error>(backend.download::<f32>(t)?.iter().map(|v| v * v).sum());
    println!("tokens of each expert {:?}", backend.download::<u32>(&counts)?);
    println!("|y|^2 {:.4}, |dx|^2 {:.4}, |d gate_up|^2 {:.4}", norm(&y)?, norm(&dx)?, norm(layer.gate_up.grad()?)?);
    Ok(())
}
