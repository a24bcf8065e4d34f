//! Two processes prove to each other that they know the job's secret, without saying it: each answers the other's nonce
//! with a keyed hash (BLAKE3) of all that was said.

use std::io;

use dropless_core::world::Secret;

use super::message::Bytes;

/// What the key is for, so that no other use of the secret has the same one.
const CONTEXT: &str = "dropless control protocol 1, 2026-12: proof of the job's secret";

/// Bytes of a nonce.
pub(super) const NONCE: usize = 32;

/// Who proves. What one side says is no proof of the other.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    /// A rank that wants to join.
    Joins,
    /// Rank 0.
    Listens,
}

/// A key made of the job's secret.
pub(super) struct Key([u8; 32]);

impl Key {
    pub(super) fn of(secret: &Secret) -> Key {
        Key(blake3::derive_key(CONTEXT, secret.bytes()))
    }

    /// The hash of what was said so far, line by line.
    fn hash(&self, side: Side, said: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(match side {
            Side::Joins => b"joins  ",
            Side::Listens => b"listens",
        });
        for line in said {
            hasher.update(&(line.len() as u64).to_le_bytes());
            hasher.update(line);
        }
        hasher.finalize()
    }

    pub(super) fn proof(&self, side: Side, said: &[&[u8]]) -> Bytes {
        Bytes(self.hash(side, said).as_bytes().to_vec())
    }

    /// Whether the other side has the same key. Takes as long for any wrong proof.
    pub(super) fn proves(&self, proof: &Bytes, side: Side, said: &[&[u8]]) -> bool {
        blake3::Hash::from_slice(&proof.0).is_ok_and(|proof| proof == self.hash(side, said))
    }
}

/// Bytes that were never said before.
pub(super) fn nonce() -> io::Result<Bytes> {
    let mut bytes = vec![0; NONCE];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(Bytes(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f20_a_proof_holds_for_one_secret_one_side_and_one_conversation() {
        let [key, other] =
            [b"0123456789abcdef", b"0123456789abcdeF"].map(|bytes| Key::of(&Secret::new(bytes).unwrap()));
        let proof = key.proof(Side::Joins, &[b"ab", b"c"]);
        assert!(key.proves(&proof, Side::Joins, &[b"ab", b"c"]));
        assert!(!other.proves(&proof, Side::Joins, &[b"ab", b"c"]));
        assert!(!key.proves(&proof, Side::Listens, &[b"ab", b"c"]));
        assert!(!key.proves(&proof, Side::Joins, &[b"a", b"bc"]));
        assert!(!key.proves(&Bytes(proof.0[1..].to_vec()), Side::Joins, &[b"ab", b"c"]));
        assert!(!key.proves(&Bytes(Vec::new()), Side::Joins, &[b"ab", b"c"]));
        assert_ne!(nonce().unwrap(), nonce().unwrap());
    }
}
