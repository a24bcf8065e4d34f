// The second half of a round of an exchange through mapped memory: every member's rows come out of its window, as soon as
// they are there, exactly as many as are counted.
//
// send: [members, capacity, row], or [capacity, row] if it gathers: this member's own rows come from there.
// recv: [members, capacity, row]. counts: u32 [members] (all rows if absent). windows: see kernels/all_to_all_peer.cuh.
// Blocks: a multiple of the members; a block copies a part of one segment.

extern "C" __global__ void __launch_bounds__(512) all_to_all_pull(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 round = given.state[SEQUENCE];
    u32 source = blockIdx.x % p.members, part = blockIdx.x / p.members, parts = gridDim.x / p.members;
    u32 rows = counts_given ? given.counts[source] : p.capacity;
    bool there = true;
    if (threadIdx.x == 0) {
        const u32* says = entry(given.windows, p.place, source);
        there = load_shared_word(given.state + FAILED) == 0 &&
                await(says + READY, round, given.state, given.board) &&
                agrees(says, rows, p.capacity, p.row_bytes, given.state, given.board, source);
    }
    if (__syncthreads_and(there)) {
        u64 from, bytes = bytes_of_round(rows, p, from), segment = u64(p.capacity) * p.row_bytes;
        const u8* slot = window(given.windows, source) + p.slots_at + u64(p.gathers ? 0 : p.place) * p.slot_bytes;
        const u8* own = (const u8*)given.send + (p.gathers ? 0 : p.place * segment) + from;
        copy_bytes((u8*)given.recv + source * segment + from, source == p.place ? own : slot, bytes, part, parts);
    }
    if (arrives_last(given.state)) {
        bool failed = load_shared_word(given.state + FAILED) != 0;
        for (u32 member = threadIdx.x; !failed && member < p.members; member += blockDim.x) {
            store_release(entry(given.windows, member, p.place) + PULLED, round);
        }
        if (p.last && threadIdx.x == 0) {
            count(given.state, given.board, ENDED);
        }
    }
}
