// The slots of each local expert, in the order of the rows: NUMERICS.md, "Routing". The last pass of a stable counting
// sort; `table` has the choices of the thread blocks before, for each expert.

extern __shared__ u32 counts[];

extern "C" __global__ void __launch_bounds__(THREADS) route_layout_place(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    u32 own[OWN];
    local_experts(given, own);
    count_choices(p.experts, own, counts);
    // From the choices of each warp to its first slot.
    for (u32 expert = threadIdx.x; expert < p.experts; expert += THREADS) {
        u32 next = given.offsets[expert] + given.table[u64(expert) * gridDim.x + blockIdx.x];
        for (u32 warp = 0; warp < WARPS; ++warp) {
            const u32 count = counts[warp * p.experts + expert];
            counts[warp * p.experts + expert] = next;
            next += count;
        }
    }
    __syncthreads();
    u32* next = counts + threadIdx.x / LANES * p.experts;
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        const bool local = own[i] < p.experts;
        const u32 peers = __match_any_sync(ALL_LANES, own[i]), before = peers & ((1u << lane_id()) - 1);
        const u32 slot = local ? next[own[i]] + __popc(before) : NONE;
        __syncwarp();
        if (local && before == 0) {
            next[own[i]] += __popc(peers);
        }
        __syncwarp();
        if (choice_of(i) < p.choices) {
            const u32 choice = u32(choice_of(i));
            // Only ids that repeat in a row could ask for more slots than there are.
            given.row_slots[choice] = slot < p.slots ? slot : NONE;
            if (slot < p.slots) {
                given.slot_rows[slot] = choice / p.k;
                given.slot_weights[slot] = given.weights[choice];
            }
        }
    }
}
