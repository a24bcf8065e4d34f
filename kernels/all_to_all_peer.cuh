// The exchange through memory that the members of a group map into each other: see kernels/all_to_all_post.cu and
// kernels/all_to_all_pull.cu.
//
// Every member has a window, whose address (in this process) is in `windows`, u64 [members] as pairs of words. A window
// begins with an entry for each member, which that member writes, and goes on with the slots: what its owner sends to each
// member, or to all of them if it gathers. A segment longer than a slot goes in several rounds; the slots' size and the
// segments' capacity say how many, so all members know it.

// An entry, of ENTRY words: a header, the round whose rows are there, and the last round that the writer has pulled.
constexpr u32 READY = HEADER, PULLED = HEADER + 1;

__device__ __forceinline__ u8* window(const u32* windows, u32 member) {
    return (u8*)(u64(windows[2 * member]) | u64(windows[2 * member + 1]) << 32);
}

// What `writer` says to `owner`.
__device__ __forceinline__ u32* entry(const u32* windows, u32 owner, u32 writer) {
    return (u32*)window(windows, owner) + writer * ENTRY;
}

// The bytes of a segment of `rows` rows that go in this round; they begin at `from`.
__device__ __forceinline__ u64 bytes_of_round(u32 rows, const Scalars& p, u64& from) {
    u64 bytes = u64(rows) * p.row_bytes;
    from = u64(p.round) * p.slot_bytes;
    return bytes > from ? min(bytes - from, u64(p.slot_bytes)) : 0;
}
