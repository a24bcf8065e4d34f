//! Memory, copies and the exchange between ranks on wgpu: bytes arrive where they belong and touch nothing else.

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "tests may panic, and their numbers are small"
)]

use dropless_core::ops::{
    Add, AllToAll, Counts, EmbeddingGrad, Fill, GatherRows, GemmKind, GroupedGemm, Offload, Operand,
};
use dropless_core::{Backend, DType, Error, Group, Memory, NumericModel};
use dropless_tests::differential::{Random, Ranks, UNDER_TEST, host};
use dropless_wgpu::{Wgpu, WgpuOptions};

/// Ranks on one device, or none where there is no adapter.
fn ranks(n: usize) -> Ranks {
    ranks_under(n, NumericModel::Hopper)
}

fn ranks_under(n: usize, numerics: NumericModel) -> Ranks {
    let wgpu = UNDER_TEST.iter().find(|candidate| candidate.name == "wgpu").unwrap();
    if let Err(why) = wgpu.device() {
        println!("skipped: {why}");
        return Vec::new();
    }
    (wgpu.open)(n, numerics).unwrap()
}

/// One rank.
fn open() -> Option<Box<dyn Backend>> {
    ranks(1).pop()
}

#[test]
fn views_at_any_byte_are_written_and_read() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    let mut random = Random(1);
    for dtype in [DType::U32, DType::Bf16, DType::E4m3] {
        let size = dtype.size();
        let mut want: Vec<u8> = random.elements(DType::U32, 400 * size / 4);
        let whole = backend.upload(dtype, &[400], &want).unwrap();
        for _ in 0..40 {
            let from = random.below(400);
            let to = from + random.below(401 - from);
            let bytes = random.elements(DType::E4m3, (to - from) * size);
            backend.write(&whole.slice(from, to).unwrap(), &bytes).unwrap();
            want[from * size..to * size].copy_from_slice(&bytes);
            let (a, b) = (random.below(200), 200 + random.below(200));
            let part: Vec<u8> = backend.download(&whole.slice(a, b).unwrap()).unwrap();
            assert_eq!(part, want[a * size..b * size], "{dtype:?} {a}..{b}");
        }
        assert_eq!(backend.download::<u8>(&whole).unwrap(), want, "{dtype:?}");
    }
}

#[test]
fn a_write_waits_for_what_was_queued_before() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    let x = backend.upload(DType::F32, &[1000], &[1f32; 1000]).unwrap();
    let y = backend.alloc(DType::F32, &[1000], Memory::Device).unwrap();
    for round in 0..100u8 {
        let value = f32::from(round);
        backend.write(&x, bytemuck::cast_slice(&[value; 1000])).unwrap();
        dropless_core::ops::Cast { x: &x, out: &y }.run(backend).unwrap();
        // The cast is queued; this must not reach it.
        backend.write(&x, bytemuck::cast_slice(&[-1f32; 1000])).unwrap();
        assert_eq!(backend.download::<f32>(&y).unwrap(), [value; 1000]);
    }
}

#[test]
fn empty_tensors_are_nothing_to_do() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    let empty = backend.upload::<f32>(DType::F32, &[0, 3], &[]).unwrap();
    Fill { out: &empty, value: 1.0 }.run(backend).unwrap();
    assert_eq!(backend.download::<f32>(&empty).unwrap(), [0f32; 0]);
    // An empty view at the very end of a buffer.
    let whole = backend.upload(DType::F32, &[64], &[2f32; 64]).unwrap();
    Fill { out: &whole.slice(64, 64).unwrap(), value: 1.0 }.run(backend).unwrap();
    assert_eq!(backend.download::<f32>(&whole).unwrap(), [2f32; 64]);
}

#[test]
fn b250_dispatches_are_folded_past_one_dimension() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    // One workgroup of 64 past what a dimension holds, with one lane in use, and a full one.
    for len in [65535 * 64 + 1, 65536 * 64] {
        let before: Vec<f32> = (0..len).map(|i| (i % 8191) as f32).collect();
        let x = backend.upload(DType::F32, &[len], &before).unwrap();
        let one = backend.alloc(DType::F32, &[len], Memory::Device).unwrap();
        let out = backend.alloc(DType::F32, &[len], Memory::Device).unwrap();
        Fill { out: &one, value: 1.0 }.run(backend).unwrap();
        Add { a: &x, b: &one, c: None, out: &out }.run(backend).unwrap();
        let after = backend.download::<f32>(&out).unwrap();
        assert!(before.iter().zip(&after).all(|(before, after)| before + 1.0 == *after));

        // Each row from the other end.
        let index: Vec<u32> = (0..len as u32).rev().collect();
        let index = backend.upload(DType::U32, &[len], &index).unwrap();
        let (x, out) = (x.reshape(&[len, 1]).unwrap(), out.reshape(&[len, 1]).unwrap());
        GatherRows { x: &x, index: &index, out: &out }.run(backend).unwrap();
        assert!(backend.download::<f32>(&out).unwrap().iter().eq(before.iter().rev()));
    }
}

#[test]
fn b250_products_of_more_tiles_than_one_dimension_holds() {
    let Some(wgpu) = ranks_under(1, NumericModel::F32).pop() else { return };
    let backend: &dyn Backend = &*wgpu;
    // A workgroup has 16 rows.
    let rows = 65536 * 16 + 1;
    let values: Vec<f32> = (0..rows).map(|i| (i % 8191) as f32).collect();
    let a = backend.upload(DType::F32, &[rows, 1], &values).unwrap();
    let b = backend.upload(DType::F32, &[1, 1, 1], &[3f32]).unwrap();
    let out = backend.alloc(DType::F32, &[rows, 1], Memory::Device).unwrap();
    let offsets = backend.upload(DType::U32, &[2], &[0, rows as u32]).unwrap();
    let (a, b) = (Operand::plain(&a), Operand::plain(&b));
    let product = GroupedGemm { kind: GemmKind::Forward, a, b, offsets: &offsets, out: &out, accumulate: false };
    product.run(backend).unwrap();
    assert!(backend.download::<f32>(&out).unwrap().iter().zip(&values).all(|(out, x)| *out == x * 3.0));
}

#[test]
fn b251_tensors_past_the_default_limits() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    for mib in [128usize, 256] {
        let len = (mib << 18) + 1;
        let tensor = match backend.alloc(DType::F32, &[len], Memory::Device) {
            Ok(tensor) => tensor,
            Err(Error::Capacity { needed, available, .. }) => {
                assert!(needed == len as u64 * 4 && needed > available, "{needed} of {available}");
                continue;
            }
            Err(other) => panic!("{other}"),
        };
        let last = tensor.slice(len - 2, len).unwrap();
        backend.write(&last, bytemuck::cast_slice(&[7f32; 2])).unwrap();
        Fill { out: &tensor, value: 5.0 }.run(backend).unwrap();
        assert_eq!(backend.download::<f32>(&last).unwrap(), [5.0; 2]);
    }
}

#[test]
fn b258_sums_at_one_index_lose_nothing() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    let ids: Vec<u32> = [vec![0u32; 1000], vec![1; 1000], (0..20_000).map(|i| 2 + i % 254).collect()].concat();
    let dy = backend.upload(DType::F32, &[ids.len(), 1], &vec![1f32; ids.len()]).unwrap();
    let mut counts = vec![0f32; 256];
    ids.iter().for_each(|&id| counts[id as usize] += 1.0);
    let ids = backend.upload(DType::U32, &[ids.len()], &ids).unwrap();
    for _ in 0..50 {
        let d_table = backend.upload(DType::F32, &[1, 256, 1], &[0f32; 256]).unwrap();
        EmbeddingGrad { dy: &dy, ids: &ids, d_table: &d_table }.run(backend).unwrap();
        assert_eq!(backend.download::<f32>(&d_table).unwrap(), counts);
    }
}

#[test]
fn b25a_a_read_waits_for_all_that_was_queued() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    let one = backend.upload(DType::F32, &[1], &[1f32]).unwrap();
    let sums = [0, 1].map(|_| backend.upload(DType::F32, &[1], &[0f32]).unwrap());
    for step in 0..1000usize {
        let (from, to) = (&sums[step % 2], &sums[(step + 1) % 2]);
        Add { a: from, b: &one, c: None, out: to }.run(backend).unwrap();
    }
    assert_eq!(backend.download::<f32>(&sums[0]).unwrap(), [1000.0]);

    // One long chain of products.
    let (rows, k) = (64, 1 << 16);
    let a = backend.upload(DType::Bf16, &[rows, k], &vec![0x3F80u16; rows * k]).unwrap();
    let b = backend.upload(DType::Bf16, &[1, 64, k], &vec![0x3F80u16; 64 * k]).unwrap();
    let out = backend.upload(DType::F32, &[rows, 64], &vec![0f32; rows * 64]).unwrap();
    let offsets = backend.upload(DType::U32, &[2], &[0, rows as u32]).unwrap();
    let (a, b) = (Operand::plain(&a), Operand::plain(&b));
    let product = GroupedGemm { kind: GemmKind::Forward, a, b, offsets: &offsets, out: &out, accumulate: false };
    product.run(backend).unwrap();
    assert_eq!(backend.download::<f32>(&out).unwrap(), vec![k as f32; rows * 64]);
}

#[test]
fn b251_too_large_a_tensor_is_refused_with_numbers() {
    let Some(wgpu) = open() else { return };
    let available = wgpu.caps().max_buffer_bytes;
    let elements = usize::try_from(available / 4).unwrap() + 1;
    match wgpu.alloc(DType::F32, &[elements], Memory::Device) {
        Err(Error::Capacity { needed, available: limit, .. }) => {
            assert_eq!((needed, limit), (elements as u64 * 4, available));
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(wgpu.alloc(DType::F32, &[usize::MAX, 8], Memory::Device), Err(Error::Capacity { .. })));
    assert!(matches!(wgpu.alloc(DType::F32, &[usize::MAX, 8], Memory::Host), Err(Error::Capacity { .. })));
}

#[test]
fn tensors_of_other_backends_and_devices_are_refused() {
    let Some(wgpu) = open() else { return };
    let host = host(1, NumericModel::Hopper).unwrap().remove(0);
    let foreign = host.upload(DType::F32, &[1], &[1f32]).unwrap();
    let other = open().unwrap();
    let elsewhere = other.upload(DType::F32, &[1], &[1f32]).unwrap();
    for tensor in [foreign, elsewhere] {
        let filled = Fill { out: &tensor, value: 0.0 }.run(&*wgpu);
        assert!(matches!(filled, Err(Error::ForeignTensor { backend: "wgpu", .. })), "{filled:?}");
    }
}

#[test]
fn an_unknown_adapter_is_an_error() {
    let opened = Wgpu::new(&WgpuOptions { adapter: Some("no such adapter".into()), ..WgpuOptions::default() });
    assert!(matches!(opened, Err(Error::Unavailable { backend: "wgpu", .. })), "{opened:?}");
}

#[test]
fn offloaded_tensors_come_back() {
    let Some(wgpu) = open() else { return };
    let backend: &dyn Backend = &*wgpu;
    let mut random = Random(2);
    for len in [0, 1, 3, 1000] {
        let codes = random.elements(DType::Bf16, len);
        let device = backend.upload(DType::Bf16, &[len], &codes).unwrap();
        let host = backend.alloc(DType::Bf16, &[len], Memory::Host).unwrap();
        Offload { from: &device, to: &host }.run(backend).unwrap();
        // The copy is queued; this must not reach it.
        Fill { out: &device, value: 7.0 }.run(backend).unwrap();
        let back = backend.alloc(DType::Bf16, &[len], Memory::Device).unwrap();
        Offload { from: &host, to: &back }.run(backend).unwrap();
        assert_eq!(backend.download::<u8>(&back).unwrap(), codes);
        assert_eq!(backend.download::<u8>(&host).unwrap(), codes);
        backend.write(&host, &vec![5; len * 2]).unwrap();
        assert_eq!(backend.download::<u8>(&host).unwrap(), vec![5; len * 2]);
    }
}

#[test]
fn rows_are_exchanged_between_ranks() {
    for dtype in [DType::U32, DType::Bf16, DType::E4m3] {
        let all = ranks(3);
        let (capacity, cols, size) = (5, 3, dtype.size());
        let count = |from: usize, to: usize| (from * 2 + to) % 6;
        let value = |from: usize, to: usize, i: usize| (from * 89 + to * 31 + i * 7) as u8;
        let chunk = capacity * cols * size;
        std::thread::scope(|s| {
            for wgpu in all {
                s.spawn(move || {
                    let (backend, rank): (&dyn Backend, _) = (&*wgpu, wgpu.caps().rank);
                    let sent: Vec<u8> = (0..3).flat_map(|to| (0..chunk).map(move |i| value(rank, to, i))).collect();
                    let send = backend.upload(dtype, &[3, capacity, cols], &sent).unwrap();
                    let recv = backend.upload(dtype, &[3, capacity, cols], &vec![0xEEu8; 3 * chunk]).unwrap();
                    let counts = |of: &dyn Fn(usize) -> usize| {
                        let counts: Vec<u32> = (0..3).map(|other| of(other) as u32).collect();
                        backend.upload(DType::U32, &[3], &counts).unwrap()
                    };
                    let (out, into) = (counts(&|to| count(rank, to)), counts(&|from| count(from, rank)));
                    let counts = Some(Counts { send: &out, recv: &into });
                    AllToAll { group: Group::World, send: &send, recv: &recv, counts }.run(backend).unwrap();
                    let got = backend.download::<u8>(&recv).unwrap();
                    for from in 0..3 {
                        let rows = count(from, rank) * cols * size;
                        let want = (0..chunk).map(|i| if i < rows { value(from, rank, i) } else { 0xEE });
                        assert!(want.eq(got[from * chunk..(from + 1) * chunk].iter().copied()), "{from} to {rank}");
                    }
                });
            }
        });
    }
}

#[test]
fn groups_exchange_among_themselves() {
    if ranks(1).is_empty() {
        return;
    }
    let options = WgpuOptions { expert_ranks: Some(2), ..WgpuOptions::default() };
    std::thread::scope(|s| {
        for wgpu in Wgpu::ranks(4, &options).unwrap() {
            s.spawn(move || {
                let (backend, rank): (&dyn Backend, _) = (&wgpu, wgpu.caps().rank);
                for (group, from) in [
                    (Group::World, vec![0u32, 1, 2, 3]),
                    (Group::Experts, [[0, 1], [2, 3]][rank / 2].to_vec()),
                    (Group::Replicas, [[0, 2], [1, 3]][rank % 2].to_vec()),
                ] {
                    let send = backend.upload(DType::U32, &[1], &[rank as u32]).unwrap();
                    let recv = backend.alloc(DType::U32, &[from.len(), 1], Memory::Device).unwrap();
                    AllToAll { group, send: &send, recv: &recv, counts: None }.run(backend).unwrap();
                    assert_eq!(backend.download::<u32>(&recv).unwrap(), from, "rank {rank} {group:?}");
                }
            });
        }
    });
}

#[test]
fn b151_counts_that_disagree_fail_on_every_rank() {
    let all = ranks(2);
    std::thread::scope(|s| {
        for wgpu in all {
            s.spawn(move || {
                let (backend, rank): (&dyn Backend, _) = (&*wgpu, wgpu.caps().rank);
                let send = backend.upload(DType::U32, &[2, 4, 1], &[1u32; 8]).unwrap();
                let recv = backend.upload(DType::U32, &[2, 4, 1], &[9u32; 8]).unwrap();
                let (sends, expects) = if rank == 0 { ([2u32, 1], [2u32, 0]) } else { ([0, 4], [3, 4]) };
                let (out, into) = (
                    backend.upload(DType::U32, &[2], &sends).unwrap(),
                    backend.upload(DType::U32, &[2], &expects).unwrap(),
                );
                let counts = Some(Counts { send: &out, recv: &into });
                let error =
                    AllToAll { group: Group::World, send: &send, recv: &recv, counts }.run(backend).unwrap_err();
                let what = "rank 0 sends 1 rows to rank 1, which expects 3";
                assert_eq!(error.to_string(), format!("rank {rank}: all_to_all: {what}"));
                assert_eq!(backend.download::<u32>(&recv).unwrap(), [9; 8], "a failed exchange wrote something");
            });
        }
    });
}
