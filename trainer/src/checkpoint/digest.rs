//! One word for all weights and optimizer state. NUMERICS.md, "Digest".

/// The first 16 bytes, in hex, of BLAKE3 over the tensors in the order of their names: for each the length of its name
/// (8 bytes, little endian), the name, and its [`hash`](dropless_model::hf::NamedTensor::hash). Ranks only have to
/// contribute hashes.
pub fn digest(tensors: impl IntoIterator<Item = (String, [u8; 32])>) -> String {
    let mut tensors: Vec<_> = tensors.into_iter().collect();
    tensors.sort();
    let mut hasher = blake3::Hasher::new();
    for (name, hash) in &tensors {
        hasher.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes()).update(hash);
    }
    hasher.finalize().to_hex()[..32].to_owned()
}
