// The choices of received rows, segment by segment. A warp has consecutive choices and a thread every 32nd of them, so that
// the order of the lanes and then of the registers is that of the choices.

constexpr u32 WARPS = 8;
constexpr u32 THREADS = WARPS * LANES;
// Choices of a thread.
constexpr u32 OWN = 8;

__device__ __forceinline__ u64 choice_of(u32 i) {
    return ((u64(blockIdx.x) * WARPS + threadIdx.x / LANES) * OWN + i) * LANES + lane_id();
}

// The local experts of this thread's choices; `experts` for a choice that lives elsewhere or in a row past the count.
__device__ __forceinline__ void local_experts(const Given& given, u32 (&own)[OWN]) {
    const Scalars& p = given.scalars;
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        own[i] = p.experts;
        if (choice_of(i) < p.choices) {
            const u32 choice = u32(choice_of(i)), row = choice / p.k;
            const u32 expert = given.ids[choice] - p.first_expert;
            if (expert < p.experts && row % p.capacity < given.counts[row / p.capacity]) {
                own[i] = expert;
            }
        }
    }
}

// Counts the choices of each warp by expert: `counts` is [WARPS][experts].
__device__ __forceinline__ void count_choices(u32 experts, const u32 (&own)[OWN], u32* counts) {
    for (u32 i = threadIdx.x; i < WARPS * experts; i += THREADS) {
        counts[i] = 0;
    }
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        if (own[i] < experts) {
            atomicAdd(&counts[threadIdx.x / LANES * experts + own[i]], 1);
        }
    }
    __syncthreads();
}
