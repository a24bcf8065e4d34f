// The gradient norm and the factor that clips it: NUMERICS.md, "Optimizer". One block: its threads fetch tiles of
// squares into shared memory, and the first one adds them in order.

constexpr u32 TILE = 1024;

__shared__ float tile[TILE];

extern "C" __global__ void __launch_bounds__(128) clip_scale(const __grid_constant__ Given given) {
    begin(given);
    const u32 squares = given.scalars.squares;
    float sum = 0.0f;
    for (u32 first = 0; first < squares; first += TILE) {
        const u32 count = min(TILE, squares - first);
        for (u32 i = threadIdx.x; i < count; i += blockDim.x) {
            tile[i] = given.squares[first + i];
        }
        __syncthreads();
        if (threadIdx.x == 0) {
#pragma unroll 16
            for (u32 i = 0; i < count; ++i) {
                sum += tile[i];
            }
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        const float max_norm = __uint_as_float(given.scalars.max_norm), norm = sqrtf(sum);
        const float factor = max_norm > 0.0f && norm > max_norm ? max_norm / norm : 1.0f;
        given.out[0] = norm;
        given.out[1] = is_nan(norm) ? norm : factor;
    }
}
