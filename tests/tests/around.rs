//! Backends around backends: metering, lockstep and fallback, nested, around a toy that has memory and one op.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use dropless_core::fallback::Fallback;
use dropless_core::host::{Host, HostOptions};
use dropless_core::lockstep::{Divergence, Lockstep};

use dropless_core::ops::{self, Add, Cast, Fill};
use dropless_core::timeouts::{Suspend, Timeouts};
use dropless_core::{Backend, Caps, DType, Error, Memory, Result};
use dropless_model::moe::Recipe;
use dropless_tests::metered::Metered;
use dropless_tests::moe::{Problem, problem};
use dropless_tests::toy::Toy;

fn hosts(ranks: usize) -> Vec<Host> {
    Host::ranks(ranks, HostOptions { threads: 1, ..HostOptions::default() }).unwrap()
}

fn host() -> Host {
    hosts(1).remove(0)
}

/// The toy, which casts, with a host for the rest.
fn helped(toy: Toy, host: Host) -> Fallback<Toy, Host> {
    Fallback::new(toy, host, &["cast"]).unwrap()
}

type Nest = Metered<Lockstep<Host, Fallback<Toy, Host>>>;

/// Metering around lockstep around fallback around the toy.
fn nest(reference: Host, toy: Toy, host: Host) -> Nest {
    Metered::new(Lockstep::new(reference, helped(toy, host)).unwrap())
}

/// The ranks of a nest, and how often the toy of each casts.
fn nests(ranks: usize) -> (Vec<Nest>, Vec<Arc<AtomicUsize>>) {
    let pairs = hosts(ranks).into_iter().zip(hosts(ranks));
    pairs
        .map(|(reference, host)| {
            let toy = Toy::new(host.caps(), None);
            let casts = toy.casts();
            (nest(reference, toy, host), casts)
        })
        .unzip()
}

#[test]
fn a_layer_has_the_bits_of_the_host_through_a_nest() {
    for recipe in [Recipe::F32, Recipe::Bf16, Recipe::Mxfp8, Recipe::Fp8Block] {
        let problem = Problem { recipe, ..problem() };
        let expected = problem.run(1).bits();
        for ranks in [1, 2] {
            let (nests, casts) = nests(ranks);
            assert_eq!(problem.run_on(nests).bits(), expected, "{recipe:?}, {ranks} ranks");
            let cast = casts.iter().all(|casts| casts.load(Ordering::Relaxed) > 0);
            assert!(cast || recipe == Recipe::F32, "{recipe:?}: the toy has nothing to do");
        }
    }
}

#[test]
fn backends_nest_to_any_depth() {
    let problem = problem();
    let toy = Toy::new(host().caps(), None);
    let casts = toy.casts();
    // One host after the other is said to have less, so that each has something to do.
    let most: Vec<&str> = ops::names().filter(|name| *name != "grouped_gemm").collect();
    let helped = Fallback::new(Metered::new(helped(toy, host())), host(), &most).unwrap();
    let inner = Metered::new(Lockstep::new(host(), Metered::new(helped)).unwrap());
    // Two in lockstep are what the reference is, so they go on the other side here.
    let toy = Toy::new(host().caps(), None);
    let outer = Metered::new(Metered::new(Lockstep::new(inner, self::helped(toy, host())).unwrap()));
    assert_eq!(problem.run_on(vec![outer]).bits(), problem.run(1).bits());
    assert!(casts.load(Ordering::Relaxed) > 0);
}

#[test]
fn views_of_a_nested_tensor_are_views_inside() -> Result<()> {
    let (mut nests, _) = nests(1);
    let nest = nests.remove(0);
    let backend: &dyn Backend = &nest;
    let x = backend.upload(DType::F32, &[6, 2], &std::array::from_fn::<_, 12, _>(|i| i as f32))?;
    let out = backend.upload(DType::F32, &[2, 6], &[-1f32; 12])?;
    // In the middle of both, under another shape.
    Cast { x: &x.slice(1, 3)?.reshape(&[4])?, out: &out.index(1)?.slice(2, 6)? }.run(backend)?;
    let written = [-1., -1., -1., -1., -1., -1., -1., -1., 2., 3., 4., 5.];
    assert_eq!(backend.download::<f32>(&out)?, written);
    backend.write(&out.index(0)?.slice(1, 3)?, bytemuck::cast_slice(&[7f32, 8.]))?;
    assert_eq!(backend.download::<f32>(&out.slice(0, 1)?.reshape(&[3, 2])?.slice(0, 2)?)?, [-1., 7., 8., -1.]);
    assert_eq!(backend.download::<f32>(&out)?[6..], written[6..]);

    assert_eq!(nest.live(), x.bytes() + out.bytes());
    let view = out.index(1)?;
    drop((x, out));
    assert_eq!(nest.live(), 2 * view.bytes(), "a view keeps its buffer");
    drop(view);
    assert_eq!(nest.live(), 0);
    Ok(())
}

/// What a wrong cast of `values` is reported as, by a nest.
fn divergence(wrong: usize, values: &[f32]) -> std::result::Result<(), Box<Divergence>> {
    let toy = Toy::new(host().caps(), Some(wrong));
    let nest = nest(host(), toy, host());
    let backend: &dyn Backend = &nest;
    let x = backend.upload(DType::F32, &[values.len()], values).unwrap();
    for row in 1..=3 {
        let out = backend.alloc(DType::Bf16, &[values.len()], Memory::Device).unwrap();
        // On the host.
        Fill { out: &x, value: row as f32 }.run(backend).unwrap();
        match (Cast { x: &x, out: &out }.run(backend)) {
            Ok(()) => {}
            Err(Error::Divergence(divergence)) => return Err(divergence),
            Err(error) => panic!("{error}"),
        }
    }
    Ok(())
}

#[test]
fn a_wrong_op_is_found_through_a_nest() {
    let values = [0.5; 5];
    divergence(4, &values).unwrap();
    let found = divergence(2, &values).unwrap_err();
    assert_eq!((found.op, found.number, found.field.to_string()), ("cast", 4, "out".into()));
    assert_eq!((found.reference, found.examined, found.rank), ("host", "toy", 0));
    assert_eq!((found.elements, found.row, found.column), (1, 0, 0));
    assert_eq!((found.expected, found.found), (0x4000, 0x4001));
    let text = "cast: op 4 of rank 0: out Bf16[5] of toy differs from host in 1 elements, first at row 0, column 0: 0x4001 \
                instead of 0x4000; the op: Cast(Cast { x: F32[5], out: Bf16[5] })";
    assert_eq!(found.to_string(), text);
}

#[test]
fn an_op_that_is_said_to_be_there_and_is_not_is_named() -> Result<()> {
    let helped = Fallback::new(Toy::new(host().caps(), None), host(), &["cast", "add"])?;
    let backend: &dyn Backend = &helped;
    let x = backend.upload(DType::F32, &[2], &[1f32, 2.])?;
    let sum = backend.alloc(DType::F32, &[2], Memory::Device)?;
    let add = Add { a: &x, b: &x, c: None, out: &sum };
    assert!(matches!(add.run(backend), Err(Error::Unsupported { backend: "toy", op: "add" })));

    let misspelt = Fallback::new(Toy::new(host().caps(), None), host(), &["casts"]).unwrap_err().to_string();
    assert!(misspelt.starts_with("fallback: has is casts, expected one of grouped_gemm, "), "{misspelt}");
    Ok(())
}

#[test]
fn a_fallback_is_another_backend_of_the_same_rank() {
    let toy = || Toy::new(hosts(2)[1].caps(), None);
    let error = Fallback::new(toy(), host(), &[]).unwrap_err().to_string();
    let expected =
        "fallback: host is Hopper on rank 0 of 1 in groups of 1, expected Hopper on rank 1 of 2 in groups of 2";
    assert_eq!(error, expected);
    let ours = Fallback::new(toy(), hosts(2).remove(1), &[]).unwrap();
    assert_eq!((ours.caps().backend, ours.caps().rank), ("toy", 1));
}

#[test]
fn tensors_of_other_backends_are_refused_at_every_depth() {
    let (mut nests, _) = nests(1);
    let nest = nests.remove(0);
    let lockstep = Lockstep::new(host(), helped(Toy::new(host().caps(), None), host())).unwrap();
    let all: [&dyn Backend; 3] = [&nest, &lockstep, &host()];
    for (i, backend) in all.iter().enumerate() {
        for (j, other) in all.iter().enumerate() {
            let tensor = other.alloc(DType::F32, &[1], Memory::Device).unwrap();
            let read = backend.read(&tensor, &mut [0; 4]);
            let fill = Fill { out: &tensor, value: 0.0 }.run(*backend);
            for done in [read, fill] {
                assert_eq!(
                    matches!(done, Err(Error::ForeignTensor { .. })),
                    i != j,
                    "{i} given a tensor of {j}: {done:?}"
                );
            }
        }
    }
}

#[derive(Debug, Default)]
struct Switch(AtomicBool);

impl Suspend for Switch {
    fn suspend(&self) -> Result<()> {
        self.0.store(true, Ordering::Relaxed);
        Ok(())
    }

    fn resume(&self) -> Result<()> {
        self.0.store(false, Ordering::Relaxed);
        Ok(())
    }
}

#[test]
fn timeouts_are_suspended_through_a_nest() -> Result<()> {
    let switch = Arc::new(Switch::default());
    let caps = Caps { timeouts: Timeouts::new(switch.clone()), ..host().caps().clone() };
    let nest = nest(host(), Toy::new(&caps, None), host());
    nest.caps().timeouts.suspend()?;
    assert!(switch.0.load(Ordering::Relaxed) && nest.is_busy());
    nest.caps().timeouts.resume()?;
    assert!(!switch.0.load(Ordering::Relaxed) && !nest.is_busy());
    Ok(())
}
