// The number of tokens of each sequence that are none of the padding. A thread has a token.

constexpr u32 THREADS = 256;

extern "C" __global__ void __launch_bounds__(THREADS) route_valid(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 sequence = blockIdx.x / p.blocks, token = blockIdx.x % p.blocks * THREADS + threadIdx.x;
    const u32* ids = given.ids + u64(sequence) * p.tokens * p.k;
    const bool valid = token < p.tokens && is_valid(ids + u64(token) * p.k, p.k, p.experts);
    const u32 count = __syncthreads_count(valid);
    if (threadIdx.x == 0) {
        atomicAdd(given.valid + sequence, count);
    }
}
