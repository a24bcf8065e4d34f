//! Ranks in processes of their own, with a GPU each: what is exchanged arrives, by every way there is, and what goes
//! wrong ends every rank with the reason. To be started by a launcher:
//!
//! ```text
//! dropless launch --nproc 2 --program target/debug/deps/ranks-<hash> -- run
//! ```
//!
//! Started by `cargo test`, it says that it was skipped.

#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::process::ExitCode;
use std::time::{Duration, Instant};

use dropless_core::ops::{AllToAll, Counts};
use dropless_core::{Backend, Caps, DType, Error, Group, Memory, Result, Tensor, World};
use dropless_cuda::{Cuda, CudaOptions, Transport};
use dropless_tests::require::Need;

/// What a receive buffer holds before, to see what was written.
const OLD: u8 = 0xEE;

fn main() -> ExitCode {
    let world = match World::from_environment() {
        Ok(Some(world)) if world.ranks > 1 => world,
        Err(error) => panic!("{error}"),
        _ if Need::Ranks.required() => panic!("no launcher started this process"),
        _ => {
            println!("skipped: no launcher started this process");
            return ExitCode::SUCCESS;
        }
    };
    for transport in [Transport::Nccl, Transport::Peer] {
        let cuda = match open(&world, transport, None, Duration::from_secs(60)) {
            Err(Error::Collective { what, .. }) if what.contains("no NCCL") || what.contains("cannot map") => {
                say(&world, format_args!("{transport:?}: skipped: {what}"));
                continue;
            }
            opened => opened.unwrap(),
        };
        rows_arrive(&cuda, Group::World);
        long_segments_arrive(&cuda);
        a_sender_may_overwrite_its_tensor_at_once(&cuda);
        recorded_exchanges_arrive(&cuda);
        report_speed(&cuda, &world, transport);
        drop(cuda);
        // Every rank has its experts alone; all are replicas.
        let cuda = open(&world, transport, Some(1), Duration::from_secs(60)).unwrap();
        rows_arrive(&cuda, Group::Experts);
        rows_arrive(&cuda, Group::Replicas);
        drop(cuda);
        if world.ranks % 2 == 0 && world.ranks > 2 {
            let cuda = open(&world, transport, Some(2), Duration::from_secs(60)).unwrap();
            Group::ALL.into_iter().for_each(|group| rows_arrive(&cuda, group));
        }
        say(&world, format_args!("{transport:?}: rows arrive"));
        counts_that_disagree_fail(open(&world, transport, None, Duration::from_secs(60)).unwrap());
        capacities_that_disagree_fail(open(&world, transport, None, Duration::from_secs(20)).unwrap());
        a_rank_that_is_busy_is_waited_for(&open(&world, transport, None, Duration::from_secs(8)).unwrap());
        a_rank_is_not_busy_before_what_it_queued_has_ended(
            open(&world, transport, None, Duration::from_secs(8)).unwrap(),
        );
        a_rank_that_does_not_come_fails_all(open(&world, transport, None, Duration::from_secs(8)).unwrap());
        a_rank_that_leaves_is_named(open(&world, transport, None, Duration::from_secs(60)).unwrap());
        say(&world, format_args!("{transport:?}: what goes wrong is named"));
    }
    // The last one, since it costs a rank.
    a_rank_that_dies_is_named(open(&world, Transport::Auto, None, Duration::from_secs(60)).unwrap());
    println!("rank {}: all is well", world.rank);
    ExitCode::SUCCESS
}

fn open(world: &World, transport: Transport, expert_ranks: Option<usize>, timeout: Duration) -> Result<Cuda> {
    let (device, world) = (world.local_rank, Some(world.clone()));
    Cuda::new(&CudaOptions { device, world, expert_ranks, transport, timeout, ..CudaOptions::default() })
}

/// Prints once for all ranks.
fn say(world: &World, line: impl std::fmt::Display) {
    if world.rank == 0 {
        println!("{line}");
    }
}

/// Numbers that all ranks draw alike.
struct Draws(u64);

impl Draws {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(self.0 >> 33).unwrap() % end
    }
}

/// Byte `at` of the segment that rank `from` sends to member `to`.
fn byte(from: usize, to: usize, at: usize) -> u8 {
    let mixed = (from * 131 + to * 17 + 1).wrapping_mul(0x9E37_79B9).wrapping_add(at.wrapping_mul(0x85EB_CA6B));
    u8::try_from(mixed >> 7 & 0xFF).unwrap()
}

/// An exchange between the members of a group, the same at every rank but for the rank.
struct Problem {
    group: Group,
    dtype: DType,
    capacity: usize,
    cols: usize,
    gathers: bool,
    /// Rows from each member to each member, if they are counted.
    counts: Option<Vec<Vec<usize>>>,
    /// Elements before the views, so that they do not begin where buffers do.
    skipped: usize,
}

impl Problem {
    fn draw(draws: &mut Draws, group: Group, members: usize) -> Problem {
        let dtype = [DType::F32, DType::U32, DType::Bf16, DType::E4m3, DType::Ue8m0, DType::E2m1x2][draws.below(6)];
        let (capacity, cols) = (draws.below(300), draws.below(2100));
        let (gathers, counted) = (draws.below(3) == 0, draws.below(3) > 0);
        let mut row =
            || (0..members).map(|_| if draws.below(4) == 0 { 0 } else { draws.below(capacity + 1) }).collect();
        let counts = counted.then(|| (0..members).map(|_| row()).collect());
        let skipped = if draws.below(2) == 0 { 0 } else { draws.below(40) };
        Problem { group, dtype, capacity, cols, gathers, counts, skipped }
    }

    fn row_bytes(&self) -> usize {
        self.cols * self.dtype.size()
    }

    /// A view of this shape, some elements into a buffer of its own.
    fn view(&self, cuda: &Cuda, shape: &[usize]) -> Tensor {
        let elements = shape.iter().product::<usize>();
        let whole = cuda.alloc(self.dtype, &[self.skipped + elements], Memory::Device).unwrap();
        whole.slice(self.skipped, self.skipped + elements).unwrap().reshape(shape).unwrap()
    }

    /// What this rank sends.
    fn sent(&self, caps: &Caps) -> Vec<u8> {
        let (segment, segments) =
            (self.capacity * self.row_bytes(), if self.gathers { 1 } else { caps.size(self.group) });
        (0..segments).flat_map(|to| (0..segment).map(move |at| byte(caps.rank, to, at))).collect()
    }

    /// What this rank holds afterwards.
    fn expected(&self, caps: &Caps) -> Vec<u8> {
        let (place, segment) = (caps.place(self.group), self.capacity * self.row_bytes());
        let mut all = Vec::with_capacity(caps.size(self.group) * segment);
        for (member, rank) in caps.members(self.group).enumerate() {
            let rows = self.counts.as_ref().map_or(self.capacity, |counts| counts[member][place]);
            let to = if self.gathers { 0 } else { place };
            let value = |at| if at < rows * self.row_bytes() { byte(rank, to, at) } else { OLD };
            all.extend((0..segment).map(value));
        }
        all
    }

    fn check(&self, cuda: &Cuda) {
        let caps = cuda.caps();
        let (members, place) = (caps.size(self.group), caps.place(self.group));
        let recv = self.view(cuda, &[members, self.capacity, self.cols]);
        let send = if self.gathers {
            self.view(cuda, &[self.capacity, self.cols])
        } else {
            self.view(cuda, &[members, self.capacity, self.cols])
        };
        cuda.write(&send, &self.sent(caps)).unwrap();
        cuda.write(&recv, &vec![OLD; recv.bytes()]).unwrap();
        let counts = self.counts.as_ref().map(|counts| {
            let sends = counts[place].clone();
            [numbers(cuda, &sends), numbers(cuda, &counts.iter().map(|to| to[place]).collect::<Vec<_>>())]
        });
        let counts = counts.as_ref().map(|[send, recv]| Counts { send, recv });
        AllToAll { group: self.group, send: &send, recv: &recv, counts }.run_in_order(cuda).unwrap();
        let mut received = vec![0; recv.bytes()];
        cuda.read(&recv, &mut received).unwrap();
        let expected = self.expected(caps);
        let wrong = received.iter().zip(&expected).position(|(a, b)| a != b);
        let Problem { group, dtype, capacity, cols, gathers, counts, skipped } = self;
        assert_eq!(
            wrong, None,
            "rank {}, {group:?}, {dtype:?}[{members}, {capacity}, {cols}], gathers {gathers}, counts {counts:?}, skipped \
             {skipped}: the first wrong byte",
            caps.rank
        );
    }
}

fn numbers(cuda: &Cuda, values: &[usize]) -> Tensor {
    let values: Vec<u32> = values.iter().map(|&value| u32::try_from(value).unwrap()).collect();
    (cuda as &dyn Backend).upload(DType::U32, &[values.len()], &values).unwrap()
}

fn rows_arrive(cuda: &Cuda, group: Group) {
    let mut draws = Draws(7);
    for _ in 0..100 {
        // The members of a group draw alike, whichever group it is.
        Problem::draw(&mut draws, group, cuda.caps().size(group)).check(cuda);
    }
}

/// Longer than a round through mapped memory, and a row more.
fn long_segments_arrive(cuda: &Cuda) {
    let (capacity, cols) = (601, 1 << 20);
    let counts = vec![vec![capacity - 1; cuda.caps().ranks]; cuda.caps().ranks];
    let long = |gathers, counts| Problem {
        group: Group::World,
        dtype: DType::E4m3,
        capacity,
        cols,
        gathers,
        counts,
        skipped: 0,
    };
    long(false, Some(counts)).check(cuda);
    long(true, None).check(cuda);
}

fn a_sender_may_overwrite_its_tensor_at_once(cuda: &Cuda) {
    let backend: &dyn Backend = cuda;
    let (rank, ranks) = (u32::try_from(cuda.caps().rank).unwrap(), cuda.caps().ranks);
    let send = backend.upload(DType::U32, &[ranks, 1, 256], &vec![0u32; ranks * 256]).unwrap();
    let recv = backend.upload(DType::U32, &[ranks, 1, 256], &vec![0u32; ranks * 256]).unwrap();
    for round in 0..500u32 {
        cuda.write(&send, bytemuck::cast_slice(&vec![round * 16 + rank; ranks * 256])).unwrap();
        AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }.run_in_order(cuda).unwrap();
        for (source, segment) in (0u32..).zip(backend.download::<u32>(&recv).unwrap().chunks(256)) {
            assert!(segment.iter().all(|&x| x == round * 16 + source), "round {round}, rank {source}");
        }
    }
}

/// One recording moves what the tensors and the counts hold at each launch.
fn recorded_exchanges_arrive(cuda: &Cuda) {
    let backend: &dyn Backend = cuda;
    let (rank, ranks, capacity) = (cuda.caps().rank, cuda.caps().ranks, 5);
    let shape = [ranks, capacity, 3];
    let send = backend.alloc(DType::U32, &shape, Memory::Device).unwrap();
    let recv = backend.alloc(DType::U32, &shape, Memory::Device).unwrap();
    let [sends, expects] = [(); 2].map(|()| numbers(cuda, &vec![0; ranks]));
    let op = AllToAll {
        group: Group::World,
        send: &send,
        recv: &recv,
        counts: Some(Counts { send: &sends, recv: &expects }),
    };
    // What is compiled and connected at the first use cannot be recorded.
    op.run_in_order(cuda).unwrap();
    let mut graph = cuda.capture(|| op.run_in_order(cuda)).unwrap();
    for round in 1..20 {
        let rows = |from: usize, to: usize| (round + from * 2 + to) % (capacity + 1);
        let value =
            |from: usize, to: usize, at: usize| u32::try_from(round * 10_000 + from * 1000 + to * 100 + at).unwrap();
        let sent: Vec<u32> = (0..ranks).flat_map(|to| (0..15).map(move |at| value(rank, to, at))).collect();
        let words = |counts: Vec<usize>| counts.iter().map(|&rows| u32::try_from(rows).unwrap()).collect::<Vec<u32>>();
        cuda.write(&send, bytemuck::cast_slice(&sent)).unwrap();
        cuda.write(&recv, &vec![OLD; recv.bytes()]).unwrap();
        cuda.write(&sends, bytemuck::cast_slice(&words((0..ranks).map(|to| rows(rank, to)).collect()))).unwrap();
        cuda.write(&expects, bytemuck::cast_slice(&words((0..ranks).map(|from| rows(from, rank)).collect()))).unwrap();
        graph.launch().unwrap();
        let received = backend.download::<u32>(&recv).unwrap();
        for (at, &found) in received.iter().enumerate() {
            let (from, at) = (at / 15, at % 15);
            let expected = if at < rows(from, rank) * 3 { value(from, rank, at) } else { u32::from_ne_bytes([OLD; 4]) };
            assert_eq!(found, expected, "round {round}, element {at} from rank {from}");
        }
    }
}

/// Bytes that leave a device for each of the others, and the time of all of it.
fn report_speed(cuda: &Cuda, world: &World, transport: Transport) {
    let (ranks, rows, cols) = (world.ranks, 16_384, 7168);
    let shape = [ranks, rows, cols];
    let [send, recv] = [(); 2].map(|()| cuda.alloc(DType::Bf16, &shape, Memory::Device).unwrap());
    let counts = numbers(cuda, &vec![rows; ranks]);
    let op = AllToAll {
        group: Group::World,
        send: &send,
        recv: &recv,
        counts: Some(Counts { send: &counts, recv: &counts }),
    };
    let mut times: Vec<Duration> = (0..12)
        .map(|_| {
            cuda.wait().unwrap();
            let started = Instant::now();
            op.run_in_order(cuda).unwrap();
            cuda.wait().unwrap();
            started.elapsed()
        })
        .collect();
    times.sort();
    let (time, bytes) = (times[times.len() / 2], (ranks - 1) * rows * cols * 2);
    let rate = bytes as f64 / time.as_secs_f64() / 1e9;
    say(world, format_args!("{transport:?}: {bytes} bytes from each rank in {time:?}: {rate:.0} GB/s (median of 12)"));
}

/// Queues an exchange of single rows under these counts.
fn queue(cuda: &Cuda, capacity: usize, sends: &[usize], expects: &[usize]) -> Result<()> {
    let shape = [cuda.caps().ranks, capacity, 4];
    let send = cuda.alloc(DType::F32, &shape, Memory::Device)?;
    let recv = cuda.alloc(DType::F32, &shape, Memory::Device)?;
    let (sends, expects) = (numbers(cuda, sends), numbers(cuda, expects));
    let counts = Some(Counts { send: &sends, recv: &expects });
    AllToAll { group: Group::World, send: &send, recv: &recv, counts }.run_in_order(cuda)
}

/// The same, until it has ended.
fn exchange(cuda: &Cuda, capacity: usize, sends: &[usize], expects: &[usize]) -> Result<()> {
    queue(cuda, capacity, sends, expects)?;
    cuda.wait()
}

/// Exchanges until one fails; the reason, and how long that took.
fn until_it_fails(cuda: &Cuda, capacity: usize, sends: &[usize], expects: &[usize]) -> (String, Duration) {
    let started = Instant::now();
    loop {
        match exchange(cuda, capacity, sends, expects) {
            Err(Error::Collective { what, .. }) => return (what, started.elapsed()),
            Err(error) => panic!("{error}"),
            Ok(()) => assert!(started.elapsed() < Duration::from_secs(60), "nothing fails"),
        }
    }
}

fn counts_that_disagree_fail(cuda: Cuda) {
    let (rank, ranks) = (cuda.caps().rank, cuda.caps().ranks);
    exchange(&cuda, 4, &vec![1; ranks], &vec![1; ranks]).unwrap();
    // Rank 0 sends rank 1 a row more than it expects.
    let mut sends = vec![1; ranks];
    sends[1] += usize::from(rank == 0);
    let (what, _) = until_it_fails(&cuda, 4, &sends, &vec![1; ranks]);
    assert!(what.ends_with("rank 0 sends 2 rows to rank 1, which expects 1"), "rank {rank}: {what}");
}

fn capacities_that_disagree_fail(cuda: Cuda) {
    let (rank, ranks) = (cuda.caps().rank, cuda.caps().ranks);
    let (what, _) = until_it_fails(&cuda, if rank == 0 { 64 } else { 32 }, &vec![0; ranks], &vec![0; ranks]);
    // NCCL may be stuck in segments of different lengths before the reason is known.
    let named = what.contains("has a capacity of") || what.contains("has not ended within");
    assert!(named, "rank {rank}: {what}");
}

fn a_rank_that_is_busy_is_waited_for(cuda: &Cuda) {
    let (rank, ranks) = (cuda.caps().rank, cuda.caps().ranks);
    for _ in 0..2 {
        if rank == 1 {
            cuda.caps().timeouts.suspend().unwrap();
            std::thread::sleep(Duration::from_secs(6));
            cuda.caps().timeouts.resume().unwrap();
        }
        exchange(cuda, 4, &vec![1; ranks], &vec![1; ranks]).unwrap();
    }
}

/// Else nobody would miss an exchange that does not end while all who wait for it are busy.
fn a_rank_is_not_busy_before_what_it_queued_has_ended(cuda: Cuda) {
    let (rank, ranks) = (cuda.caps().rank, cuda.caps().ranks);
    let started = Instant::now();
    if rank == 1 {
        std::thread::sleep(Duration::from_secs(6));
    } else {
        queue(&cuda, 4, &vec![1; ranks], &vec![1; ranks]).unwrap();
    }
    let busy = cuda.caps().timeouts.suspend();
    let Err(Error::Collective { what, .. }) = busy else { panic!("rank {rank}: {busy:?}") };
    assert!(started.elapsed() < Duration::from_secs(8), "rank {rank}: {what} after {:?}", started.elapsed());
    assert!(what.contains("exchange 1 of the group World"), "rank {rank}: {what}");
}

fn a_rank_that_does_not_come_fails_all(cuda: Cuda) {
    let (rank, ranks) = (cuda.caps().rank, cuda.caps().ranks);
    exchange(&cuda, 4, &vec![1; ranks], &vec![1; ranks]).unwrap();
    if rank == 1 {
        std::thread::sleep(Duration::from_secs(6));
    }
    let (what, after) = until_it_fails(&cuda, 4, &vec![1; ranks], &vec![1; ranks]);
    assert!(after < Duration::from_secs(8), "rank {rank}: {what} after {after:?}");
    assert!(what.contains("exchange 2 of the group World"), "rank {rank}: {what}");
}

fn a_rank_that_leaves_is_named(cuda: Cuda) {
    let (rank, ranks) = (cuda.caps().rank, cuda.caps().ranks);
    exchange(&cuda, 4, &vec![1; ranks], &vec![1; ranks]).unwrap();
    if rank == 1 {
        return;
    }
    let (what, after) = until_it_fails(&cuda, 4, &vec![1; ranks], &vec![1; ranks]);
    assert!(what.contains("rank 1 left before exchange 2"), "rank {rank}: {what}");
    assert!(after < Duration::from_secs(5), "{after:?}");
}

fn a_rank_that_dies_is_named(cuda: Cuda) {
    let (rank, ranks) = (cuda.caps().rank, cuda.caps().ranks);
    exchange(&cuda, 4, &vec![1; ranks], &vec![1; ranks]).unwrap();
    if rank == 1 {
        // No destructor runs, as none would if it were killed.
        println!("rank 1: all is well");
        std::process::exit(0);
    }
    let (what, after) = until_it_fails(&cuda, 4, &vec![1; ranks], &vec![1; ranks]);
    assert!(what.contains("rank 1 is gone"), "rank {rank}: {what}");
    assert!(after < Duration::from_secs(5), "{after:?}");
}
