//! What only the CUDA backend promises: work that is recorded once and run again, and memory that comes back.

#![cfg(target_os = "linux")]
#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "tests may panic, and their numbers are small"
)]

use std::sync::{Mutex, MutexGuard, PoisonError};

use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::{AdamW, Add, Cast, Fill, GemmKind, GroupedGemm, Offload, Operand, SumSquares};
use dropless_core::{Backend, DType, Error, Memory, Queue, Tensor};
use dropless_cuda::{Cuda, CudaOptions};
use dropless_model::moe::{MoePolicy, Recipe};
use dropless_model::nn::{LinearRecipe, MlpPolicy, Policy};
use dropless_tests::differential::Random;
use dropless_tests::moe::{Problem, problem};
use dropless_tests::require::Need;

/// One rank, or None where there is no device and `DROPLESS_REQUIRE` does not name cuda.
fn open() -> Option<Cuda> {
    Need::Cuda.or_skip(Cuda::new(&CudaOptions::default()))
}

/// Held by a test that takes most of the device's memory.
fn much_memory() -> MutexGuard<'static, ()> {
    static TAKEN: Mutex<()> = Mutex::new(());
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
fn b141_a_layer_is_recorded_once_and_run_with_other_routing() {
    let Some(cuda) = open() else { return };
    for recipe in [Recipe::F32, Recipe::Bf16, Recipe::Mxfp8, Recipe::Fp8Block] {
        let base = Problem { recipe, ..problem() };
        let operands = base.operands(&cuda);
        // Kernels are loaded before the recording.
        operands.queue(&cuda).unwrap();
        let mut results = None;
        let mut graph = cuda
            .capture(|| {
                // A copy to the host or a wait would fail here.
                results = Some(operands.queue(&cuda)?);
                Ok(())
            })
            .unwrap();
        let results = results.unwrap();
        let mut routings = Vec::new();
        for input in [1, 21, 22, 23] {
            let problem = Problem { input, ..base.clone() };
            operands.set_input(&cuda, &problem);
            operands.clear(&cuda);
            let before = cuda.usage();
            graph.launch().unwrap();
            assert_eq!(cuda.usage(), before, "a launch takes no memory");
            let outcome = operands.outcome(&cuda, &results);
            let host = Host::new(HostOptions::default()).unwrap();
            assert_eq!(outcome.bits(), problem.on_rank(&host).bits(), "{recipe:?}, input {input}");
            routings.push(outcome.ids);
        }
        routings.dedup();
        assert_eq!(routings.len(), 4, "the inputs are routed alike");
    }
}

/// All tokens on one expert, a single token, pieces, offloaded and recomputed activations.
#[test]
fn layers_have_the_bits_of_the_host() {
    let Some(cuda) = open() else { return };
    let host = Host::new(HostOptions::default()).unwrap();
    let everything = |policy| {
        let mlp = MlpPolicy { gate_up: policy, hidden: policy };
        MoePolicy { dispatched: policy, experts: mlp, shared: mlp }
    };
    for recipe in [Recipe::F32, Recipe::Bf16, Recipe::Mxfp8, Recipe::Fp8Block] {
        let base = Problem { recipe, ..problem() };
        let one = Problem { sequences: 1, sequence: 1, shards: 1, ..base.clone() };
        let favourite = Problem { favourite: Some(7), k: 1, top_groups: 1, balance: 0.0, ..base.clone() };
        let problems = [
            ("one token", one),
            ("all tokens on one expert", favourite.clone()),
            ("pieces", Problem { chunks: 3, ..base.clone() }),
            ("all on one expert, in pieces", Problem { chunks: 3, ..favourite }),
            ("offloaded", Problem { policy: everything(Policy::Offload), ..base.clone() }),
            ("recomputed", Problem { policy: everything(Policy::Recompute), ..base.clone() }),
            ("a shared expert in mxfp8", Problem { linear_recipe: LinearRecipe::Mxfp8, ..base.clone() }),
            ("a shared expert in fp8 blocks", Problem { linear_recipe: LinearRecipe::Fp8Block, ..base }),
        ];
        for (what, problem) in problems {
            assert_eq!(problem.on_rank(&cuda).bits(), problem.on_rank(&host).bits(), "{recipe:?}, {what}");
        }
    }
}

#[test]
fn memory_of_the_caller_cannot_be_recorded() {
    let Some(cuda) = open() else { return };
    let x = (&cuda as &dyn Backend).upload(DType::F32, &[1], &[1f32]).unwrap();
    for recorded in [cuda.capture(|| cuda.write(&x, &[0; 4])), cuda.capture(|| cuda.read(&x, &mut [0; 4]))] {
        let error = recorded.unwrap_err().to_string();
        assert!(error.ends_with("memory of the host cannot be read or written while work is recorded"), "{error}");
    }
    // What was not recorded leaves the backend as it was.
    Fill { out: &x, value: 2.0 }.run(&cuda).unwrap();
    assert_eq!((&cuda as &dyn Backend).download::<f32>(&x).unwrap(), [2.0]);
}

#[test]
fn steps_of_one_shape_take_no_new_memory() {
    let Some(cuda) = open() else { return };
    let base = problem();
    let operands = base.operands(&cuda);
    operands.queue(&cuda).unwrap();
    let before = cuda.usage();
    for _ in 0..3 {
        operands.queue(&cuda).unwrap();
        assert_eq!(cuda.usage(), before);
    }
}

#[test]
fn memory_that_is_not_there_is_an_error_and_not_the_end() {
    let Some(cuda) = open() else { return };
    let _memory = much_memory();
    let available = usize::try_from(cuda.caps().max_buffer_bytes).unwrap();
    for bytes in [usize::MAX, available + 1, available] {
        match cuda.alloc(DType::E4m3, &[bytes], Memory::Device) {
            Err(Error::Capacity { needed, .. }) => assert_eq!(needed, bytes as u64),
            other => panic!("{other:?}"),
        }
    }
    // What other tensors left is used before memory is refused.
    let half = available / 2;
    for _ in 0..3 {
        let x = cuda.alloc(DType::E4m3, &[half], Memory::Device).unwrap();
        let filled = cuda.alloc(DType::F32, &[4, half / 64], Memory::Device).unwrap();
        Fill { out: &filled, value: 1.0 }.run(&cuda).unwrap();
        drop(x);
        drop(cuda.alloc(DType::E4m3, &[half + half / 4], Memory::Device).unwrap());
    }
    cuda.wait().unwrap();
}

#[test]
fn memory_of_the_host_that_a_graph_uses_is_its_own() {
    let Some(cuda) = open() else { return };
    let backend: &dyn Backend = &cuda;
    let x = backend.upload(DType::F32, &[64], &[1f32; 64]).unwrap();
    let mut graph = cuda
        .capture(|| {
            let saved = cuda.alloc(DType::F32, &[64], Memory::Host)?;
            cuda.wait_for(Queue::Offload, &cuda.record(Queue::Compute)?)?;
            Offload { from: &x, to: &saved }.run(&cuda)
        })
        .unwrap();
    let mine = cuda.alloc(DType::F32, &[64], Memory::Host).unwrap();
    cuda.write(&mine, &[0; 256]).unwrap();
    graph.launch().unwrap();
    cuda.wait().unwrap();
    assert_eq!(backend.download::<f32>(&mine).unwrap(), [0f32; 64]);
}

#[test]
fn f30_a_graph_owns_what_it_was_given() {
    let Some(cuda) = open() else { return };
    let backend: &dyn Backend = &cuda;
    let x = backend.upload(DType::F32, &[64], &[1f32; 64]).unwrap();
    let y = backend.upload(DType::F32, &[64], &[0f32; 64]).unwrap();
    let mut graph = cuda.capture(|| Add { a: &x, b: &x, c: None, out: &y }.run(&cuda)).unwrap();
    drop(x);
    // What comes next must not be given the memory that the graph reads.
    let others: Vec<_> = (0..4).map(|_| backend.upload(DType::F32, &[64], &[7f32; 64]).unwrap()).collect();
    graph.launch().unwrap();
    assert_eq!(backend.download::<f32>(&y).unwrap(), [2f32; 64]);
    drop((others, y));
    let others: Vec<_> = (0..4).map(|_| backend.upload(DType::F32, &[64], &[7f32; 64]).unwrap()).collect();
    graph.launch().unwrap();
    for other in &others {
        assert_eq!(backend.download::<f32>(other).unwrap(), [7f32; 64]);
    }
}

#[test]
fn a_graph_that_needs_more_memory_than_there_is_says_so() {
    let Some(cuda) = open() else { return };
    let _memory = much_memory();
    let half = usize::try_from(cuda.caps().max_buffer_bytes).unwrap() / 2;
    // What is kept outside is given up for a recording.
    drop(cuda.alloc(DType::E4m3, &[half], Memory::Device).unwrap());
    let more = || cuda.alloc(DType::E4m3, &[half + half / 4], Memory::Device);
    drop(cuda.capture(|| more().map(drop)).unwrap());
    let recorded = cuda.capture(|| {
        let _first = more()?;
        more().map(drop)
    });
    assert!(matches!(recorded, Err(Error::Capacity { .. })), "{recorded:?}");
    cuda.wait().unwrap();
}

#[test]
fn elements_past_32_bits_are_worked_on() {
    let Some(cuda) = open() else { return };
    let _memory = much_memory();
    let backend: &dyn Backend = &cuda;
    let len = (1 << 32) + 12;
    let filled = |dtype, value| -> Tensor {
        let x = cuda.alloc(dtype, &[len], Memory::Device).unwrap();
        Fill { out: &x, value }.run(&cuda).unwrap();
        x
    };
    // Around each edge of a launch, and at both ends.
    let looked_at = |x: &Tensor| -> Vec<Vec<u8>> {
        let edges = [0, (1 << 31) - 4, (1 << 32) - 4, len - 8];
        let part = |from: usize| backend.download(&x.slice(from, from + 8).unwrap()).unwrap();
        edges.map(part).to_vec()
    };
    let one = [0x80, 0x3F].repeat(8);
    let x = filled(DType::Bf16, 1.0);
    assert_eq!(looked_at(&x), vec![one.clone(); 4]);
    let half = cuda.alloc(DType::Bf16, &[len], Memory::Device).unwrap();
    Cast { x: &x, out: &half }.run(&cuda).unwrap();
    assert_eq!(looked_at(&half), vec![one; 4]);
    drop(x);
    // Without a gradient only the decay is left: 1 - 0.5 * (1 * 1).
    let [grad, m, v] = [(); 3].map(|()| filled(DType::F32, 0.0));
    let param = filled(DType::F32, 1.0);
    let clip = backend.upload(DType::F32, &[2], &[0f32, 1.0]).unwrap();
    let step = backend.upload(DType::F32, &[3], &[0.5f32, 1.0, 1.0]).unwrap();
    let (beta1, beta2, eps, decay) = (0.5, 0.5, 1.0, 1.0);
    AdamW {
        grad: &grad,
        clip: &clip,
        step: &step,
        beta1,
        beta2,
        eps,
        decay,
        param: &param,
        m: &m,
        v: &v,
        param_bf16: Some(&half),
    }
    .run(&cuda)
    .unwrap();
    assert_eq!(looked_at(&param), vec![0.5f32.to_le_bytes().repeat(8); 4]);
    assert_eq!(looked_at(&half), vec![[0x00, 0x3F].repeat(8); 4]);
    // Other ops take rows and columns.
    let error = SumSquares { x: &half, out: &clip.slice(0, 1).unwrap() }.run(&cuda).unwrap_err().to_string();
    assert!(error.ends_with("expected less than 2^32 rows, and as many columns"), "{error}");
}

#[test]
fn b142_kernels_may_be_loaded_while_work_is_recorded() {
    let Some(cuda) = open() else { return };
    let base = problem();
    let operands = base.operands(&cuda);
    let mut results = None;
    let recorded = cuda.capture(|| {
        results = Some(operands.queue(&cuda)?);
        Ok(())
    });
    let host = Host::new(HostOptions::default()).unwrap();
    let expected = base.on_rank(&host).bits();
    match recorded {
        Ok(mut graph) => {
            graph.launch().unwrap();
            assert_eq!(operands.outcome(&cuda, &results.unwrap()).bits(), expected);
        }
        Err(error) => assert!(matches!(error, Error::Device { .. }), "{error}"),
    }
    assert_eq!(base.on_rank(&cuda).bits(), expected, "what follows is as ever");
}

#[test]
fn b035_scales_of_any_number_of_blocks_and_none_beside_them() {
    let Some(cuda) = open() else { return };
    let backend: &dyn Backend = &cuda;
    let (blocks, rows, n) = (5, 128, 128);
    let k = blocks * 128;
    let ones = |shape: &[usize]| backend.upload(DType::E4m3, shape, &vec![0x38u8; shape.iter().product()]).unwrap();
    // NaN before and after the scales.
    let powers: Vec<f32> = (0..blocks as u32).map(|block| (1u32 << block) as f32).collect();
    let mut scales = vec![f32::NAN; (rows + 2) * blocks];
    scales[blocks..(rows + 1) * blocks].copy_from_slice(&powers.repeat(rows));
    let a_scales = backend.upload(DType::F32, &[rows + 2, blocks], &scales).unwrap().slice(1, rows + 1).unwrap();
    let mut scales = vec![f32::NAN; 3 * blocks];
    scales[blocks..2 * blocks].fill(1.0);
    let b_scales = backend.upload(DType::F32, &[3, 1, blocks], &scales).unwrap().slice(1, 2).unwrap();
    let (a, b) = (ones(&[rows, k]), ones(&[1, n, k]));
    let offsets = backend.upload(DType::U32, &[2], &[0u32, rows as u32]).unwrap();
    let out = backend.alloc(DType::F32, &[rows, n], Memory::Device).unwrap();
    GroupedGemm {
        kind: GemmKind::Forward,
        a: Operand::Fp8Block { codes: &a, scale_inv: &a_scales, gather: None },
        b: Operand::Fp8Block { codes: &b, scale_inv: &b_scales, gather: None },
        offsets: &offsets,
        out: &out,
        accumulate: false,
    }
    .run(backend)
    .unwrap();
    assert!(backend.download::<f32>(&out).unwrap().iter().all(|&y| y == 3968.0));
}

#[test]
fn b202_a_view_is_offloaded_after_what_wrote_it() {
    let Some(cuda) = open() else { return };
    let backend: &dyn Backend = &cuda;
    let (rows, cols) = (512, 1 << 16);
    let x = backend.alloc(DType::F32, &[rows, cols], Memory::Device).unwrap();
    let view = x.slice(rows / 2, rows).unwrap();
    for round in 1..20u8 {
        // The last of these is the one that counts.
        for value in [0.0, -1.0, f32::from(round)] {
            Fill { out: &x, value }.run(backend).unwrap();
        }
        let host = backend.alloc(DType::F32, view.shape(), Memory::Host).unwrap();
        backend.wait_for(Queue::Offload, &backend.record(Queue::Compute).unwrap()).unwrap();
        Offload { from: &view, to: &host }.run(backend).unwrap();
        backend.wait_for(Queue::Compute, &backend.record(Queue::Offload).unwrap()).unwrap();
        let back = backend.download::<f32>(&host).unwrap();
        assert!(back.iter().all(|&v| v == f32::from(round)), "round {round}");
    }
}

/// Memory changes hands between streams while copies are under way.
#[test]
fn b203_memory_is_used_again_only_when_its_copy_is_done() {
    let Some(cuda) = open() else { return };
    let backend: &dyn Backend = &cuda;
    let n = 1 << 22;
    let mut kept = Vec::new();
    for round in 0..8u8 {
        let x = backend.alloc(DType::F32, &[n], Memory::Device).unwrap();
        Fill { out: &x, value: f32::from(round) }.run(backend).unwrap();
        let host = backend.alloc(DType::F32, &[n], Memory::Host).unwrap();
        backend.wait_for(Queue::Offload, &backend.record(Queue::Compute).unwrap()).unwrap();
        Offload { from: &x, to: &host }.run(backend).unwrap();
        kept.push(host);
        // x is free here, and the next round gets its memory.
    }
    for (round, host) in (0..8u8).zip(&kept) {
        let x = backend.alloc(DType::F32, &[n], Memory::Device).unwrap();
        Offload { from: host, to: &x }.run(backend).unwrap();
        backend.wait_for(Queue::Compute, &backend.record(Queue::Offload).unwrap()).unwrap();
        assert!(backend.download::<f32>(&x).unwrap().iter().all(|&v| v == f32::from(round)), "round {round}");
    }
}

/// Outputs of one product of fresh operands: chains of `steps` instructions.
fn products(b: &dyn Backend, dtype: DType, k: usize, a: &[u8], w: &[u8]) -> Vec<u32> {
    let rows = a.len() / dtype.size() / k;
    let n = w.len() / dtype.size() / k;
    let offsets = b.upload(DType::U32, &[2], &[0, rows as u32]).unwrap();
    let (a, w) = (b.upload(dtype, &[rows, k], a).unwrap(), b.upload(dtype, &[1, n, k], w).unwrap());
    let ones = |shape: &[usize]| {
        let ones = b.alloc(DType::F32, shape, Memory::Device).unwrap();
        Fill { out: &ones, value: 1.0 }.run(b).unwrap();
        ones
    };
    let (a_scale, w_scale) = (ones(&[rows, k.div_ceil(128)]), ones(&[1, n.div_ceil(128), k.div_ceil(128)]));
    let [a, w] = match dtype {
        DType::Bf16 => [Operand::plain(&a), Operand::plain(&w)],
        _ => [
            Operand::Fp8Block { codes: &a, scale_inv: &a_scale, gather: None },
            Operand::Fp8Block { codes: &w, scale_inv: &w_scale, gather: None },
        ],
    };
    let out = b.alloc(DType::F32, &[rows, n], Memory::Device).unwrap();
    GroupedGemm { kind: GemmKind::Forward, a, b: w, offsets: &offsets, out: &out, accumulate: false }.run(b).unwrap();
    // Any NaN equals any other.
    let canonical = |x: f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    b.download(&out).unwrap().into_iter().map(canonical).collect()
}

/// The tensor cores against the model of them, on operands that nobody has seen before.
#[test]
fn tensor_cores_follow_the_model_on_fresh_operands() {
    let Some(cuda) = open() else { return };
    let host = Host::new(HostOptions::default()).unwrap();
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = now.as_nanos() as u64;
    println!("seed {seed}");
    let mut random = Random(seed);
    let mut outputs = 0;
    for k in [16, 32, 64, 128] {
        // Exponents this far around 1; the last: any bits at all.
        for spread in [0, 2, 8, 30, 127] {
            let mut bf16 = |len: usize| -> Vec<u8> {
                let mut code = |_| {
                    let exponent = 127 - spread + random.below(2 * spread + 1 + usize::from(spread == 127));
                    (random.bits() as u16 & 0x807F | (exponent as u16) << 7).to_le_bytes()
                };
                (0..len).flat_map(&mut code).collect()
            };
            let (a, w) = (bf16(512 * k), bf16(256 * k));
            let got = products(&cuda, DType::Bf16, k, &a, &w);
            assert!(got == products(&host, DType::Bf16, k, &a, &w), "bf16, k {k}, spread {spread}, seed {seed}");
            outputs += got.len();
        }
        for nans in [false, true] {
            let mut e4m3 = |len: usize| -> Vec<u8> {
                let code = |bits: u32| if !nans && bits & 0x7F == 0x7F { 0x80 } else { bits as u8 };
                (0..len).map(|_| code(random.bits() & 0xFF)).collect()
            };
            let (a, w) = (e4m3(512 * k), e4m3(256 * k));
            let got = products(&cuda, DType::E4m3, k, &a, &w);
            assert!(got == products(&host, DType::E4m3, k, &a, &w), "e4m3, k {k}, seed {seed}");
            outputs += got.len();
        }
    }
    println!("{outputs} outputs, 0 mismatches");
}
