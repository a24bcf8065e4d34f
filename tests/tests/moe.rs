//! The Mixture-of-Experts layer over in-process ranks: the same bits for every number of ranks, policy and thread count,
//! gradients against f64 arithmetic, and the faults that other stacks met.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::Fill;
use dropless_core::{Backend, DType, Error, Memory, NumericModel};
use dropless_model::moe::{Moe, MoePolicy, MoeSaved, Recipe};
use dropless_model::nn::{LinearRecipe, MlpPolicy, Policy, Tokens};
use dropless_tests::metered::Metered;
use dropless_tests::moe::{Outcome, Problem, distance, get, problem, put, random, reference};

const RECIPES: [Recipe; 4] = [Recipe::F32, Recipe::Bf16, Recipe::Mxfp8, Recipe::Fp8Block];

#[test]
fn bits_do_not_depend_on_the_number_of_ranks() {
    for recipe in RECIPES {
        for chunks in [1, 3] {
            let problem = Problem { recipe, chunks, ..problem() };
            let one = problem.run(1);
            for ranks in [2, 4] {
                assert_eq!(problem.run(ranks).bits(), one.bits(), "{recipe:?}, {chunks} chunks, {ranks} ranks");
            }
        }
    }
    let unquantized = problem().run(1);
    for linear_recipe in [LinearRecipe::Mxfp8, LinearRecipe::Fp8Block] {
        let problem = Problem { linear_recipe, ..problem() };
        let one = problem.run(1);
        for ranks in [2, 4] {
            assert_eq!(problem.run(ranks).bits(), one.bits(), "a shared expert in {linear_recipe:?}, {ranks} ranks");
        }
        // The router and the experts' gradients see the input and the result's gradient as they are.
        assert_ne!((&one.y, &one.dx, &one.shared), (&unquantized.y, &unquantized.dx, &unquantized.shared));
        let others =
            Outcome { y: unquantized.y.clone(), dx: unquantized.dx.clone(), shared: unquantized.shared.clone(), ..one };
        assert_eq!(others.bits(), unquantized.bits(), "{linear_recipe:?}");
    }
}

#[test]
fn bits_depend_on_expert_shards_and_not_on_how_ranks_share_experts() {
    for recipe in RECIPES {
        for chunks in [1, 3] {
            let whole = Problem { recipe, chunks, ..problem() }.run(1);
            for expert_shards in [2, 4] {
                let problem = Problem { recipe, chunks, expert_shards, ..problem() };
                let one = problem.run(1);
                for (ranks, expert_ranks) in [(2, 2), (2, 1), (4, 4), (4, 2), (4, 1)] {
                    if ranks / expert_ranks <= expert_shards {
                        let found = problem.run_in_groups(ranks, expert_ranks).bits();
                        let what = format!("{recipe:?}, {chunks} chunks, {ranks} ranks, {expert_ranks} share experts");
                        assert_eq!(found, one.bits(), "{what}");
                    }
                }
                // The chains of the expert weights' gradients are cut, and nothing else.
                assert_ne!(one.gate_up, whole.gate_up);
                assert_ne!(one.down, whole.down);
                let others = Outcome { gate_up: whole.gate_up.clone(), down: whole.down.clone(), ..one };
                assert_eq!(others.bits(), whole.bits(), "{recipe:?}");
            }
        }
    }
}

#[test]
fn expert_shards_that_do_not_fit_are_refused() {
    let options = HostOptions { threads: 1, expert_ranks: Some(2), ..HostOptions::default() };
    let host = Host::ranks(4, options).unwrap().remove(0);
    let refuse = |shards| {
        let tokens = Tokens::new(&host, 2, 8, 1).unwrap();
        tokens.with_expert_shards(&host, shards).unwrap_err().to_string()
    };
    assert_eq!(refuse(1), "tokens: expert_shards is 1, expected a multiple of the 2 replicas of the experts");
    assert_eq!(refuse(8), "tokens: expert_shards is 8, expected a divisor of the 4 gradient shards");
}

#[test]
fn bits_do_not_depend_on_threads_or_policies() {
    for recipe in RECIPES {
        let kept = Problem { recipe, ..problem() };
        let expected = kept.run(2).bits();
        assert_eq!(Problem { threads: 1, ..kept.clone() }.run(2).bits(), expected);
        for policy in [Policy::Offload, Policy::Recompute] {
            let mlp = MlpPolicy { gate_up: policy, hidden: policy };
            let policy = MoePolicy { dispatched: policy, experts: mlp, shared: mlp };
            for ranks in [1, 2] {
                let outcome = Problem { policy, ..kept.clone() }.run(ranks);
                assert_eq!(outcome.bits(), expected, "{recipe:?} {policy:?} {ranks} ranks");
            }
        }
        let mixed = MoePolicy {
            dispatched: Policy::Recompute,
            experts: MlpPolicy { gate_up: Policy::Recompute, hidden: Policy::Offload },
            shared: MlpPolicy { gate_up: Policy::Offload, hidden: Policy::Recompute },
        };
        assert_eq!(Problem { policy: mixed, ..kept }.run(2).bits(), expected);
    }
}

#[test]
fn b005_no_token_is_dropped_when_one_expert_gets_everything() {
    for favourite in [0, 7] {
        let base = Problem { favourite: Some(favourite), k: 1, top_groups: 1, balance: 0.0, ..problem() };
        for recipe in RECIPES {
            let problem = Problem { recipe, ..base.clone() };
            let one = problem.run(1);
            assert_eq!(one.counts[favourite] as usize, problem.tokens());
            assert!(one.ids.iter().all(|&id| id as usize == favourite));
            for ranks in [2, 4] {
                assert_eq!(problem.run(ranks).bits(), one.bits(), "{recipe:?}, {ranks} ranks");
            }
            // Experts without rows: present, and exactly zero.
            let n = problem.i * 2 * problem.h;
            for (e, grad) in one.gate_up.chunks(n).enumerate() {
                assert_eq!(grad.iter().all(|&g| g.to_bits() == 0), e != favourite, "expert {e}");
            }
            // The result is not the residual alone.
            let without = Problem { scale: 0.0, ..problem.clone() }.run(1);
            for t in 0..problem.tokens() {
                let row = t * problem.h..(t + 1) * problem.h;
                assert_ne!(one.y[row.clone()], without.y[row], "token {t}");
            }
        }
    }
}

#[test]
fn b12g_one_rank_combines_on_every_path() {
    for recipe in RECIPES {
        let gathered = Problem { recipe, ..problem() };
        // In pieces, rows are copied and combined as between ranks.
        let exchanged = Problem { chunks: 3, ..gathered.clone() };
        let (a, b) = (gathered.run(1), exchanged.run(1));
        assert_eq!(a.y.len(), gathered.tokens() * gathered.h);
        assert_eq!((a.y, a.dx), (b.y, b.dx), "{recipe:?}");
    }
}

/// Sums of at most a few hundred f32 terms: their relative error stays below 200 * 2^-24 * a small factor.
const F32_BOUND: f64 = 1e-5;

#[test]
fn values_and_gradients_agree_with_f64() {
    let p = Problem { recipe: Recipe::F32, numerics: NumericModel::F32, balance: 0.0, ..problem() };
    for ranks in [1, 2] {
        let found = p.run(ranks);
        let expected = reference(&p, &found.ids);
        for (name, a, b) in [
            ("y", &found.y, &expected.y),
            ("dx", &found.dx, &expected.dx),
            ("router", &found.router, &expected.router),
            ("gate_up", &found.gate_up, &expected.gate_up),
            ("down", &found.down, &expected.down),
        ] {
            let d = distance(a, b);
            assert!(d < F32_BOUND, "{name}: {d:e} on {ranks} ranks");
        }
    }
}

#[test]
fn quantized_recipes_stay_near_f32() {
    let exact = Problem { recipe: Recipe::F32, numerics: NumericModel::F32, balance: 0.0, ..problem() };
    let ids = exact.run(1).ids;
    // An e4m3 element is off by at most 2^-4 of itself, and errors of both factors add; bf16 by 2^-9 at each rounding.
    for (recipe, bound) in [(Recipe::Bf16, 0.02), (Recipe::Mxfp8, 0.13), (Recipe::Fp8Block, 0.13)] {
        let found = Problem { recipe, numerics: NumericModel::Hopper, ..exact.clone() }.run(2);
        let same: usize = found.ids.iter().zip(&ids).filter(|(a, b)| a == b).count();
        assert!(same * 10 >= ids.len() * 9, "{recipe:?} routes like f32 for nearly all tokens");
        let expected = reference(&exact, &found.ids);
        for (name, a, b) in [("y", &found.y, &expected.y), ("dx", &found.dx, &expected.dx)] {
            let d = distance(a, b);
            assert!(d < bound, "{recipe:?} {name}: {d:e}");
        }
        for (name, a, b) in [("gate_up", &found.gate_up, &expected.gate_up), ("down", &found.down, &expected.down)] {
            let d = distance(a, b);
            assert!(d < bound, "{recipe:?} {name}: {d:e}");
        }
    }
}

#[test]
fn b010_a_rank_without_tokens_for_its_experts_takes_part() {
    // Two experts, one a rank; every token goes to expert 0.
    let p = Problem {
        experts: 2,
        k: 1,
        groups: 1,
        top_groups: 1,
        sequences: 2,
        sequence: 4,
        shards: 2,
        bias: vec![10.0, 0.0],
        ..problem()
    };
    let (one, two) = (p.run(1), p.run(2));
    assert_eq!(two.bits(), one.bits());
    assert_eq!(two.counts, [8, 0]);
    assert!(two.gate_up[two.gate_up.len() / 2..].iter().all(|g| g.to_bits() == 0));
}

#[test]
fn b011_a_rank_without_tokens_of_its_own_takes_part() {
    let p = Problem { sequences: 1, sequence: 5, shards: 1, balance: 0.0, ..problem() };
    let one = p.run(1);
    for full in [0, 1] {
        let options = HostOptions { numerics: p.numerics, ..HostOptions::default() };
        let hosts = Host::ranks(2, options).unwrap();
        let parts: Vec<(Vec<f32>, Vec<f32>, Vec<f32>)> = std::thread::scope(|s| {
            let rank = |host: Host| {
                let b: &dyn Backend = &host;
                let mine = usize::from(b.caps().rank == full);
                let tokens = Tokens::new(b, mine, 5, 1).unwrap().with_capacity(5).unwrap();
                let layer = Problem { shards: 2, ..p.clone() }.layer(b);
                let element = p.recipe.element();
                let part = |all: Vec<f32>| put(b, element, &[5 * mine, p.h], &all[..5 * mine * p.h]);
                let (x, residual, dy) = (part(p.x()), part(random(8, 5 * p.h)), part(random(9, 5 * p.h)));
                let counts = b.alloc(DType::U32, &[p.experts], Memory::Device).unwrap();
                Fill { out: &counts, value: 0.0 }.run(b).unwrap();
                let experts = layer.prepare(b).unwrap();
                let mut saved = MoeSaved::default();
                let policy = MoePolicy::default();
                let y = layer
                    .forward(b, &tokens, &experts, &x, None, Some(&residual), &counts, policy, &mut saved)
                    .unwrap();
                assert_eq!(y.shape(), [5 * mine, p.h]);
                let dx = layer.backward(b, &tokens, &experts, &x, &dy, saved).unwrap();
                (get(b, &y), get(b, &dx), get(b, layer.gate_up.grad().unwrap()))
            };
            let threads: Vec<_> = hosts.into_iter().map(|host| s.spawn(move || rank(host))).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(parts[full].0, one.y);
        assert_eq!(parts[full].1, one.dx);
        assert_eq!([parts[0].2.clone(), parts[1].2.clone()].concat(), one.gate_up);
    }
}

#[test]
fn b103_the_scale_is_applied_once() {
    // With scale 0 the experts vanish; the part they add grows linearly with the scale, on every path.
    let at = |scale: f32, ranks: usize, chunks: usize| {
        let p = Problem { recipe: Recipe::F32, numerics: NumericModel::F32, scale, chunks, balance: 0.0, ..problem() };
        p.run(ranks).y
    };
    for (ranks, chunks) in [(1, 1), (2, 1), (1, 2), (2, 2)] {
        let (zero, one, five) = (at(0.0, ranks, chunks), at(1.0, ranks, chunks), at(5.0, ranks, chunks));
        let (mut single, mut scaled) = (Vec::new(), Vec::new());
        for ((z, o), f) in zero.iter().zip(&one).zip(&five) {
            single.push(f64::from(o - z) * 5.0);
            scaled.push(f - z);
        }
        assert!(distance(&scaled, &single) < 1e-5);
    }
}

#[test]
fn b110_b116_the_balance_gradient_does_not_depend_on_the_ranks() {
    let p = Problem { dy: 0.0, balance: 0.5, recipe: Recipe::F32, numerics: NumericModel::F32, ..problem() };
    let one = p.run(1);
    assert!(one.router.iter().any(|&g| g != 0.0), "the balance loss reaches the router");
    assert!(one.balance.iter().all(|&l| l > 0.0));
    for ranks in [2, 4] {
        assert_eq!(p.run(ranks).bits(), one.bits());
    }
}

#[test]
fn b122_the_router_learns_from_the_task_alone_across_ranks() {
    let p = Problem { balance: 0.0, ..problem() };
    let (one, two) = (p.run(1), p.run(2));
    assert!(one.router.iter().any(|&g| g != 0.0));
    assert_eq!(one.router, two.router);
}

#[test]
fn b160_the_worst_case_is_refused_before_anything_is_sent() {
    let p = Problem { sequences: 2, sequence: 64, shards: 2, k: 2, experts: 4, groups: 1, top_groups: 1, ..problem() };
    let p = Problem { bias: vec![0.0; 4], ..p };
    let hosts = Host::ranks(2, HostOptions::default()).unwrap();
    for host in hosts {
        let b: &dyn Backend = &host;
        let tokens = Tokens::new(b, 1, 64, 1).unwrap();
        let layer = p.layer(b);
        let needed = layer.working_bytes(2, &tokens);
        layer.check_budget(b, &tokens, needed).unwrap();
        let error = layer.check_budget(b, &tokens, needed - 1).unwrap_err();
        assert!(matches!(error, Error::Capacity { needed: n, available, .. } if n == needed && available == n - 1));
        assert!(error.to_string().contains("256 expert rows"), "{error}");
        // Half the tokens at a time need half of the memory, but for what waits for the other half.
        let halves = Moe { chunks: 2, ..layer };
        halves.check_budget(b, &tokens, needed * 3 / 4).unwrap();
    }
}

/// The most bytes that live on a rank while the layer runs, less those that live before, and the formula for them.
fn most_and_formula(problem: &Problem, ranks: usize) -> Vec<(usize, u64)> {
    let hosts = Host::ranks(ranks, HostOptions { numerics: problem.numerics, ..HostOptions::default() }).unwrap();
    let measure = |host| {
        let backend = Metered::new(host);
        let operands = problem.operands(&backend);
        let before = backend.live();
        backend.take_most();
        operands.queue(&backend).unwrap();
        (backend.take_most() - before, operands.working_bytes(&backend))
    };
    std::thread::scope(|s| {
        let threads: Vec<_> = hosts.into_iter().map(|host| s.spawn(|| measure(host))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn the_memory_of_a_piece_is_bounded_by_the_formula_and_not_by_much_less() {
    let mlp = MlpPolicy { gate_up: Policy::Recompute, hidden: Policy::Recompute };
    let policy = MoePolicy { dispatched: Policy::Recompute, experts: mlp, ..MoePolicy::default() };
    let base = Problem { sequence: 64, shared: false, policy, ..problem() };
    for recipe in RECIPES {
        for (h, i, chunks, expert_shards) in
            [(64, 32, 1, 1), (64, 32, 4, 1), (64, 32, 2, 2), (32, 128, 1, 1), (32, 128, 4, 1)]
        {
            let problem = Problem { recipe, h, i, chunks, expert_shards, ..base.clone() };
            for ranks in [1, 2] {
                for (most, formula) in most_and_formula(&problem, ranks) {
                    let bounds = most as u64..=2 * most as u64;
                    let what = format!(
                        "{recipe:?}, h {h}, i {i}, {chunks} chunks, {expert_shards} expert shards, {ranks} ranks"
                    );
                    assert!(bounds.contains(&formula), "{what}: {most} bytes lived, {formula} by the formula");
                }
            }
        }
    }
}

#[test]
fn b170_twenty_runs_have_the_same_bits() {
    let p = Problem { sequences: 4, sequence: 32, ..problem() };
    let first = p.run(2).bits();
    for _ in 0..20 {
        assert_eq!(p.run(2).bits(), first);
    }
}

#[test]
fn a_row_does_not_depend_on_other_rows() {
    // The first two sequences alone, and beside two others.
    for recipe in RECIPES {
        let all = Problem { recipe, ..problem() };
        let half = Problem { sequences: 2, shards: 2, ..all.clone() };
        let (all, half) = (all.run(1), half.run(1));
        assert_eq!(all.y[..half.y.len()], half.y[..], "{recipe:?}");
        // dy differs by its place in the random stream only past the first half.
        assert_eq!(all.dx[..half.dx.len()], half.dx[..], "{recipe:?}");
    }
}
