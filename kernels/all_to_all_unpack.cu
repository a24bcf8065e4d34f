// The end of an exchange through NCCL: the announcements are compared with what is expected, and the counted rows go to
// where they belong. NCCL was told the capacity of the segments, since the host knows no counts, so counted segments arrive
// in `staging`; others are in `recv` already. This member's own segment comes from `send`.
//
// send: [members, capacity, row], or [capacity, row] if it gathers. staging, recv: [members, capacity, row].
// counts: u32 [members] (all rows if absent). headers: u32 [members, HEADER].
// Blocks: a multiple of the members; a block copies a part of one member's segment.

extern "C" __global__ void __launch_bounds__(512) all_to_all_unpack(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 source = blockIdx.x % p.members, part = blockIdx.x / p.members, parts = gridDim.x / p.members;
    u32 rows = counts_given ? given.counts[source] : p.capacity;
    const u32* header = given.headers + source * HEADER;
    if (load_shared_word(given.state + FAILED) == 0 &&
        agrees(header, rows, p.capacity, p.row_bytes, given.state, given.board, source)) {
        u64 segment = u64(p.capacity) * p.row_bytes;
        u8* to = (u8*)given.recv + source * segment;
        if (source == p.place) {
            copy_bytes(to, (const u8*)given.send + (p.gathers ? 0 : source * segment), u64(rows) * p.row_bytes, part, parts);
        } else if (staging_given) {
            copy_bytes(to, (const u8*)given.staging + source * segment, u64(rows) * p.row_bytes, part, parts);
        }
    }
    if (arrives_last(given.state) && threadIdx.x == 0) {
        count(given.state, given.board, ENDED);
    }
}
