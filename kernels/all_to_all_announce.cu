// The beginning of an exchange through NCCL: what each member is told about the rows for it. One block.
//
// counts: u32 [members] (all rows if absent). headers, received: u32 [members, HEADER]; of `received`, this member's own.

extern "C" __global__ void __launch_bounds__(128) all_to_all_announce(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    if (threadIdx.x == 0) {
        count(given.state, given.board, BEGUN);
    }
    for (u32 member = threadIdx.x; member < p.members; member += blockDim.x) {
        u32 header[HEADER] = {counts_given ? given.counts[member] : p.capacity, p.capacity, p.row_bytes, 0};
        for (u32 i = 0; i < HEADER; ++i) {
            given.headers[member * HEADER + i] = header[i];
            if (member == p.place) {
                given.received[member * HEADER + i] = header[i];
            }
        }
    }
}
