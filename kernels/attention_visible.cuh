// Which keys a row sees, those from its document's start to itself, and through which a kernel goes. NUMERICS.md,
// "Attention".

// The keys of a tile of the online softmax are KEY_TILE. A block is BLOCK rows: all of them go through the same tiles. No
// bit depends on it.

// The first key that a row sees, counted within the sequence whose first token is `token`; a row past the sequence's end
// sees none.
__device__ __forceinline__ u32 first_key(const u32* start, u64 token, u32 row, u32 sequence) {
    if (row >= sequence) return NONE;
    return start == nullptr ? 0 : start[token + row];
}

__device__ __forceinline__ bool visible(u32 key, u32 start, u32 row) { return start <= key && key <= row; }

// The end of a chain over keys or rows: a zero has no sign.
__device__ __forceinline__ float end_of(float chain) { return chain + 0.0f; }

// The start of the first tile of keys that some row of a block sees; `first` as attention_first.cu writes it.
__device__ __forceinline__ u32 first_tile(const u32* first, u32 batch, u32 blocks, u32 block) {
    return first == nullptr ? 0 : first[static_cast<u64>(batch) * blocks + block] / KEY_TILE * KEY_TILE;
}

// The keys through which a block of rows goes.
struct Keys {
    u32 begin, end;

    __device__ __forceinline__ bool has(u32 key) const { return begin <= key && key < end; }
};

__device__ __forceinline__ Keys keys_of(const u32* first, u32 batch, u32 blocks, u32 block, u32 sequence) {
    if (block >= blocks) return {NONE, 0};
    return {first_tile(first, batch, blocks, block), min(sequence, (block + 1) * BLOCK)};
}

// Those through which the `count` blocks from `block` on go together.
__device__ __forceinline__ Keys keys_of(const u32* first, u32 batch, u32 blocks, u32 block, u32 sequence, u32 count) {
    Keys all = {NONE, 0};
    for (u32 i = 0; i < count; i++) {
        const Keys keys = keys_of(first, batch, blocks, block + i, sequence);
        all = {min(all.begin, keys.begin), max(all.end, keys.end)};
    }
    return all;
}
