//! Inputs of parsers, damaged at random: an error or a value comes back, and no more memory is taken than twice the input
//! and 64 MiB.
//!
//! `DROPLESS_MUTATIONS` says how many inputs of each kind. A failure names the number of its input, which depends on
//! nothing else. The memory is that which [`Counted`] counts, as the global allocator of the test.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use dropless_model::init;

/// Inputs of each kind where `DROPLESS_MUTATIONS` is not set.
const MUTATIONS: u64 = 2000;

/// The system's memory, counted for the thread that asks for it.
#[derive(Debug)]
pub struct Counted;

thread_local! {
    /// Bytes held now, and the most since the last reset.
    static HELD: Cell<(isize, isize)> = const { Cell::new((0, 0)) };
}

fn count(change: isize) {
    // Threads that end have no counter any more.
    let _ = HELD.try_with(|held| {
        let (now, most) = held.get();
        held.set((now + change, most.max(now + change)));
    });
}

// SAFETY: all is passed on to the system; counting allocates nothing.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size().cast_signed());
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        count(-layout.size().cast_signed());
        // SAFETY: as the caller's.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Numbers that depend on the input's kind and number alone.
struct Numbers {
    key: [u32; 2],
    block: u64,
}

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.block += 1;
        let [low, high, ..] = init::block(self.key, self.block);
        usize::try_from((u64::from(low) | u64::from(high) << 32) % limit.max(1) as u64).unwrap()
    }

    /// A copy of `seed` with up to eight places damaged: bits, bytes, digits and pieces, moved, doubled, removed, or
    /// replaced by what parsers stumble over.
    fn mutate(&mut self, seed: &[u8]) -> Vec<u8> {
        const WORDS: [&[u8]; 14] = [
            b"\0",
            b"\xff\xff\xff\xff\xff\xff\xff\xff",
            b"\xff\xff\xff\x7f",
            b"\0\0\0\0\0\0\0\x80",
            b"{",
            b"[",
            b"\"",
            b"\\ud800",
            b"99999999999999999999",
            b"-1",
            b"1e999",
            b"null",
            b"\xf0\x9f\xa6",
            b"[[[[[[[[[[[[[[[[",
        ];
        let mut out = seed.to_vec();
        for _ in 0..=self.below(8) {
            let at = self.below(out.len() + 1);
            let end = (at + self.below(64)).min(out.len());
            match self.below(7) {
                0 if at < out.len() => out[at] ^= 1 << self.below(8),
                1 if at < out.len() => out[at] = u8::try_from(self.below(256)).unwrap(),
                2 => drop(out.drain(at..end)),
                3 => {
                    let piece = out[at..end].to_vec();
                    let to = self.below(out.len() + 1);
                    out.splice(to..to, piece);
                }
                4 => {
                    let word = WORDS[self.below(WORDS.len())];
                    out.splice(at..at, word.iter().copied());
                }
                5 => {
                    let word = WORDS[self.below(WORDS.len())];
                    out.splice(at..end, word.iter().copied());
                }
                _ => out.truncate(at),
            }
        }
        out
    }
}

/// Gives `parse` damaged copies of `seeds`.
///
/// # Panics
/// `parse` does, or takes too much memory.
pub fn mutations(kind: &str, seeds: &[Vec<u8>], parse: impl Fn(&[u8])) {
    let cases = std::env::var("DROPLESS_MUTATIONS").map_or(MUTATIONS, |n| n.parse().unwrap());
    for case in 0..cases {
        let mut numbers = Numbers { key: init::key(case, kind), block: 0 };
        let seed = &seeds[numbers.below(seeds.len())];
        let input = if case == 0 { seed.clone() } else { numbers.mutate(seed) };
        HELD.set((0, 0));
        parse(&input);
        let most = usize::try_from(HELD.get().1).unwrap();
        assert!(most <= 2 * input.len() + (64 << 20), "{kind} {case}: {most} bytes for {} of input", input.len());
    }
}
