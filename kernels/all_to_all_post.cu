// The first half of a round of an exchange through mapped memory: this member's rows go into its own window, and all
// members learn that they are there.
//
// send: [members, capacity, row], or [capacity, row] if it gathers. counts: u32 [members] (all rows if absent).
// windows: see kernels/all_to_all_peer.cuh. Blocks: a multiple of the members; a block copies a part of one segment.

extern "C" __global__ void __launch_bounds__(512) all_to_all_post(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 round = given.state[SEQUENCE] + 1;
    if (p.round == 0 && blockIdx.x == 0 && threadIdx.x == 0) {
        count(given.state, given.board, BEGUN);
    }
    // The slots are free when everyone has pulled what was there before.
    bool free = load_shared_word(given.state + FAILED) == 0;
    for (u32 member = threadIdx.x; free && member < p.members; member += blockDim.x) {
        const u32* pulled = entry(given.windows, p.place, member) + PULLED;
        free = await(pulled, round - 1, given.state, given.board);
    }
    if (__syncthreads_and(free)) {
        u32 member = blockIdx.x % p.members, part = blockIdx.x / p.members, parts = gridDim.x / p.members;
        u32 rows = counts_given ? given.counts[member] : p.capacity, segment = member;
        if (p.gathers) {
            // One slot for all, filled by all blocks.
            for (u32 other = 0; counts_given && other < p.members; ++other) {
                rows = max(rows, given.counts[other]);
            }
            part = blockIdx.x;
            parts = gridDim.x;
            segment = 0;
        }
        // Its own rows a member takes from `send`. More rows than there are is what the receiver reports.
        if (p.gathers || member != p.place) {
            u64 from, bytes = bytes_of_round(min(rows, p.capacity), p, from);
            u8* slot = window(given.windows, p.place) + p.slots_at + u64(segment) * p.slot_bytes;
            const u8* row = (const u8*)given.send + u64(segment) * p.capacity * p.row_bytes;
            copy_bytes(slot, row + from, bytes, part, parts);
        }
    }
    if (arrives_last(given.state)) {
        bool failed = load_shared_word(given.state + FAILED) != 0;
        for (u32 member = threadIdx.x; !failed && member < p.members; member += blockDim.x) {
            u32* there = entry(given.windows, member, p.place);
            store_shared_word(there + ROWS, counts_given ? given.counts[member] : p.capacity);
            store_shared_word(there + CAPACITY, p.capacity);
            store_shared_word(there + ROW_BYTES, p.row_bytes);
            store_release(there + READY, round);
        }
        if (threadIdx.x == 0) {
            given.state[SEQUENCE] = round;
        }
    }
}
