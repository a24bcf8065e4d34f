//! The exchange between ranks.

#[cfg(test)]
mod properties;

use dropless_core::Group;
use dropless_core::ops::{AllToAll, Counts};

use crate::differential::{Maker, Problem, TYPES};

pub(crate) const PROBLEMS: [Problem; 2] = [
    Problem { ranks: 3, ..Problem::new("all_to_all", all_to_all) },
    Problem { ranks: 2, ..Problem::new("all_to_all_gather", gather) },
];

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
