//! Deterministic random numbers by name: initial weights. NUMERICS.md, "Random numbers".
//!
//! Element i of a parameter is a pure function of the seed, the parameter's name and i, so it does not depend on which
//! rank holds it or in what order parameters are made. Experts are named one by one, as in a checkpoint.

use dropless_core::numerics::philox::philox4x32;
use dropless_core::{Backend, Result};
use rayon::prelude::*;

use crate::{Initial, Model, single};

impl Model {
    /// Writes the initial weights of a seed, normal ones with the given deviation.
    ///
    /// # Errors
    /// Those of the backend.
    pub fn initialise(&mut self, backend: &dyn Backend, seed: u64, deviation: f64) -> Result<()> {
        for piece in self.params.pieces()? {
            let mut values = vec![0.0f32; piece.value.len()];
            match piece.initial {
                Initial::Normal => normal(seed, &piece.name, deviation, 0, &mut values),
                Initial::One => values.fill(1.0),
                Initial::Zero => {}
            }
            backend.write(&piece.value, bytemuck::cast_slice(&values))?;
        }
        self.refresh(backend)
    }
}

/// The generator's key for a seed and a name: the first 64 bits of BLAKE3(seed, little endian, followed by the name).
pub fn key(seed: u64, name: &str) -> [u32; 2] {
    let hash = blake3::Hasher::new().update(&seed.to_le_bytes()).update(name.as_bytes()).finalize();
    let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| hash.as_bytes()[at + i]));
    [word(0), word(4)]
}

/// The block of random words with this index.
pub fn block(key: [u32; 2], index: u64) -> [u32; 4] {
    let [a, b, c, d, e, f, g, h] = index.to_le_bytes();
    philox4x32(key, [u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]), 0, 0])
}

/// Fills `out` with the elements from `first` on of the parameter `name`: normal with mean 0 and deviation `std`.
///
/// Element i is number i % 4 of block i / 4. A block's words w give `u = (w + 1/2) / 2^32` and, in pairs, by Box and
/// Muller, `r = sqrt(-2 ln u0)`: `r cos(2 pi u1)` and `r sin(2 pi u1)`, in f64, times `std`, rounded to f32 once.
pub fn normal(seed: u64, name: &str, std: f64, first: u64, out: &mut [f32]) {
    const PIECE: usize = 1 << 16;
    let key = key(seed, name);
    out.par_chunks_mut(PIECE).enumerate().for_each(|(piece, out)| {
        let mut at = (u64::MAX, [0.0f32; 4]);
        for (element, out) in (first + (piece * PIECE) as u64..).zip(out) {
            if at.0 != element / 4 {
                at = (element / 4, normals(block(key, element / 4), std));
            }
            *out = at.1[(element % 4) as usize];
        }
    });
}

fn normals(words: [u32; 4], std: f64) -> [f32; 4] {
    let u = words.map(|w| (f64::from(w) + 0.5) / 4_294_967_296.0);
    let pair = |u0: f64, u1: f64| {
        let radius = libm::sqrt(-2.0 * libm::log(u0)) * std;
        let angle = 2.0 * std::f64::consts::PI * u1;
        [single(radius * libm::cos(angle)), single(radius * libm::sin(angle))]
    };
    let [a, b] = pair(u[0], u[1]);
    let [c, d] = pair(u[2], u[3]);
    [a, b, c, d]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(seed: u64, name: &str, first: u64, len: usize) -> Vec<f32> {
        let mut out = vec![0.0; len];
        normal(seed, name, 0.02, first, &mut out);
        out
    }

    #[test]
    fn any_part_of_a_parameter_is_what_the_whole_has_there() {
        let whole = sample(1, "lm_head.weight", 0, 200_000);
        for (first, len) in [(0, 50), (1, 7), (3, 1), (4, 9), (49, 1), (65_535, 2), (3, 199_997)] {
            assert_eq!(sample(1, "lm_head.weight", first as u64, len), whole[first..first + len]);
        }
    }

    #[test]
    fn seeds_and_names_give_different_numbers() {
        let base = sample(1, "a", 0, 8);
        assert_ne!(base, sample(2, "a", 0, 8));
        assert_ne!(base, sample(1, "b", 0, 8));
    }

    /// Kolmogorov-Smirnov against the normal distribution: for n samples the distance exceeds 1.95 / sqrt(n) with
    /// probability 0.001, and the seed is fixed.
    #[test]
    fn the_numbers_are_normal() {
        let n = 40_000;
        let mut x = sample(7, "model.embed_tokens.weight", 0, n);
        x.sort_by(f32::total_cmp);
        let cdf = |x: f32| 0.5 * (1.0 + libm::erf(f64::from(x) / 0.02 / std::f64::consts::SQRT_2));
        let distance = x
            .iter()
            .enumerate()
            .map(|(i, &x)| (cdf(x) - i as f64 / n as f64).abs().max((cdf(x) - (i + 1) as f64 / n as f64).abs()))
            .fold(0.0, f64::max);
        assert!(distance < 1.95 / (n as f64).sqrt(), "distance {distance}");
    }

    /// Computed by an independent implementation of the formulas in Python. A change of the stream changes every digest
    /// and belongs under "Numerics" in the changelog.
    #[test]
    fn the_stream_is_pinned() {
        let bits: Vec<u32> = sample(1, "lm_head.weight", 0, 4).iter().map(|x| x.to_bits()).collect();
        assert_eq!(bits, [0x3C3E_747F, 0xBD1B_9923, 0x3C24_BFF1, 0xBCBE_DAD4]);
        let many = sample(1, "lm_head.weight", 0, 4096);
        assert_eq!(&blake3::hash(bytemuck::cast_slice(&many)).to_hex()[..32], "0159340b0bffb1d45bc9690e4101b165");
    }
}
