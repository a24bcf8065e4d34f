// The selection bias after a step: NUMERICS.md, "Routing". Exact, in 64-bit integers. A thread has an expert; each
// block adds up the total for itself.

__shared__ u64 totals[4];

__device__ __forceinline__ u64 total_of(const u32* counts, u64 len) {
    u64 total = 0;
    for (u64 i = threadIdx.x; i < len; i += blockDim.x) {
        total += counts[i];
    }
    for (u32 distance = 16; distance > 0; distance /= 2) {
        total += __shfl_xor_sync(ALL_LANES, total, distance);
    }
    if (lane_id() == 0) {
        totals[threadIdx.x / LANES] = total;
    }
    __syncthreads();
    return totals[0] + totals[1] + totals[2] + totals[3];
}

extern "C" __global__ void __launch_bounds__(128) bias_update(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u64 total = total_of(given.counts, u64(p.parts) * p.experts), expert = thread_index();
    if (expert >= p.experts) {
        return;
    }
    u64 count = 0;
    for (u32 part = 0; part < p.parts; ++part) {
        count += given.counts[u64(part) * p.experts + expert];
    }
    const u64 scaled = count * p.experts;
    const float rate = __uint_as_float(p.rate);
    if (scaled < total) {
        given.bias[expert] += rate;
    } else if (scaled > total) {
        given.bias[expert] -= rate;
    }
}
