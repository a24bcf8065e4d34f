//! The exchange between ranks: bytes arrive where they belong, and a disagreement is an error on every rank.

use std::time::{Duration, Instant};

use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::{AllToAll, Counts};
use dropless_core::{Backend, DType, Error, Group, Memory, Result, Tensor};
use proptest::prelude::*;

/// Drives each rank by a thread of its own; a rank's `Host` is dropped when its work ends.
fn on_ranks<R: Send>(ranks: usize, timeout: Duration, work: impl Fn(&dyn Backend) -> R + Sync) -> Vec<R> {
    in_groups(ranks, None, timeout, work)
}

/// The same, with `expert_ranks` ranks in an expert-parallel group.
fn in_groups<R: Send>(
    ranks: usize,
    expert_ranks: Option<usize>,
    timeout: Duration,
    work: impl Fn(&dyn Backend) -> R + Sync,
) -> Vec<R> {
    let options = HostOptions { threads: 1, expert_ranks, timeout, ..HostOptions::default() };
    let hosts = Host::ranks(ranks, options).unwrap();
    std::thread::scope(|s| {
        let work = &work;
        let threads: Vec<_> = hosts.into_iter().map(|host| s.spawn(move || work(&host))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

const TIMEOUT: Duration = Duration::from_secs(60);
/// What a receive buffer holds before, to see what was written.
const OLD: u32 = 0xDEAD_BEEF;

/// The value of element `col` of row `row` that `source` sends to `destination`.
fn value(source: usize, destination: usize, row: usize, col: usize) -> u32 {
    u32::try_from(((source * 16 + destination) * 1024 + row) * 16 + col).unwrap()
}

/// A rank's buffers: rows of `cols` u32 in segments of `capacity`.
fn buffers(backend: &dyn Backend, capacity: usize, cols: usize) -> (Tensor, Tensor) {
    let (rank, ranks) = (backend.caps().rank, backend.caps().ranks);
    let mut send = Vec::new();
    for destination in 0..ranks {
        for row in 0..capacity {
            send.extend((0..cols).map(|col| value(rank, destination, row, col)));
        }
    }
    let shape = [ranks, capacity, cols];
    let recv = vec![OLD; send.len()];
    (backend.upload(DType::U32, &shape, &send).unwrap(), backend.upload(DType::U32, &shape, &recv).unwrap())
}

/// One exchange under the counts `sends` and `expects` of this rank; what it received.
fn exchange(backend: &dyn Backend, capacity: usize, sends: &[u32], expects: &[u32]) -> Result<Vec<u32>> {
    let (send, recv) = buffers(backend, capacity, 3);
    let outcome = exchange_into(backend, &send, &recv, sends, expects);
    let received = backend.download::<u32>(&recv).unwrap();
    if outcome.is_err() {
        assert!(received.iter().all(|&x| x == OLD), "a failed exchange wrote something");
    }
    outcome.map(|()| received)
}

fn exchange_into(b: &dyn Backend, send: &Tensor, recv: &Tensor, sends: &[u32], expects: &[u32]) -> Result<()> {
    let sends = b.upload(DType::U32, &[sends.len()], sends)?;
    let expects = b.upload(DType::U32, &[expects.len()], expects)?;
    AllToAll { group: Group::World, send, recv, counts: Some(Counts { send: &sends, recv: &expects }) }.run(b)
}

/// What rank `to` holds after an exchange of `counts[source][destination]` rows.
fn expected(counts: &[Vec<u32>], to: usize, capacity: usize) -> Vec<u32> {
    let mut all = Vec::new();
    for (source, sends) in counts.iter().enumerate() {
        for row in 0..capacity {
            all.extend((0..3).map(|col| if row < sends[to] as usize { value(source, to, row, col) } else { OLD }));
        }
    }
    all
}

fn column(counts: &[Vec<u32>], destination: usize) -> Vec<u32> {
    counts.iter().map(|sends| sends[destination]).collect()
}

/// The message of a collective's failure.
fn message(error: &Error) -> String {
    assert!(matches!(error, Error::Collective { op: "all_to_all", .. }), "{error}");
    error.to_string()
}

#[test]
fn whole_chunks_are_transposed_over_the_ranks() {
    for ranks in [1, 2, 3, 5] {
        let received = on_ranks(ranks, TIMEOUT, |backend| {
            let (send, recv) = buffers(backend, 4, 3);
            AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }.run(backend).unwrap();
            backend.download::<u32>(&recv).unwrap()
        });
        let counts = vec![vec![4; ranks]; ranks];
        for (rank, received) in received.iter().enumerate() {
            assert_eq!(*received, expected(&counts, rank, 4), "rank {rank} of {ranks}");
        }
    }
}

/// The ranks, and those that each gathers its members' numbers from.
fn gathered(expert_ranks: usize, group: Group) -> Vec<Vec<u32>> {
    in_groups(6, Some(expert_ranks), TIMEOUT, |backend| {
        let rank = u32::try_from(backend.caps().rank).unwrap();
        let send = backend.upload(DType::U32, &[1], &[rank]).unwrap();
        let recv = backend.alloc(DType::U32, &[backend.caps().size(group), 1], Memory::Device).unwrap();
        AllToAll { group, send: &send, recv: &recv, counts: None }.run(backend).unwrap();
        backend.download::<u32>(&recv).unwrap()
    })
}

#[test]
fn groups_exchange_among_themselves() {
    assert_eq!(gathered(2, Group::World), [[0, 1, 2, 3, 4, 5]; 6]);
    assert_eq!(gathered(2, Group::Experts), [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]);
    assert_eq!(gathered(2, Group::Replicas), [[0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5], [0, 2, 4], [1, 3, 5]]);
    assert_eq!(gathered(1, Group::Experts), [[0], [1], [2], [3], [4], [5]]);
    assert_eq!(gathered(6, Group::Replicas), [[0], [1], [2], [3], [4], [5]]);
}

#[test]
fn chunks_go_by_the_places_in_the_group() {
    let received = in_groups(4, Some(2), TIMEOUT, |backend| {
        let rank = u32::try_from(backend.caps().rank).unwrap();
        // One and two rows to the first and the second member; ranks 1 and 3 are the second of their rows.
        let send = backend.upload(DType::U32, &[2, 2, 1], &[10 * rank, 9, 10 * rank + 1, 10 * rank + 2]).unwrap();
        let recv = backend.upload(DType::U32, &[2, 2, 1], &[OLD; 4]).unwrap();
        let sends = backend.upload(DType::U32, &[2], &[1u32, 2]).unwrap();
        let expects = backend.upload(DType::U32, &[2], &[1 + rank % 2; 2]).unwrap();
        let counts = Some(Counts { send: &sends, recv: &expects });
        AllToAll { group: Group::Experts, send: &send, recv: &recv, counts }.run(backend).unwrap();
        backend.download::<u32>(&recv).unwrap()
    });
    assert_eq!(received, [[0, OLD, 10, OLD], [1, 2, 11, 12], [20, OLD, 30, OLD], [21, 22, 31, 32]]);
}

#[test]
fn a_group_reports_its_ranks_and_leaves_the_others_alone() {
    let outcomes = in_groups(4, Some(2), TIMEOUT, |backend| {
        // Ranks 1 and 3 hold the same experts, and disagree.
        let capacity = if backend.caps().rank == 3 { 2 } else { 1 };
        let (send, recv) = buffers(backend, capacity, 1);
        let [send, recv] = [send, recv].map(|t| t.slice(0, 2).unwrap());
        AllToAll { group: Group::Replicas, send: &send, recv: &recv, counts: None }
            .run(backend)
            .map_err(|e| message(&e))
    });
    let failed = |rank| Err(format!("rank {rank}: all_to_all: rank 1 has a capacity of 1 rows, but rank 3 one of 2"));
    assert_eq!(outcomes, [Ok(()), failed(1), Ok(()), failed(3)]);
}

#[test]
fn one_chunk_goes_to_everyone() {
    let received = on_ranks(3, TIMEOUT, |backend| {
        let rank = u16::try_from(backend.caps().rank).unwrap();
        let send = backend.upload(DType::Bf16, &[2, 3], &[10 * rank, 1, 2, 3, 4, rank]).unwrap();
        let recv = backend.upload(DType::Bf16, &[3, 2, 3], &[7u16; 18]).unwrap();
        AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }.run(backend).unwrap();
        backend.download::<u16>(&recv).unwrap()
    });
    for received in received {
        assert_eq!(received, [0, 1, 2, 3, 4, 0, 10, 1, 2, 3, 4, 1, 20, 1, 2, 3, 4, 2]);
    }
}

#[test]
fn empty_tensors_are_exchanged() {
    on_ranks(2, TIMEOUT, |backend| {
        for shape in [[2, 0, 3], [2, 3, 0]] {
            let send = backend.upload::<f32>(DType::F32, &shape, &[]).unwrap();
            let recv = backend.upload::<f32>(DType::F32, &shape, &[]).unwrap();
            AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }.run(backend).unwrap();
        }
    });
}

#[test]
fn a_sender_may_overwrite_its_tensor_at_once() {
    on_ranks(3, TIMEOUT, |backend| {
        let rank = u32::try_from(backend.caps().rank).unwrap();
        let send = backend.upload(DType::U32, &[3, 1, 256], &[0u32; 768]).unwrap();
        let recv = backend.upload(DType::U32, &[3, 1, 256], &[OLD; 768]).unwrap();
        for round in 0..200u32 {
            backend.write(&send, bytemuck::cast_slice(&[round * 8 + rank; 768])).unwrap();
            AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }.run(backend).unwrap();
            let received = backend.download::<u32>(&recv).unwrap();
            for (source, segment) in (0u32..).zip(received.chunks(256)) {
                assert!(segment.iter().all(|&x| x == round * 8 + source), "round {round}");
            }
        }
    });
}

#[test]
fn b150_zero_counts_do_not_hang() {
    let mut seed = 1u32;
    let mut matrices = vec![vec![vec![0, 3, 0, 1], vec![0, 0, 0, 0], vec![2, 0, 0, 5], vec![1, 0, 7, 0]]];
    for _ in 0..1000 {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Half of the pairs exchange nothing.
            (seed >> 24).saturating_sub(128) / 16
        };
        matrices.push((0..4).map(|_| (0..4).map(|_| next()).collect()).collect());
    }
    on_ranks(4, TIMEOUT, |backend| {
        let rank = backend.caps().rank;
        for counts in &matrices {
            let received = exchange(backend, 8, &counts[rank], &column(counts, rank)).unwrap();
            assert_eq!(received, expected(counts, rank, 8), "rank {rank}, counts {counts:?}");
        }
    });
}

#[test]
fn b151_counts_that_disagree_fail_on_every_rank() {
    let started = Instant::now();
    let errors = on_ranks(2, TIMEOUT, |backend| {
        let (sends, expects) = if backend.caps().rank == 0 { ([2, 1], [2, 0]) } else { ([0, 4], [3, 4]) };
        message(&exchange(backend, 4, &sends, &expects).unwrap_err())
    });
    for (rank, error) in errors.iter().enumerate() {
        let what = "rank 0 sends 1 rows to rank 1, which expects 3";
        assert_eq!(*error, format!("rank {rank}: all_to_all: {what}"));
    }
    assert!(started.elapsed() < TIMEOUT / 2);
}

#[test]
fn after_a_disagreement_the_next_exchange_works() {
    on_ranks(2, TIMEOUT, |backend| {
        exchange(backend, 4, &[1, 1], &[2, 2]).unwrap_err();
        assert_eq!(
            exchange(backend, 4, &[4, 4], &[4, 4]).unwrap(),
            expected(&[vec![4; 2], vec![4; 2]], backend.caps().rank, 4)
        );
    });
}

#[test]
fn b153_capacity_is_part_of_the_agreement() {
    let errors = on_ranks(2, TIMEOUT, |backend| {
        let capacity = if backend.caps().rank == 0 { 64 } else { 32 };
        message(&exchange(backend, capacity, &[0, 0], &[0, 0]).unwrap_err())
    });
    for error in errors {
        assert!(error.ends_with("rank 0 has a capacity of 64 rows, but rank 1 one of 32"), "{error}");
    }
    let errors = on_ranks(2, TIMEOUT, |backend| {
        let (sends, expects) = if backend.caps().rank == 0 { ([0, 0], [0, 40]) } else { ([40, 0], [0, 0]) };
        message(&exchange(backend, 32, &sends, &expects).unwrap_err())
    });
    for error in errors {
        assert!(error.ends_with("rank 1 sends 40 rows to rank 0, but a segment holds 32"), "{error}");
    }
}

#[test]
fn type_and_row_length_are_part_of_the_agreement() {
    let errors = on_ranks(2, TIMEOUT, |backend| {
        let dtype = if backend.caps().rank == 0 { DType::U32 } else { DType::F32 };
        let send = backend.upload(dtype, &[2, 1, 2], &[0u32; 4]).unwrap();
        let recv = backend.upload(dtype, &[2, 1, 2], &[0u32; 4]).unwrap();
        message(&AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }.run(backend).unwrap_err())
    });
    assert!(errors.iter().all(|e| e.ends_with("rank 0 exchanges U32, but rank 1 F32")), "{errors:?}");
    let errors = on_ranks(2, TIMEOUT, |backend| {
        let (send, recv) = buffers(backend, 2, backend.caps().rank + 1);
        message(&AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }.run(backend).unwrap_err())
    });
    assert!(errors.iter().all(|e| e.ends_with("rank 0 has rows of 1 elements, but rank 1 of 2")), "{errors:?}");
}

#[test]
fn a_shared_buffer_is_found_before_it_deadlocks() {
    let host = Host::new(HostOptions::default()).unwrap();
    let stack = host.alloc(DType::U32, &[2, 1, 2], Memory::Device).unwrap();
    let errors = on_ranks(2, TIMEOUT, |backend| {
        let (send, _) = buffers(backend, 1, 2);
        message(&AllToAll { group: Group::World, send: &send, recv: &stack, counts: None }.run(backend).unwrap_err())
    });
    assert!(errors.iter().all(|e| e.ends_with("rank 1 receives into a buffer that rank 0 uses")), "{errors:?}");
}

#[test]
fn a_rank_that_fails_elsewhere_is_named_to_the_others() {
    let started = Instant::now();
    let errors = on_ranks(3, TIMEOUT, |backend| match backend.caps().rank {
        1 => None,
        _ => Some(message(&exchange(backend, 1, &[1; 3], &[1; 3]).unwrap_err())),
    });
    for rank in [0, 2] {
        assert!(errors[rank].as_ref().unwrap().contains(" left"), "{errors:?}");
    }
    assert!(started.elapsed() < TIMEOUT / 2);
}

#[test]
fn a_rank_that_does_not_come_is_named_to_the_others() {
    let (done, wait) = std::sync::mpsc::channel::<()>();
    let wait = std::sync::Mutex::new(wait);
    let errors = on_ranks(2, Duration::from_millis(50), |backend| {
        if backend.caps().rank == 1 {
            wait.lock().unwrap().recv().unwrap();
            // Too late: rank 0 has given up.
            return message(&exchange(backend, 1, &[1; 2], &[1; 2]).unwrap_err());
        }
        let error = message(&exchange(backend, 1, &[1; 2], &[1; 2]).unwrap_err());
        done.send(()).unwrap();
        error
    });
    for (rank, error) in errors.iter().enumerate() {
        assert_eq!(*error, format!("rank {rank}: all_to_all: rank 1 did not arrive within 50ms"));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn ragged_rows_arrive(counts in (1usize..5).prop_flat_map(|n| prop::collection::vec(prop::collection::vec(0u32..=6, n), n))) {
        let received = on_ranks(counts.len(), TIMEOUT, |backend| {
            let rank = backend.caps().rank;
            exchange(backend, 6, &counts[rank], &column(&counts, rank)).unwrap()
        });
        for (rank, received) in received.iter().enumerate() {
            prop_assert_eq!(received, &expected(&counts, rank, 6));
        }
    }
}

/// What a rank brings to an exchange: what it sends, room for what it receives, and how many rows each takes.
struct Part {
    send: Tensor,
    recv: Tensor,
    sends: Tensor,
    receives: Tensor,
}

impl Part {
    const CAPACITY: usize = 5;

    fn new(backend: &dyn Backend, gathers: bool) -> Part {
        let (rank, ranks) = (backend.caps().rank, backend.caps().ranks);
        let (send, recv) = buffers(backend, Part::CAPACITY, 3);
        let rows = |from: usize, to: usize| u32::try_from((from * 3 + to) % (Part::CAPACITY + 1)).unwrap();
        let counts = |rows: Vec<u32>| backend.upload(DType::U32, &[ranks], &rows).unwrap();
        // A chunk for everyone has one count.
        let to = |rank: usize| if gathers { 0 } else { rank };
        Part {
            send: if gathers { send.index(0).unwrap() } else { send },
            recv,
            sends: counts((0..ranks).map(|other| rows(rank, to(other))).collect()),
            receives: counts((0..ranks).map(|other| rows(other, to(rank))).collect()),
        }
    }

    fn op(&self, counted: bool) -> AllToAll<'_> {
        let counts = counted.then_some(Counts { send: &self.sends, recv: &self.receives });
        AllToAll { group: Group::World, send: &self.send, recv: &self.recv, counts }
    }
}

#[test]
fn ranks_exchange_what_the_specification_says() {
    for (ranks, counted, gathers) in [(1, false, false), (3, true, false), (4, false, true), (2, true, true)] {
        let received = on_ranks(ranks, TIMEOUT, |backend| {
            let part = Part::new(backend, gathers);
            part.op(counted).run_in_order(backend).unwrap();
            backend.download::<u32>(&part.recv).unwrap()
        });
        let hosts = Host::ranks(ranks, HostOptions { threads: 1, ..HostOptions::default() }).unwrap();
        let backends: Vec<&dyn Backend> = hosts.iter().map(|host| host as &dyn Backend).collect();
        let parts: Vec<Part> = backends.iter().map(|backend| Part::new(*backend, gathers)).collect();
        let members = parts.iter().zip(&backends).map(|(part, &b)| (part.op(counted).check(b.caps()).unwrap(), b));
        let members: Vec<_> = members.collect();
        AllToAll::exchange(&members).unwrap();
        for ((part, backend), received) in parts.iter().zip(backends).zip(received) {
            assert_eq!(backend.download::<u32>(&part.recv).unwrap(), received, "{ranks} ranks, {counted}, {gathers}");
        }
    }
}
