//! Philox4x32-10: random words as a pure function of a key and a counter (Salmon, Moraes, Dror and Shaw, "Parallel
//! Random Numbers: As Easy as 1, 2, 3", SC 2011). NUMERICS.md, "Random numbers".

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// What the key grows by from round to round: the golden ratio and sqrt(3) - 1, as fractions of 2^32.
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Four random words for `key` and `counter`.
#[inline(always)]
pub const fn philox4x32(mut key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut c = counter;
    let mut round = 0;
    while round < ROUNDS {
        let [high0, low0] = multiply(MULTIPLIERS[0], c[0]);
        let [high1, low1] = multiply(MULTIPLIERS[1], c[2]);
        c = [high1 ^ c[1] ^ key[0], low1, high0 ^ c[3] ^ key[1], low0];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
        round += 1;
    }
    c
}

/// The upper and the lower word of a * b.
#[inline(always)]
const fn multiply(a: u32, b: u32) -> [u32; 2] {
    let product = a as u64 * b as u64;
    [(product >> 32) as u32, (product & 0xFFFF_FFFF) as u32]
}

#[cfg(test)]
mod tests {
    use super::philox4x32;

    /// The known answers that the authors publish with their Random123 library.
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 2], [0; 4]), [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        assert_eq!(philox4x32([u32::MAX; 2], [u32::MAX; 4]), [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        let (key, counter) = ([0xA409_3822, 0x299F_31D0], [0x243F_6A88, 0x85A3_08D3, 0x1319_8A2E, 0x0370_7344]);
        assert_eq!(philox4x32(key, counter), [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]);
    }
}
