// Cross-entropy and its gradient: NUMERICS.md, "Row-wise ops". A block of 8 warps has a token and reads its logits
// three times: for the maximum, the sum and the gradient. A target outside the vocabulary is none.
//
// For the sum, each warp exponentiates a turn of 256 logits into shared memory (two tiles of 8 turns, 16 KB), and the
// first warp adds the turns in order while the others go on with the next tile.

constexpr u32 WARPS = 8;
constexpr u32 TILE = WARPS * TURN;

__shared__ float exponentials[2][WARPS][RUN][32];
__shared__ float largest[WARPS];
__shared__ float sum_of_row;

template <bool VECTOR>
__device__ __forceinline__ float block_max(const Given& given, u64 base) {
    const u32 columns = given.scalars.columns;
    float highest = -INFINITY_F32;
    const auto load_logits = [&](u64 start) {
        return load_run<VECTOR>(given.logits, base + start, run_length<VECTOR>(start, columns));
    };
    in_groups<4>(threadIdx.x * RUN, columns, TILE, load_logits, [&](u64 start, const Run& x) {
        const u32 n = run_length<VECTOR>(start, columns);
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            highest = e < n ? larger(highest, x.at[e]) : highest;
        }
    });
    highest = largest_lane(highest);
    if (lane_id() == 0) {
        largest[threadIdx.x / LANES] = highest;
    }
    __syncthreads();
    for (u32 warp = 0; warp < WARPS; ++warp) {
        highest = larger(highest, largest[warp]);
    }
    return highest;
}

template <bool VECTOR>
__device__ __forceinline__ float sum_of_exponentials(const Given& given, u64 base, float top) {
    const u32 columns = given.scalars.columns, warp = threadIdx.x / LANES, lane = lane_id();
    float sum = 0.0f;
    u32 buffer = 0;
    for (u32 first = 0; first < columns; first += TILE) {
        const u32 start = first + threadIdx.x * RUN, n = start < columns ? run_length<VECTOR>(start, columns) : 0;
        Run x = {};
        if (n > 0) {
            x = load_run<VECTOR>(given.logits, base + start, n);
        }
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            exponentials[buffer][warp][e][lane] = e < n ? f32_exp(x.at[e] - top) : 0.0f;
        }
        __syncthreads();
        if (warp == 0) {
#pragma unroll
            for (u32 turn = 0; turn < WARPS; ++turn) {
#pragma unroll
                for (u32 e = 0; e < RUN; ++e) {
                    sum += exponentials[buffer][turn][e][lane];
                }
            }
        }
        buffer ^= 1;
    }
    if (warp == 0) {
        sum = butterfly(sum);
        if (lane == 0) {
            sum_of_row = sum;
        }
    }
    __syncthreads();
    return sum_of_row;
}

template <bool VECTOR>
__device__ __forceinline__ void token(const Given& given, u64 row, u32 target) {
    const u32 columns = given.scalars.columns;
    const u64 base = row * columns;
    const float top = block_max<VECTOR>(given, base);
    const float total = sum_of_exponentials<VECTOR>(given, base, top);
    if (threadIdx.x == 0) {
        given.loss[row] = f32_log(total) - (load(given.logits, base + target) - top);
    }
    if constexpr (d_logits_given) {
        const float scale = *given.scale;
        for (u32 start = threadIdx.x * RUN; start < columns; start += TILE) {
            const u32 n = run_length<VECTOR>(start, columns);
            Run d = load_run<VECTOR>(given.logits, base + start, n);
#pragma unroll
            for (u32 e = 0; e < RUN; ++e) {
                const float share = f32_exp(d.at[e] - top) / total;
                d.at[e] = (start + e == target ? share - 1.0f : share) * scale;
            }
            store_run<VECTOR>(given.d_logits, base + start, n, d);
        }
    }
}

template <bool VECTOR>
__device__ __forceinline__ void token_without_target(const Given& given, u64 row) {
    const u32 columns = given.scalars.columns;
    if (threadIdx.x == 0) {
        given.loss[row] = 0.0f;
    }
    if constexpr (d_logits_given) {
        for (u32 start = threadIdx.x * RUN; start < columns; start += TILE) {
            store_run<VECTOR>(given.d_logits, row * columns + start, run_length<VECTOR>(start, columns), Run{});
        }
    }
}

template <bool VECTOR>
__device__ __forceinline__ void row_of_logits(const Given& given) {
    const u64 row = blockIdx.x;
    const u32 target = given.targets[row];
    if (target >= given.scalars.columns) {
        token_without_target<VECTOR>(given, row);
    } else {
        token<VECTOR>(given, row, target);
    }
}

extern "C" __global__ void __launch_bounds__(256) cross_entropy(const __grid_constant__ Given given) {
    begin(given);
    if (vectors(given.scalars.columns, given.logits, given.d_logits)) {
        row_of_logits<true>(given);
    } else {
        row_of_logits<false>(given);
    }
}
