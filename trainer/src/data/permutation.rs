//! The order of the windows of an epoch: a permutation that depends on a key and on their number alone. NUMERICS.md,
//! "Random numbers".

use dropless_model::init;

/// Windows up to this number are listed; more are permuted by a network, which takes no memory.
const LISTED: usize = 1 << 20;
/// Rounds of the network.
const ROUNDS: u64 = 8;

/// A permutation of 0..n.
#[derive(Clone, Debug)]
pub(super) enum Permutation {
    /// The image of each number (Fisher and Yates).
    Listed(Vec<u32>),
    /// A Feistel network over numbers of twice `half` bits; images past the end are permuted again.
    Network { key: [u32; 2], n: usize, half: u32 },
}

/// A number below `limit`, of this block.
pub(super) fn below(key: [u32; 2], block: u64, limit: usize) -> usize {
    let word = u64::from(init::block(key, block)[0]);
    usize::try_from((word * limit as u64) >> 32).unwrap_or(0)
}

impl Permutation {
    pub(super) fn new(key: [u32; 2], n: usize) -> Permutation {
        if n > LISTED {
            return Permutation::network(key, n);
        }
        let mut list: Vec<u32> = (0u32..).take(n).collect();
        for last in (1..n).rev() {
            list.swap(last, below(key, last as u64, last + 1));
        }
        Permutation::Listed(list)
    }

    fn network(key: [u32; 2], n: usize) -> Permutation {
        let bits = (n.max(2) - 1).ilog2() + 1;
        Permutation::Network { key, n, half: bits.div_ceil(2) }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Permutation::Listed(list) => list.len(),
            Permutation::Network { n, .. } => *n,
        }
    }

    /// The image of a number below `len`.
    pub(super) fn at(&self, index: usize) -> usize {
        match self {
            Permutation::Listed(list) => list[index] as usize,
            &Permutation::Network { key, n, half } => {
                let mut image = index;
                // The network permutes at most four times as many numbers: this ends, on average within four passes.
                loop {
                    image = network(key, half, image);
                    if image < n {
                        return image;
                    }
                }
            }
        }
    }
}

/// (l, r) becomes (r, l + f(r)) in each round, with f the low bits of a block of the generator.
fn network(key: [u32; 2], half: u32, x: usize) -> usize {
    let mask = (1u64 << half) - 1;
    let (mut left, mut right) = (x as u64 >> half, x as u64 & mask);
    for round in 0..ROUNDS {
        let mixed = u64::from(init::block(key, round << 32 | right)[0]) & mask;
        (left, right) = (right, left ^ mixed);
    }
    usize::try_from(left << half | right).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_reach_every_number_once() {
        let key = init::key(3, "epoch 0");
        for n in [1, 2, 3, 5, 64, 65, 1000, 4097] {
            for permutation in [Permutation::new(key, n), Permutation::network(key, n)] {
                let mut seen: Vec<usize> = (0..n).map(|index| permutation.at(index)).collect();
                assert!(n < 64 || !seen.is_sorted(), "{n}");
                seen.sort_unstable();
                assert_eq!(seen, (0..n).collect::<Vec<_>>(), "{n}");
            }
        }
    }

    #[test]
    fn many_windows_take_no_memory_and_are_spread() {
        let n = 3 << 40;
        let permutation = Permutation::new(init::key(3, "epoch 0"), n);
        assert!(matches!(permutation, Permutation::Network { .. }));
        // Of 4000 images a quarter lies in each quarter, within five standard deviations.
        let mut quarters = [0i32; 4];
        (0..4000).for_each(|index| quarters[permutation.at(index) / (n / 4)] += 1);
        assert!(quarters.iter().all(|&count| (count - 1000).abs() < 137), "{quarters:?}");
    }
}
