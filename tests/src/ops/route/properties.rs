//! Routing against a plain reference: sorted keys, and hand-computed answers of known faults.

use std::collections::HashSet;

use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::{Balance, Layout, NONE, Plan, Route, Score, TopK, TopKGrad, Window};
use dropless_core::{Backend, DType, Error, Memory, Result, Tensor};
use proptest::prelude::*;

fn host() -> Host {
    Host::new(HostOptions::default()).unwrap()
}

fn u32_of(n: usize) -> u32 {
    u32::try_from(n).unwrap()
}

/// A router without its tensors.
#[derive(Clone, Debug)]
struct Router {
    score: Score,
    k: usize,
    groups: usize,
    top_groups: usize,
    normalize: bool,
    scale: f32,
    bias: Option<Vec<f32>>,
    valid: Option<Vec<u32>>,
    /// Coefficient and tokens of a sequence.
    balance: Option<(f32, usize)>,
}

impl Router {
    fn new(score: Score, k: usize) -> Self {
        Router {
            score,
            k,
            groups: 1,
            top_groups: 1,
            normalize: true,
            scale: 1.0,
            bias: None,
            valid: None,
            balance: None,
        }
    }
}

/// What a forward and backward pass gives.
#[derive(Debug, PartialEq)]
struct Routed {
    scores: Vec<f32>,
    ids: Vec<u32>,
    weights: Vec<f32>,
    counts: Vec<u32>,
    sequence_counts: Vec<u32>,
    loss: Vec<f32>,
    d_logits: Vec<f32>,
}

impl Routed {
    fn bits(&self) -> Vec<u32> {
        let floats = [&self.scores, &self.weights, &self.loss, &self.d_logits].into_iter().flatten();
        let integers = [&self.ids, &self.counts, &self.sequence_counts].into_iter().flatten();
        floats.map(|x| if x.is_nan() { NONE } else { x.to_bits() }).chain(integers.copied()).collect()
    }
}

/// Runs `router` on rows of logits, and back with the gradient `d_weights` of the weights.
fn try_route(backend: &dyn Backend, router: &Router, logits: &[&[f32]], d_weights: &[f32]) -> Result<Routed> {
    let (tokens, experts, k) = (logits.len(), logits[0].len(), router.k);
    let new = |dtype, shape: &[usize]| backend.alloc(dtype, shape, Memory::Device);
    let bias = router.bias.as_ref().map(|b| backend.upload(DType::F32, &[experts], b)).transpose()?;
    let valid = router.valid.as_ref().map(|v| backend.upload(DType::U32, &[tokens], v)).transpose()?;
    let logits = backend.upload(DType::F32, &[tokens, experts], &logits.concat())?;
    let (scores, ids) = (new(DType::F32, &[tokens, experts])?, new(DType::U32, &[tokens, k])?);
    let (weights, d_logits) = (new(DType::F32, &[tokens, k])?, new(DType::F32, &[tokens, experts])?);
    let counts = backend.upload(DType::U32, &[experts], &vec![0u32; experts])?;
    let (coefficient, sequence) = router.balance.unwrap_or((0.0, tokens));
    let sequences = tokens / sequence;
    let sequence_counts = backend.upload(DType::U32, &[sequences, experts], &vec![0u32; sequences * experts])?;
    let loss = backend.upload(DType::F32, &[sequences], &vec![0.0f32; sequences])?;
    let balance = router.balance.map(|_| Balance { coefficient, sequence, counts: &sequence_counts, loss: &loss });
    let Router { score, groups, top_groups, normalize, scale, .. } = *router;
    Route::TopK(TopK {
        logits: &logits,
        bias: bias.as_ref(),
        valid: valid.as_ref(),
        score,
        groups,
        top_groups,
        normalize,
        scale,
        scores: &scores,
        ids: &ids,
        weights: &weights,
        counts: &counts,
        balance,
    })
    .run(backend)?;
    let d_weights = backend.upload(DType::F32, &[tokens, k], d_weights)?;
    Route::TopKGrad(TopKGrad {
        scores: &scores,
        ids: &ids,
        d_weights: &d_weights,
        score,
        normalize,
        scale,
        balance,
        d_logits: &d_logits,
    })
    .run(backend)?;
    Ok(Routed {
        scores: backend.download(&scores)?,
        ids: backend.download(&ids)?,
        weights: backend.download(&weights)?,
        counts: backend.download(&counts)?,
        sequence_counts: backend.download(&sequence_counts)?,
        loss: backend.download(&loss)?,
        d_logits: backend.download(&d_logits)?,
    })
}

/// As [`try_route`], with zero gradients of the weights.
fn route(router: &Router, logits: &[&[f32]]) -> Routed {
    try_route(&host(), router, logits, &vec![0.0; logits.len() * router.k]).unwrap()
}

/// The logits of these sigmoid scores.
fn logits_of(scores: &[f64]) -> Vec<f32> {
    #[expect(clippy::cast_possible_truncation, reason = "the nearest f32 is meant")]
    scores.iter().map(|s| (s / (1.0 - s)).ln() as f32).collect()
}

/// Half a dozen roundings of values of this size.
fn assert_near(found: &[f32], expected: &[f64]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert!((f64::from(*found) - expected).abs() <= 2e-6 * expected.abs().max(0.1), "{found} is not {expected}");
    }
}

#[test]
fn b070_ties_go_to_the_lower_index() {
    let cases: [(&[f32], usize, &[u32]); 5] = [
        (&[1.0, 3.0, 3.0, 2.0], 1, &[1]),
        (&[1.0, 3.0, 3.0, 2.0], 2, &[1, 2]),
        (&[0.0; 4], 2, &[0, 1]),
        (&[5.0, 5.0, 5.0, 1.0], 2, &[0, 1]),
        (&[0.25; 256], 8, &[0, 1, 2, 3, 4, 5, 6, 7]),
    ];
    for score in [Score::Sigmoid, Score::Softmax] {
        for (logits, k, ids) in cases {
            for _ in 0..20 {
                assert_eq!(route(&Router::new(score, k), &[logits]).ids, ids, "{score:?} {logits:?}");
            }
        }
    }
    let groups = Router { groups: 4, top_groups: 2, ..Router::new(Score::Sigmoid, 3) };
    assert_eq!(route(&groups, &[&[0.5; 8]]).ids, [0, 1, 2], "ties between groups");
}

#[test]
fn b071_the_gradient_follows_the_saved_choice() {
    // The gradient takes ids and scores, not logits: a recomputed hidden state cannot change the choice.
    let backend: &dyn Backend = &host();
    let up = |dtype, shape: &[usize], x: &[u32]| backend.upload(dtype, shape, x).unwrap();
    let half = 0.5f32.to_bits();
    let scores = up(DType::F32, &[1, 3], &[half; 3]);
    let (ids, d_weights) = (up(DType::U32, &[1, 1], &[2]), up(DType::F32, &[1, 1], &[1.0f32.to_bits()]));
    let d_logits = up(DType::F32, &[1, 3], &[NONE; 3]);
    let op = TopKGrad {
        scores: &scores,
        ids: &ids,
        d_weights: &d_weights,
        score: Score::Sigmoid,
        normalize: false,
        scale: 1.0,
        balance: None,
        d_logits: &d_logits,
    };
    Route::TopKGrad(op).run(backend).unwrap();
    assert_eq!(backend.download::<f32>(&d_logits).unwrap(), [0.0, 0.0, 0.25], "a tie that went to the higher index");
}

#[test]
fn b072_ids_are_distinct_and_in_range_whatever_the_logits() {
    let (nan, inf) = (f32::NAN, f32::INFINITY);
    let rows: [([f32; 8], [u32; 3]); 4] = [
        ([nan; 8], [0, 1, 2]),
        ([nan, 1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0], [2, 3, 1]),
        ([-inf; 8], [0, 1, 2]),
        ([inf; 8], [0, 1, 2]),
    ];
    for (logits, ids) in rows {
        assert_eq!(route(&Router::new(Score::Sigmoid, 3), &[&logits]).ids, ids, "{logits:?}");
    }
    let only_nan_left = [nan, -1.0, nan, nan, nan, nan, nan, nan];
    assert_eq!(route(&Router::new(Score::Sigmoid, 3), &[&only_nan_left]).ids, [1, 0, 2]);
    for (logits, _) in rows {
        let routed = route(&Router::new(Score::Softmax, 3), &[&logits]);
        assert!(routed.weights.iter().all(|w| w.is_nan()), "softmax spreads a NaN, so that the loss shows it");
        assert_eq!(routed.ids, [0, 1, 2]);
    }
}

#[test]
fn b080_experts_of_other_groups_never_win() {
    let router =
        Router { groups: 2, top_groups: 1, bias: Some(vec![-1.0, -1.0, -2.0, -2.0]), ..Router::new(Score::Sigmoid, 2) };
    let routed = route(&router, &[&logits_of(&[0.6, 0.5, 0.3, 0.2])]);
    assert_eq!(routed.ids, [0, 1]);
    assert_near(&routed.weights, &[0.6 / 1.1, 0.5 / 1.1]);
    // Not even when the chosen group holds nothing but minus infinity and NaN.
    let router = Router { bias: Some(vec![f32::NEG_INFINITY, f32::NAN, f32::NAN, f32::NAN]), ..router };
    assert_eq!(route(&router, &[&[0.0; 4]]).ids, [0, 1]);
}

#[test]
fn b081_a_group_counts_by_its_two_best() {
    let router = Router { groups: 2, bias: Some(vec![0.0; 8]), ..Router::new(Score::Sigmoid, 2) };
    let routed = route(&router, &[&logits_of(&[0.9, 0.1, 0.1, 0.1, 0.6, 0.5, 0.1, 0.1])]);
    assert_eq!(routed.ids, [4, 5]);
    assert_near(&routed.weights, &[0.6 / 1.1, 0.5 / 1.1]);
}

#[test]
fn a_group_counts_by_its_best_under_softmax() {
    let router = Router { groups: 2, ..Router::new(Score::Softmax, 2) };
    assert_eq!(route(&router, &[&[3.0, 0.0, 0.0, 0.0, 2.9, 2.8, 0.0, 0.0]]).ids, [0, 1]);
}

#[test]
fn b091_weights_come_from_the_scores_not_from_the_biased_ones() {
    let router = Router { bias: Some(vec![12.0; 4]), ..Router::new(Score::Sigmoid, 2) };
    let routed = route(&router, &[&[-18.0, -17.0, -30.0, -31.0]]);
    assert_eq!(routed.ids, [0, 1]);
    assert_near(&routed.weights, &[0.268_941_42, 0.731_058_58]);
}

#[test]
fn b094_counts_are_added_once_for_each_call() {
    let backend: &dyn Backend = &host();
    let new = |dtype, shape: &[usize]| backend.alloc(dtype, shape, Memory::Device).unwrap();
    let logits: Vec<f32> = (0..32u8).map(|i| f32::from(i * 5 % 32)).collect();
    let logits = backend.upload(DType::F32, &[8, 4], &logits).unwrap();
    let (scores, ids, weights) = (new(DType::F32, &[8, 4]), new(DType::U32, &[8, 2]), new(DType::F32, &[8, 2]));
    let counts = backend.upload(DType::U32, &[4], &[0u32; 4]).unwrap();
    let op = TopK {
        logits: &logits,
        bias: None,
        valid: None,
        score: Score::Softmax,
        groups: 1,
        top_groups: 1,
        normalize: true,
        scale: 1.0,
        scores: &scores,
        ids: &ids,
        weights: &weights,
        counts: &counts,
        balance: None,
    };
    Route::TopK(op).run(backend).unwrap();
    let once = backend.download::<u32>(&counts).unwrap();
    Route::TopK(op).run(backend).unwrap();
    let twice = backend.download::<u32>(&counts).unwrap();
    assert_eq!(twice.iter().sum::<u32>(), 32);
    assert_eq!(twice, once.iter().map(|n| 2 * n).collect::<Vec<_>>());
}

#[test]
fn b097_padding_is_neither_routed_nor_counted() {
    let (to0, to1): (&[f32], &[f32]) = (&[2.0, -1.0], &[-3.0, 5.0]);
    for score in [Score::Sigmoid, Score::Softmax] {
        let router = Router { balance: Some((0.01, 4)), ..Router::new(score, 1) };
        let padded = Router { valid: Some(vec![1, 1, 0, 0]), ..router.clone() };
        let padded = try_route(&host(), &padded, &[to0, to0, to1, to1], &[0.5, -1.0, 7.0, 7.0]).unwrap();
        let bare = Router { balance: Some((0.01, 2)), ..router };
        let bare = try_route(&host(), &bare, &[to0, to0], &[0.5, -1.0]).unwrap();
        assert_eq!(padded.counts, [2, 0]);
        assert_eq!(padded.ids, [0, 0, NONE, NONE]);
        assert_eq!(padded.weights[2..], [0.0, 0.0]);
        assert_eq!(padded.loss, bare.loss);
        assert_eq!(padded.d_logits[..4], bare.d_logits);
        assert_eq!(padded.d_logits[4..].iter().map(|d| d.to_bits()).collect::<Vec<_>>(), [0; 4]);
    }
}

#[test]
fn b101_weights_are_normalised_and_scaled() {
    let router = Router { scale: 2.5, ..Router::new(Score::Sigmoid, 2) };
    let routed = route(&router, &[&logits_of(&[0.6, 0.5, 0.1, 0.05])]);
    assert_near(&routed.weights, &[1.363_636_4, 1.136_363_6]);
}

#[test]
fn b104_softmax_comes_before_the_choice() {
    let logits: &[f32] = &[2.0, 1.0, 0.0, -1.0];
    let plain = Router { normalize: false, ..Router::new(Score::Softmax, 2) };
    assert_near(&route(&plain, &[logits]).weights, &[0.643_914_26, 0.236_882_82]);
    assert_near(&route(&Router::new(Score::Softmax, 2), &[logits]).weights, &[0.731_058_6, 0.268_941_4]);
}

#[test]
fn b106_the_balance_loss_does_not_depend_on_the_size_of_the_scores() {
    // Uniform scores of 8 experts, all choices on experts 0 and 1: f = [4, 4, 0, ...], P = 1/8 each, loss = 1.
    for logit in [-48.35, -6.9, 0.0, -80.0] {
        let router = Router { balance: Some((1.0, 2)), ..Router::new(Score::Sigmoid, 2) };
        let routed = route(&router, &[&[logit; 8], &[logit; 8]]);
        assert_near(&routed.loss, &[1.0]);
    }
    // Scores of exactly 0 count as uniform, and have no gradient.
    let router = Router { balance: Some((1.0, 1)), ..Router::new(Score::Sigmoid, 2) };
    let routed = route(&router, &[&[-200.0; 8]]);
    assert_eq!((routed.scores, routed.loss, routed.d_logits), (vec![0.0; 8], vec![1.0], vec![0.0; 8]));
}

#[test]
fn b112_the_coefficient_is_that_of_one_sequence() {
    // The same two tokens, as one sequence at 0.01 and as four at a quarter of it each: one gradient.
    let tokens: [&[f32]; 2] = [&[1.0, 0.5, -1.0], &[0.3, 0.2, 0.9]];
    let once = route(&Router { balance: Some((0.01, 2)), ..Router::new(Score::Sigmoid, 1) }, &tokens);
    let split = Router { balance: Some((0.0025, 2)), ..Router::new(Score::Sigmoid, 1) };
    let split = route(&split, &[tokens; 4].concat());
    // In thousandths, so that the gradient is of the size that `assert_near` is for.
    for i in 0..6 {
        let sum: f32 = (0..4).map(|s| split.d_logits[s * 6 + i]).sum();
        assert_near(&[sum * 1e3], &[f64::from(once.d_logits[i]) * 1e3]);
    }
    assert!(once.d_logits.iter().any(|d| d.abs() > 1e-5), "the gradient under test is not just zeros");
}

#[test]
fn b113_padding_does_not_enter_the_balance_loss() {
    let (a, b, x): (&[f32], &[f32], &[f32]) = (&[1.0, 0.5, -1.0], &[0.3, 0.2, 0.9], &[9.0, f32::NAN, 0.0]);
    let router = |sequence, valid: &[u32]| Router {
        balance: Some((0.01, sequence)),
        valid: Some(valid.to_vec()),
        ..Router::new(Score::Softmax, 2)
    };
    let real = route(&router(2, &[1, 1]), &[a, b]);
    for (rows, valid, kept) in [([a, b, x, x], [1, 1, 0, 0], [0, 1]), ([x, a, x, b], [0, 1, 0, 1], [1, 3])] {
        let padded = route(&router(4, &valid), &rows);
        assert_eq!(padded.loss, real.loss);
        assert_eq!(padded.sequence_counts, real.sequence_counts);
        for (t, d) in padded.d_logits.chunks(3).enumerate() {
            match kept.iter().position(|&kept| kept == t) {
                Some(r) => assert_eq!(d, &real.d_logits[r * 3..(r + 1) * 3]),
                None => assert_eq!(d.iter().map(|d| d.to_bits()).collect::<Vec<_>>(), [0; 3]),
            }
        }
    }
    let nothing = route(&router(2, &[0, 0]), &[x, x]);
    assert_eq!((nothing.loss, nothing.d_logits), (vec![0.0], vec![0.0; 6]));
}

#[test]
fn b115_imbalance_of_layers_and_sequences_does_not_cancel() {
    let router = Router { balance: Some((1.0, 4)), ..Router::new(Score::Softmax, 1) };
    let (to0, to1): (&[f32], &[f32]) = (&[90.0, -90.0], &[-90.0, 90.0]);
    let routed = route(&router, &[to0, to0, to0, to0, to1, to1, to1, to1]);
    assert_eq!(routed.loss, [2.0, 2.0]);
    assert_eq!(routed.sequence_counts, [4, 0, 0, 4]);
}

#[test]
fn b116_counts_that_were_exchanged_stay_local() {
    use dropless_core::Group;
    use dropless_core::ops::AllToAll;
    let hosts = Host::ranks(2, HostOptions::default()).unwrap();
    let all = std::thread::scope(|s| {
        let threads = hosts.into_iter().map(|host| {
            s.spawn(move || {
                let backend: &dyn Backend = &host;
                let local = [[3u32, 1], [1, 3]][backend.caps().rank];
                let counts = backend.upload(DType::U32, &[2], &local).unwrap();
                let global = backend.alloc(DType::U32, &[2, 2], Memory::Device).unwrap();
                AllToAll { group: Group::World, send: &counts, recv: &global, counts: None }.run(backend).unwrap();
                assert_eq!(backend.download::<u32>(&counts).unwrap(), local);
                backend.download::<u32>(&global).unwrap()
            })
        });
        threads.collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    assert_eq!(all, [[3, 1, 1, 3], [3, 1, 1, 3]]);
}

/// The sum of `d_weights * weights` and the losses in f64, for choices that are given.
fn objective(router: &Router, logits: &[f64], experts: usize, ids: &[u32], d_weights: &[f32]) -> f64 {
    let k = router.k;
    let scores: Vec<Vec<f64>> = logits
        .chunks(experts)
        .map(|x| match router.score {
            Score::Sigmoid => x.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
            Score::Softmax => {
                let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
                x.iter().map(|x| (x - max).exp() / sum).collect()
            }
        })
        .collect();
    let mut total = 0.0;
    for ((scores, ids), d) in scores.iter().zip(ids.chunks(k)).zip(d_weights.chunks(k)) {
        let chosen = || ids.iter().filter(|&&id| id != NONE).map(|&id| scores[id as usize]);
        let divisor = if router.normalize { chosen().sum::<f64>() + 1e-20 } else { 1.0 };
        total += chosen().zip(d).map(|(s, &d)| f64::from(d) * f64::from(router.scale) * s / divisor).sum::<f64>();
    }
    let Some((coefficient, sequence)) = router.balance else { return total };
    for (scores, ids) in scores.chunks(sequence).zip(ids.chunks(sequence * k)) {
        let valid: Vec<_> = scores.iter().zip(ids.chunks(k)).filter(|(_, ids)| ids[0] != NONE).collect();
        let n = valid.len() as f64;
        for e in 0..experts {
            let count = ids.iter().filter(|&&id| id as usize == e).count() as f64;
            let p: f64 = valid.iter().map(|(s, _)| s[e] / s.iter().sum::<f64>()).sum();
            if n > 0.0 {
                total += f64::from(coefficient) * (experts as f64 * count / (k as f64 * n)) * (p / n);
            }
        }
    }
    total
}

#[test]
fn gradients_are_those_of_the_formulas_in_f64() {
    let (tokens, experts, k) = (12, 8, 3);
    let logits: Vec<f32> = (0..tokens * experts).map(|i| ((i * i * 29 + i * 7) % 97) as f32 / 24.0 - 2.0).collect();
    let d_weights: Vec<f32> = (0..tokens * k).map(|i| ((i * 31) % 17) as f32 / 8.0 - 1.0).collect();
    let rows: Vec<&[f32]> = logits.chunks(experts).collect();
    let valid: Vec<u32> = (0..u32_of(tokens)).map(|t| u32::from(t % 5 != 4)).collect();
    for score in [Score::Sigmoid, Score::Softmax] {
        for normalize in [false, true] {
            for balance in [None, Some((0.7, 6))] {
                let router =
                    Router { normalize, balance, scale: 1.5, valid: Some(valid.clone()), ..Router::new(score, k) };
                let routed = try_route(&host(), &router, &rows, &d_weights).unwrap();
                let wide: Vec<f64> = logits.iter().map(|&x| f64::from(x)).collect();
                for i in 0..logits.len() {
                    let shifted = |by: f64| {
                        let mut x = wide.clone();
                        x[i] += by;
                        objective(&router, &x, experts, &routed.ids, &d_weights)
                    };
                    // The difference quotient errs by h^2 |f'''| / 6, below 1e-9 here; the f32 terms are at most 2 in
                    // size and go through about 30 roundings of 2^-24.
                    let expected = (shifted(1e-5) - shifted(-1e-5)) / 2e-5;
                    let found = f64::from(routed.d_logits[i]);
                    assert!((found - expected).abs() < 5e-6, "{router:?} at {i}: {found}, expected {expected}");
                }
            }
        }
    }
}

/// The choice by sorting, on the device's own scores.
fn reference_choice(router: &Router, scores: &[f32]) -> Vec<u32> {
    let value = |e: usize| router.bias.as_ref().map_or(scores[e], |b| scores[e] + b[e]);
    let sorted = |mut items: Vec<(f32, usize)>| {
        items.sort_by(|a, b| {
            (a.0.is_nan(), b.0, a.1).partial_cmp(&(b.0.is_nan(), a.0, b.1)).unwrap_or_else(|| a.1.cmp(&b.1))
        });
        items
    };
    let size = scores.len() / router.groups;
    let groups = (0..router.groups).map(|g| {
        let best = sorted((g * size..(g + 1) * size).map(|e| (value(e), e)).collect());
        let two = if router.score == Score::Sigmoid && size > 1 { best[0].0 + best[1].0 } else { best[0].0 };
        (two, g)
    });
    let groups = sorted(groups.collect());
    let candidates = groups[..router.top_groups].iter().flat_map(|&(_, g)| g * size..(g + 1) * size);
    sorted(candidates.map(|e| (value(e), e)).collect())[..router.k].iter().map(|&(_, e)| u32_of(e)).collect()
}

/// Logits with ties and the values that break comparisons.
fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![
        8 => (-8i8..8).prop_map(|x| f32::from(x) / 4.0),
        4 => -3.0f32..3.0,
        1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 100.0, -110.0]),
    ]
}

fn router() -> impl Strategy<Value = (Router, Vec<Vec<f32>>)> {
    let numbers = (1usize..5, 1usize..6, 1usize..40, any::<bool>(), any::<bool>(), any::<bool>());
    numbers.prop_flat_map(|(groups, size, tokens, sigmoid, normalize, biased)| {
        let experts = groups * size;
        let score = if sigmoid { Score::Sigmoid } else { Score::Softmax };
        let bias = prop::collection::vec(logit(), experts).prop_map(move |b| biased.then_some(b));
        let valid = prop::option::of(prop::collection::vec(0u32..2, tokens));
        let logits = prop::collection::vec(prop::collection::vec(logit(), experts), tokens);
        (1..=groups, bias, valid, logits, any::<bool>()).prop_flat_map(
            move |(top_groups, bias, valid, logits, balance)| {
                let (bias, valid, logits) = (bias.clone(), valid.clone(), logits.clone());
                (1..=top_groups * size).prop_map(move |k| {
                    let balance = balance.then_some((0.5, tokens));
                    let router = Router { groups, top_groups, normalize, balance, ..Router::new(score, k) };
                    (Router { bias: bias.clone(), valid: valid.clone(), ..router }, logits.clone())
                })
            },
        )
    })
}

/// Which tokens a rank receives and how its slots lie, from the definition.
fn reference_layout(rows: &[Vec<u32>], first: usize, local: usize) -> (Vec<u32>, Vec<(usize, usize)>) {
    let mut choices = Vec::new();
    for (row, ids) in rows.iter().enumerate() {
        for (choice, &id) in ids.iter().enumerate() {
            if (first..first + local).contains(&(id as usize)) {
                choices.push((id as usize - first, row, choice));
            }
        }
    }
    choices.sort_unstable();
    let offsets = (0..=local).map(|e| u32_of(choices.iter().filter(|c| c.0 < e).count())).collect();
    (offsets, choices.into_iter().map(|(_, row, choice)| (row, choice)).collect())
}

struct Planned {
    rows: Vec<u32>,
    counts: Vec<u32>,
    positions: Vec<u32>,
}

fn plan(
    backend: &dyn Backend,
    ids: &Tensor,
    experts: usize,
    window: Option<Window>,
    capacity: usize,
) -> Result<Planned> {
    let (ranks, tokens) = (backend.caps().ranks, ids.rows());
    let rows = backend.alloc(DType::U32, &[ranks, capacity], Memory::Device)?;
    let counts = backend.alloc(DType::U32, &[ranks], Memory::Device)?;
    let positions = backend.alloc(DType::U32, &[tokens, ranks], Memory::Device)?;
    let op = Plan { ids, experts, window, rows: &rows, counts: &counts, positions: &positions };
    Route::Plan(op).run(backend)?;
    Ok(Planned {
        rows: backend.download(&rows)?,
        counts: backend.download(&counts)?,
        positions: backend.download(&positions)?,
    })
}

#[derive(Debug)]
struct Laid {
    offsets: Vec<u32>,
    slot_rows: Vec<u32>,
    slot_weights: Vec<f32>,
    row_slots: Vec<u32>,
}

/// Lays out received rows of ids `[segments, capacity, k]` on a rank of `local` experts.
fn lay_out(shape: [usize; 3], ids: &[u32], counts: &[u32], first: usize, local: usize, slots: usize) -> Result<Laid> {
    let backend: &dyn Backend = &host();
    let new = |dtype, shape: &[usize]| backend.alloc(dtype, shape, Memory::Device);
    let weights: Vec<f32> = (0..ids.len()).map(|i| i as f32).collect();
    let (ids, weights) = (backend.upload(DType::U32, &shape, ids)?, backend.upload(DType::F32, &shape, &weights)?);
    let counts = backend.upload(DType::U32, &[counts.len()], counts)?;
    let (offsets, slot_rows) = (new(DType::U32, &[local + 1])?, new(DType::U32, &[slots])?);
    let slot_weights = backend.upload(DType::F32, &[slots], &vec![-1.0f32; slots])?;
    let row_slots = new(DType::U32, &shape)?;
    Route::Layout(Layout {
        ids: &ids,
        counts: &counts,
        weights: &weights,
        first_expert: first,
        offsets: &offsets,
        slot_rows: &slot_rows,
        slot_weights: &slot_weights,
        row_slots: &row_slots,
    })
    .run(backend)?;
    Ok(Laid {
        offsets: backend.download(&offsets)?,
        slot_rows: backend.download(&slot_rows)?,
        slot_weights: backend.download(&slot_weights)?,
        row_slots: backend.download(&row_slots)?,
    })
}

#[test]
fn b074_each_rank_gets_its_experts_as_local_ids() {
    let hosts = Host::ranks(4, HostOptions::default()).unwrap();
    let routed = [2u32, 3, 0, 5, 2, 7];
    let ids = (&hosts[0] as &dyn Backend).upload(DType::U32, &[6, 1], &routed).unwrap();
    let planned = plan(&hosts[0], &ids, 8, None, 6).unwrap();
    assert_eq!(planned.counts, [1, 3, 1, 1]);
    let expected: [(&[u32], &[u32]); 4] =
        [(&[2], &[0, 1, 1]), (&[0, 1, 4], &[0, 2, 3]), (&[3], &[0, 0, 1]), (&[5], &[0, 0, 1])];
    for (rank, (tokens, offsets)) in expected.into_iter().enumerate() {
        assert_eq!(&planned.rows[rank * 6..][..tokens.len()], tokens, "rank {rank}");
        let mut received: Vec<u32> = tokens.iter().map(|&t| routed[t as usize]).collect();
        received.resize(6, NONE);
        let laid = lay_out([1, 6, 1], &received, &[u32_of(tokens.len())], rank * 2, 2, 6).unwrap();
        assert_eq!(laid.offsets, offsets, "rank {rank}");
    }
    let laid = lay_out([1, 6, 1], &[2, 3, 2, NONE, NONE, NONE], &[3], 2, 2, 6).unwrap();
    assert_eq!(laid.slot_rows, [0, 2, 1, NONE, NONE, NONE]);
}

#[test]
fn b032_rows_without_an_expert_have_no_slot() {
    let ids = [0, 0, NONE, NONE, 1, NONE];
    let laid = lay_out([1, 6, 1], &ids, &[6], 0, 2, 6).unwrap();
    assert_eq!(laid.offsets, [0, 2, 3]);
    assert_eq!(laid.slot_rows, [0, 1, 4, NONE, NONE, NONE]);
    assert_eq!(laid.row_slots, [0, 1, NONE, NONE, 2, NONE]);
    assert_eq!(laid.slot_weights, [0.0, 1.0, 4.0, -1.0, -1.0, -1.0]);
    assert_eq!(lay_out([1, 6, 1], &[NONE; 6], &[6], 0, 2, 6).unwrap().offsets, [0, 0, 0]);
}

#[test]
fn b128_a_token_may_have_fewer_choices_than_others() {
    let ids = [2, 0, 1, NONE, NONE, NONE];
    let laid = lay_out([1, 3, 2], &ids, &[3], 0, 3, 6).unwrap();
    assert_eq!(laid.offsets, [0, 1, 2, 3]);
    assert_eq!(laid.row_slots, [2, 0, 1, NONE, NONE, NONE]);
}

#[test]
fn b12b_group_sizes_come_from_the_received_ids() {
    let laid = lay_out([1, 4, 2], &[0, 1, 1, NONE, 1, 0, NONE, NONE], &[4], 0, 2, 8).unwrap();
    assert_eq!(laid.offsets, [0, 2, 5], "2 and 3 rows");
    assert_eq!(laid.slot_rows, [0, 2, 0, 1, 2, NONE, NONE, NONE]);
}

fn argument(error: &Error) -> (&'static str, String) {
    match error {
        Error::Argument { op: "route", field, found, .. } => (field, found.clone()),
        other => panic!("{other}"),
    }
}

#[test]
fn b160_too_little_room_is_found_before_anything_is_sent() {
    let error = lay_out([2, 64, 2], &[0; 256], &[64, 64], 0, 4, 200).unwrap_err();
    assert_eq!(argument(&error), ("slot_rows", "200".into()));
    assert!(error.to_string().contains("at least 256 slots"), "{error}");
    let hosts = Host::ranks(2, HostOptions::default()).unwrap();
    let ids = (&hosts[0] as &dyn Backend).upload(DType::U32, &[64, 2], &[0u32; 128]).unwrap();
    let error = plan(&hosts[0], &ids, 8, None, 63).map(|_| ()).unwrap_err();
    assert_eq!(argument(&error), ("rows", "63".into()));
    let planned = plan(&hosts[0], &ids, 8, None, 64).unwrap();
    assert_eq!(planned.counts, [64, 0], "with enough room nothing is dropped");
}

#[test]
fn b230_an_id_out_of_range_is_no_choice_and_a_count_stands_for_the_capacity() {
    let backend: &dyn Backend = &host();
    let ids = backend.upload(DType::U32, &[2, 2], &[0u32, 3, 4, NONE]).unwrap();
    assert_eq!(plan(backend, &ids, 4, None, 2).unwrap().counts, [1], "the second token has no choice");
    assert_eq!(plan(backend, &ids, 5, None, 2).unwrap().counts, [2]);
    let laid = lay_out([2, 2, 1], &[0; 4], &[1, 3], 0, 1, 4).unwrap();
    assert_eq!((laid.offsets, laid.row_slots), (vec![0, 3], vec![0, NONE, 1, 2]));
    // An expert twice in a row: there are no slots but those.
    let laid = lay_out([1, 2, 2], &[0; 4], &[2], 0, 1, 2).unwrap();
    assert_eq!((laid.offsets, laid.slot_rows, laid.row_slots), (vec![0, 2], vec![0, 0], vec![0, 1, NONE, NONE]));
}

/// Distinct choices of `k` experts, or fewer, for `tokens` tokens.
fn choices() -> impl Strategy<Value = (usize, usize, Vec<Vec<u32>>)> {
    (1usize..5, 1usize..5, 0usize..30).prop_flat_map(|(ranks, local, tokens)| {
        let experts = ranks * local;
        (1..=experts).prop_flat_map(move |k| {
            let all: Vec<u32> = (0..u32_of(experts)).collect();
            let token = (prop::sample::subsequence(all, k).prop_shuffle(), 0..=k).prop_map(|(mut ids, absent)| {
                // Now and then a token has fewer choices.
                if absent % 3 == 0 {
                    ids[..absent].fill(NONE);
                }
                ids
            });
            prop::collection::vec(token, tokens).prop_map(move |ids| (ranks, local, ids))
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn choices_are_those_of_a_sort((router, logits) in router()) {
        let rows: Vec<&[f32]> = logits.iter().map(|x| &x[..]).collect();
        let experts = rows[0].len();
        let routed = route(&router, &rows);
        let mut counts = vec![0u32; experts];
        for (t, ids) in routed.ids.chunks(router.k).enumerate() {
            let scores = &routed.scores[t * experts..][..experts];
            if router.valid.as_ref().is_some_and(|v| v[t] == 0) {
                prop_assert!(ids.iter().all(|&id| id == NONE));
                continue;
            }
            prop_assert_eq!(ids, &reference_choice(&router, scores)[..]);
            prop_assert_eq!(ids.iter().collect::<HashSet<_>>().len(), router.k);
            let sum = ids.iter().fold(0.0f32, |sum, &id| sum + scores[id as usize]);
            for (&id, weight) in ids.iter().zip(&routed.weights[t * router.k..]) {
                counts[id as usize] += 1;
                let score = scores[id as usize];
                let expected = if router.normalize { score / (sum + 1e-20) } else { score };
                prop_assert!(weight.to_bits() == expected.to_bits() || weight.is_nan() && expected.is_nan());
            }
        }
        prop_assert_eq!(&routed.counts, &counts);
        if router.balance.is_some() {
            prop_assert_eq!(&routed.sequence_counts, &counts);
        }
    }

    #[test]
    fn bits_do_not_depend_on_threads_or_instructions((router, logits) in router()) {
        let rows: Vec<&[f32]> = logits.iter().map(|x| &x[..]).collect();
        let d_weights: Vec<f32> = (0..rows.len() * router.k).map(|i| i as f32 / 7.0 - 3.0).collect();
        let plain = HostOptions { threads: 1, simd: Some(dropless_core::host::Simd::Plain), ..HostOptions::default() };
        let plain = try_route(&Host::new(plain).unwrap(), &router, &rows, &d_weights).unwrap();
        let best = try_route(&Host::new(HostOptions { threads: 3, ..HostOptions::default() }).unwrap(), &router, &rows, &d_weights);
        prop_assert_eq!(plain.bits(), best.unwrap().bits());
    }

    #[test]
    fn every_choice_is_sorted_exactly_once((ranks, local, ids) in choices(), windowed in any::<bool>()) {
        let (tokens, k) = (ids.len(), ids.first().map_or(1, Vec::len));
        // Every second token, or all of them.
        let window = (windowed && tokens % 2 == 0 && tokens > 0).then_some(Window { period: 2, from: 1, to: 2 });
        let selected: Vec<usize> = (0..tokens).filter(|&t| window.is_none_or(|w| w.contains(t))).collect();
        let capacity = selected.len().max(1);
        let hosts = Host::ranks(ranks, HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        let backend: &dyn Backend = &hosts[0];
        let uploaded = backend.upload(DType::U32, &[tokens, k], &ids.concat()).unwrap();
        let planned = plan(backend, &uploaded, ranks * local, window, capacity).unwrap();
        let mut sorted = 0;
        for rank in 0..ranks {
            let first = rank * local;
            let here = |t: &usize| ids[*t].iter().any(|&id| (first..first + local).contains(&(id as usize)));
            let expected: Vec<u32> = selected.iter().copied().filter(here).map(u32_of).collect();
            let rows = &planned.rows[rank * capacity..][..capacity];
            prop_assert_eq!(planned.counts[rank] as usize, expected.len());
            prop_assert_eq!(&rows[..expected.len()], &expected[..], "a token once for each rank, in order");
            prop_assert!(rows[expected.len()..].iter().all(|&row| row == NONE));
            for t in 0..tokens {
                let place = expected.iter().position(|&row| row as usize == t).map(|i| u32_of(rank * capacity + i));
                prop_assert_eq!(planned.positions[t * ranks + rank], place.unwrap_or(NONE));
            }

            let received: Vec<Vec<u32>> = expected.iter().map(|&t| ids[t as usize].clone()).collect();
            let mut buffer = received.concat();
            // What lies past the count looks like a choice and must not be read.
            buffer.resize(capacity * k, u32_of(first));
            let slots = capacity * k.min(local) + 3;
            let laid = lay_out([1, capacity, k], &buffer, &[u32_of(expected.len())], first, local, slots).unwrap();
            let (offsets, order) = reference_layout(&received, first, local);
            prop_assert_eq!(&laid.offsets, &offsets);
            for slot in 0..slots {
                let Some(&(row, choice)) = order.get(slot) else {
                    prop_assert_eq!((laid.slot_rows[slot], laid.slot_weights[slot]), (NONE, -1.0));
                    continue;
                };
                prop_assert_eq!(laid.slot_rows[slot], u32_of(row));
                prop_assert_eq!(laid.row_slots[row * k + choice], u32_of(slot));
                prop_assert_eq!(laid.slot_weights[slot], (row * k + choice) as f32);
            }
            prop_assert_eq!(laid.row_slots.iter().filter(|&&slot| slot != NONE).count(), order.len());
            sorted += order.len();
        }
        let chosen = selected.iter().flat_map(|&t| &ids[t]).filter(|&&id| id != NONE).count();
        prop_assert_eq!(sorted, chosen);
    }
}
