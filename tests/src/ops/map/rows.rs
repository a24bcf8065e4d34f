//! Gather, combine, and the gradient of an embedding.

use dropless_core::DType;
use dropless_core::ops::{Combine, EmbeddingGrad, GatherRows, NONE, Window};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] = &[
    Problem::new("gather_rows", gather_rows),
    Problem::new("combine", combine),
    Problem::new("embedding_grad", embedding_grad),
];

fn gather_rows(m: &mut Maker<'_>) {
    let (sources, rows, cols) = (m.extent(20), m.extent(40), m.extent(90));
    let types = [(DType::F32, DType::Bf16), (DType::Bf16, DType::F32), (DType::U32, DType::U32)];
    let (from, to) = m.one_of(&types);
    let x = m.tensor(from, &[sources, cols]);
    let mut index: Vec<u32> =
        (0..rows).map(|_| if m.random.below(4) == 0 { NONE } else { m.random.below(sources) as u32 }).collect();
    m.stray(&mut index, sources);
    let (index, out) = (m.integers(&[rows], &index), m.output("out", to, &[rows, cols]));
    m.run(GatherRows { x: &x, index: &index, out: &out }, GatherRows::run);
}

fn combine(m: &mut Maker<'_>) {
    let (leaves, cols, slots) = (1 + m.below(40), m.extent(70), 1 + m.below(50));
    let period = m.extent(12);
    let rows = period * (1 + m.below(3));
    let lo = m.below(5);
    let given = m.below(3) > 0;
    let k = if given { 1 + m.below(leaves.min(9)) } else { leaves };
    let mut ids = Vec::new();
    for _ in 0..rows {
        let mut all: Vec<u32> = (0..leaves).map(|leaf| (lo + leaf) as u32).collect();
        for _ in 0..k {
            ids.push(all.swap_remove(m.random.below(all.len())));
        }
    }
    m.stray(&mut ids, lo + leaves);
    if lo > 0 {
        // Below the first leaf, too.
        ids.iter_mut().filter(|id| **id == NONE).for_each(|id| *id = 0);
    }
    let mut places: Vec<u32> =
        (0..rows * k).map(|_| if m.random.below(3) == 0 { NONE } else { m.random.below(slots) as u32 }).collect();
    m.stray(&mut places, slots);
    let types = [0; 4].map(|_| m.float());
    let (x, first, second) =
        (m.tensor(types[0], &[slots, cols]), m.tensor(types[1], &[rows, cols]), m.tensor(types[2], &[rows, cols]));
    let out = m.output("out", types[3], &[rows, cols]);
    let (ids, places) = (m.integers(&[rows, k], &ids), m.integers(&[rows, k], &places));
    let from = m.below(period);
    let to = from + m.below(period - from + 1);
    let window = m.flag().then_some(Window { period, from, to });
    let add = [&first, &second].map(|addend| m.flag().then_some(addend));
    m.run(
        Combine {
            x: &x,
            slots: &places,
            ids: given.then_some(&ids),
            leaves: (lo, lo + leaves),
            window,
            add,
            out: &out,
        },
        Combine::run,
    );
}

fn embedding_grad(m: &mut Maker<'_>) {
    let (groups, each, cols, vocabulary) = (1 + m.below(3), m.extent(50), m.extent(70), m.extent(20));
    let dtype = m.float();
    let dy = m.tensor(dtype, &[groups * each, cols]);
    let mut ids: Vec<u32> = (0..groups * each).map(|_| m.random.below(vocabulary) as u32).collect();
    m.stray(&mut ids, vocabulary);
    let (ids, d_table) =
        (m.integers(&[groups * each], &ids), m.in_place("d_table", DType::F32, &[groups, vocabulary, cols]));
    m.run(EmbeddingGrad { dy: &dy, ids: &ids, d_table: &d_table }, EmbeddingGrad::run);
}

#[cfg(test)]
mod tests {
    use dropless_core::numerics::reduce;
    use dropless_core::ops::{Combine, EmbeddingGrad, GatherRows, NONE, Window};
    use dropless_core::{Backend, DType};

    use super::super::harness::*;

    #[test]
    fn gather_moves_rows_and_leaves_the_others_alone() {
        let (rows, cols, len) = (40, 33, 500);
        let mut random = Random(11);
        let mut index = random.indices(len, rows);
        index[7] = NONE;
        index[len - 1] = NONE;
        for from in FLOATS {
            for to in FLOATS {
                let x = random.floats(from, rows * cols, 1.0);
                let got = everywhere(|b| {
                    let (x, out) = (floats(b, from, &[rows, cols], &x), guarded(b, to, &[len, cols]));
                    GatherRows { x: &x, index: &integers(b, &[len], &index), out: &out }.run(b).unwrap();
                    vec![read(b, &out)]
                });
                for (row, &i) in got[0].chunks(cols).zip(&index) {
                    let source = |c: usize| if i == NONE { GUARD } else { x[i as usize * cols + c] };
                    assert_eq!(row, (0..cols).map(|c| rounded(to, source(c))).collect::<Vec<_>>());
                }
            }
        }
        for host in hosts() {
            let b = &host as &dyn Backend;
            let (x, out) = (integers(b, &[3, 2], &[1, 2, 3, 4, 5, 0x8000_0001]), integers(b, &[3, 2], &[9; 6]));
            GatherRows { x: &x, index: &integers(b, &[3], &[2, NONE, 0]), out: &out }.run(b).unwrap();
            assert_eq!(b.download::<u32>(&out).unwrap(), [5, 0x8000_0001, 9, 9, 1, 2]);
        }
    }

    #[test]
    fn b230_an_index_out_of_range_names_no_row() {
        for host in hosts() {
            let b = &host as &dyn Backend;
            let x = floats(b, DType::F32, &[4, 1], &[1.0, 2.0, 4.0, 1e8]);
            let out = floats(b, DType::F32, &[3, 1], &[7.0; 3]);
            GatherRows { x: &x, index: &integers(b, &[3], &[2, 4, 1 << 31]), out: &out }.run(b).unwrap();
            assert_eq!(read(b, &out), [4.0, 7.0, 7.0]);
            let combine = |slots: [u32; 3], ids: [u32; 3]| {
                let (slots, ids) = (integers(b, &[1, 3], &slots), integers(b, &[1, 3], &ids));
                let out = guarded(b, DType::F32, &[1, 1]);
                let leaves = (1, 4);
                Combine { x: &x, slots: &slots, ids: Some(&ids), leaves, window: None, add: [None; 2], out: &out }
                    .run(b)
                    .unwrap();
                read(b, &out)[0]
            };
            assert_eq!(combine([4, 0, 1], [1, 2, 3]), 3.0, "a slot that is none");
            for nowhere in [0, 4, NONE] {
                assert_eq!(combine([0, 1, 2], [1, nowhere, 3]), 5.0, "leaf {nowhere} of 1..4");
            }
            // Results of one leaf in the order of their columns.
            let sum = (1e8f32 + 4.0) + 2.0;
            assert_ne!(sum, 1e8 + (4.0 + 2.0f32));
            assert_eq!(combine([3, 2, 1], [3, 3, 3]), sum);
        }
    }

    /// Operands of a combine with random choices, some of them absent.
    struct Case {
        rows: usize,
        cols: usize,
        k: usize,
        leaves: (usize, usize),
        x: Vec<f32>,
        slots: Vec<u32>,
        ids: Option<Vec<u32>>,
        add: [Option<Vec<f32>>; 2],
        window: Option<Window>,
    }

    impl Case {
        fn random(dtype: DType, rows: usize, cols: usize, k: usize, leaves: (usize, usize)) -> Case {
            let mut random = Random((rows * k) as u64);
            let mut slots = random.indices(rows * k, rows * k);
            let mut ids = Vec::new();
            for _ in 0..rows {
                let mut all: Vec<u32> = (leaves.0..leaves.1).map(|id| u32::try_from(id).unwrap()).collect();
                ids.extend((0..k).map(|_| all.swap_remove(random.below(all.len()))));
            }
            for slot in &mut slots {
                if random.below(4) == 0 {
                    *slot = NONE;
                }
            }
            let x = random.floats(dtype, rows * k * cols, 1.0);
            Case { rows, cols, k, leaves, x, slots, ids: Some(ids), add: [None, None], window: None }
        }

        fn run(&self, dtype: DType, out_type: DType) -> Vec<f32> {
            let shape = [self.rows, self.cols];
            everywhere(|b| {
                let (x, out) =
                    (floats(b, dtype, &[self.x.len() / self.cols, self.cols], &self.x), guarded(b, out_type, &shape));
                let slots = integers(b, &[self.rows, self.k], &self.slots);
                let ids = self.ids.as_ref().map(|ids| integers(b, &[self.rows, self.k], ids));
                let add = self.add.each_ref().map(|add| add.as_ref().map(|add| floats(b, dtype, &shape, add)));
                Combine {
                    x: &x,
                    slots: &slots,
                    ids: ids.as_ref(),
                    leaves: self.leaves,
                    window: self.window,
                    add: add.each_ref().map(Option::as_ref),
                    out: &out,
                }
                .run(b)
                .unwrap();
                vec![read(b, &out)]
            })
            .remove(0)
        }

        /// Element c of row r, by the specification.
        fn want(&self, r: usize, c: usize) -> f32 {
            let present = |id: usize| {
                (r * self.k..(r + 1) * self.k).find(|&at| {
                    let leaf = self.ids.as_ref().map_or(self.leaves.0 + at % self.k, |ids| ids[at] as usize);
                    leaf == id && self.slots[at] != NONE
                })
            };
            let leaf = |id: usize| present(id).map(|at| self.x[self.slots[at] as usize * self.cols + c]);
            let sum = reduce::tree(self.leaves.0, self.leaves.1, &leaf).unwrap_or(0.0);
            self.add.iter().flatten().fold(sum, |sum, add| sum + add[r * self.cols + c])
        }

        fn check(&self, dtype: DType, out_type: DType) {
            for (at, got) in self.run(dtype, out_type).into_iter().enumerate() {
                let (r, c) = (at / self.cols, at % self.cols);
                let inside = self.window.is_none_or(|window| window.contains(r));
                let want = if inside { self.want(r, c) } else { GUARD };
                assert_eq!(got.to_bits(), rounded(out_type, want).to_bits(), "row {r}, column {c}");
            }
        }
    }

    #[test]
    fn combine_adds_along_the_tree_and_skips_absent_leaves() {
        for (dtype, out_type) in [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::Bf16, DType::F32)] {
            for (rows, cols, k, leaves) in [
                (1, 1, 1, (0, 1)),
                (90, 70, 4, (0, 16)),
                (40, 9, 8, (0, 11)),
                (9, 5, 8, (24, 32)),
                (5, 3, 64, (0, 256)),
            ] {
                let mut case = Case::random(dtype, rows, cols, k, leaves);
                case.check(dtype, out_type);
                let mut random = Random(12);
                case.add = [(); 2].map(|()| Some(random.floats(dtype, rows * cols, 1.0)));
                case.window = Some(Window { period: rows.div_ceil(2), from: 0, to: rows.div_ceil(4) });
                if rows % rows.div_ceil(2) == 0 {
                    case.check(dtype, out_type);
                }
            }
            let columns = Case { ids: None, ..Case::random(dtype, 30, 6, 4, (0, 4)) };
            columns.check(dtype, out_type);
        }
    }

    #[test]
    fn combine_of_subtrees_has_the_bits_of_the_whole_tree() {
        let whole = Case::random(DType::F32, 50, 20, 6, (0, 16));
        let ids = whole.ids.clone().unwrap();
        let ranks = 4;
        let parts: Vec<Vec<f32>> = (0..ranks)
            .map(|rank| {
                let here = 4 * rank..4 * rank + 4;
                let slots = (whole.slots.iter().zip(&ids))
                    .map(|(&slot, &id)| if here.contains(&(id as usize)) { slot } else { NONE })
                    .collect();
                Case {
                    leaves: (here.start, here.end),
                    slots,
                    x: whole.x.clone(),
                    ids: Some(ids.clone()),
                    ..Case { add: [None, None], ..Case::random(DType::F32, 50, 20, 6, (0, 16)) }
                }
                .run(DType::F32, DType::F32)
            })
            .collect();
        let position = |row: usize, rank: usize| {
            let chosen = (row * 6..row * 6 + 6).any(|at| whole.slots[at] != NONE && ids[at] as usize / 4 == rank);
            if chosen { u32::try_from(rank * 50 + row).unwrap() } else { NONE }
        };
        let joined = Case {
            k: ranks,
            leaves: (0, ranks),
            x: parts.concat(),
            slots: (0..50 * ranks).map(|at| position(at / ranks, at % ranks)).collect(),
            ids: None,
            ..Case::random(DType::F32, 50, 20, 6, (0, 16))
        };
        assert_eq!(joined.run(DType::F32, DType::F32), whole.run(DType::F32, DType::F32));
    }

    #[test]
    fn b123_combine_is_the_transpose_of_gather() {
        // Three tokens with two of three experts each; the row of a choice is its place among the choices sorted by expert.
        let (ids, slots) = ([0u32, 2, 2, 1, 1, 0], [0u32, 4, 5, 2, 3, 1]);
        let copies = [10.0f32, 11.0, 20.0, 21.0, 30.0, 31.0, 40.0, 41.0, 50.0, 51.0, 60.0, 61.0];
        let dx = everywhere(|b| {
            let out = guarded(b, DType::F32, &[3, 2]);
            Combine {
                x: &floats(b, DType::F32, &[6, 2], &copies),
                slots: &integers(b, &[3, 2], &slots),
                ids: Some(&integers(b, &[3, 2], &ids)),
                leaves: (0, 3),
                window: None,
                add: [None, None],
                out: &out,
            }
            .run(b)
            .unwrap();
            vec![read(b, &out)]
        });
        assert_eq!(dx[0], [60.0, 62.0, 90.0, 92.0, 60.0, 62.0]);
        // Gathering dy by the token of each row gives every expert its token's gradient.
        let tokens: Vec<u32> = (0..6).map(|row| slots.iter().position(|&s| s == row).unwrap() as u32 / 2).collect();
        let rows = everywhere(|b| {
            let (dy, out) =
                (floats(b, DType::F32, &[3, 2], &[1., 2., 3., 4., 5., 6.]), guarded(b, DType::F32, &[6, 2]));
            GatherRows { x: &dy, index: &integers(b, &[6], &tokens), out: &out }.run(b).unwrap();
            vec![read(b, &out)]
        });
        assert_eq!(rows[0], [1., 2., 5., 6., 3., 4., 5., 6., 1., 2., 3., 4.]);
    }

    #[test]
    fn b128_tokens_with_fewer_experts_add_only_those() {
        let case = Case {
            rows: 3,
            cols: 2,
            k: 2,
            leaves: (0, 3),
            x: vec![1.0, 2.0, 4.0, 8.0, 16.0, 32.0],
            slots: vec![0, 1, NONE, 2, NONE, NONE],
            ids: Some(vec![2, 0, NONE, 1, NONE, NONE]),
            add: [None, None],
            window: None,
        };
        let out = case.run(DType::F32, DType::F32);
        assert_eq!(out, [5.0, 10.0, 16.0, 32.0, 0.0, 0.0]);
        assert!(out[4..].iter().all(|x| x.to_bits() == 0));
    }

    #[test]
    fn b260_the_sum_over_experts_is_rounded_once() {
        let case = Case {
            rows: 1,
            cols: 1,
            k: 8,
            leaves: (0, 8),
            x: vec![256.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5],
            slots: (0..8).collect(),
            ids: Some((0..8).collect()),
            add: [None, None],
            window: None,
        };
        assert_eq!(case.run(DType::Bf16, DType::Bf16), [260.0]);
    }

    #[test]
    fn embedding_grad_adds_tokens_in_order_for_each_shard() {
        for dtype in FLOATS {
            let (groups, tokens, vocabulary, cols) = (2, 300, 13, 5);
            let mut random = Random(14);
            let (dy, ids) =
                (random.floats(dtype, groups * tokens * cols, 1.0), random.indices(groups * tokens, vocabulary));
            let before = random.floats(DType::F32, groups * vocabulary * cols, 1.0);
            let got = everywhere(|b| {
                let table = floats(b, DType::F32, &[groups, vocabulary, cols], &before);
                EmbeddingGrad {
                    dy: &floats(b, dtype, &[groups * tokens, cols], &dy),
                    ids: &integers(b, &[groups * tokens], &ids),
                    d_table: &table,
                }
                .run(b)
                .unwrap();
                vec![read(b, &table)]
            });
            let mut want = before;
            for t in 0..groups * tokens {
                for c in 0..cols {
                    want[(t / tokens * vocabulary + ids[t] as usize) * cols + c] += dy[t * cols + c];
                }
            }
            assert_eq!(got[0], want);
        }
    }

    #[test]
    fn b241_a_token_id_outside_the_vocabulary_adds_nothing_and_large_ids_do_not_wrap() {
        for host in hosts() {
            let b = &host as &dyn Backend;
            let vocabulary = 129_280;
            let table = floats(b, DType::F32, &[1, vocabulary, 1], &vec![0.0; vocabulary]);
            let grad = |ids: [u32; 2]| {
                let dy = floats(b, DType::F32, &[2, 1], &[1.0, 2.0]);
                EmbeddingGrad { dy: &dy, ids: &integers(b, &[2], &ids), d_table: &table }.run(b).unwrap();
            };
            grad([70_000, 129_279]);
            grad([129_280, NONE]);
            let sums = read(b, &table);
            assert_eq!((sums[70_000], sums[129_279], sums[70_000 - 65_536]), (1.0, 2.0, 0.0));
            assert_eq!(sums.iter().sum::<f32>(), 3.0);
        }
    }
}
