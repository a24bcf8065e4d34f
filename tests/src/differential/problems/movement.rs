//! Ops that move bytes: offload and the exchange between ranks.

use dropless_core::ops::{AllToAll, Counts, Offload};
use dropless_core::{DType, Group, Memory};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: [Problem; 3] = [
    Problem::new("offload", offload),
    Problem { ranks: 3, ..Problem::new("all_to_all", all_to_all) },
    Problem { ranks: 2, ..Problem::new("all_to_all_gather", gather) },
];

const TYPES: [DType; 4] = [DType::F32, DType::U32, DType::Bf16, DType::E4m3];

fn offload(m: &mut Maker<'_>) {
    let (dtype, shape) = (m.one_of(&TYPES), [m.below(20), m.extent(200)]);
    let device = m.tensor(dtype, &shape);
    let kept = m.output_in("kept", dtype, &shape, Memory::Host);
    let back = m.output("back", dtype, &shape);
    m.run(Offload { from: &device, to: &kept }, Offload::run);
    m.run(Offload { from: &kept, to: &back }, Offload::run);
}

fn all_to_all(m: &mut Maker<'_>) {
    let (dtype, ranks, rank) = (m.one_of(&TYPES), m.ranks(), m.rank());
    let shape = [ranks, m.extent(40), m.extent(20)];
    let counted = m.flag();
    let rows: Vec<u32> = (0..ranks * ranks).map(|_| m.below(shape[1] + 1) as u32).collect();
    let sends: Vec<u32> = (0..ranks).map(|to| rows[rank * ranks + to]).collect();
    let expects: Vec<u32> = (0..ranks).map(|from| rows[from * ranks + rank]).collect();
    let (sends, expects) = (m.integers(&[ranks], &sends), m.integers(&[ranks], &expects));
    let (send, recv) = (m.tensor(dtype, &shape), m.output("recv", dtype, &shape));
    let counts = counted.then_some(Counts { send: &sends, recv: &expects });
    m.run(AllToAll { group: Group::World, send: &send, recv: &recv, counts }, AllToAll::run);
}

fn gather(m: &mut Maker<'_>) {
    let dtype = m.one_of(&TYPES);
    let (ranks, capacity, cols) = (m.ranks(), m.extent(40), m.extent(20));
    let send = m.tensor(dtype, &[capacity, cols]);
    let recv = m.output("recv", dtype, &[ranks, capacity, cols]);
    m.run(AllToAll { group: Group::World, send: &send, recv: &recv, counts: None }, AllToAll::run);
}
