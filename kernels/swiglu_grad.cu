// The gradients of SwiGLU: NUMERICS.md, "Row-wise ops". A warp has a row.
//
// The weight's gradient is a quad sum, in which a lane adds two columns of every eight. So the terms of GROUP blocks of 256
// columns go through shared memory (33 KiB), and each lane adds one of the 32 sums that they have together.

constexpr u32 WARPS = 4;
constexpr u32 GROUP = LANES / 4;
// Padded, so that the lanes read from different banks.
constexpr u32 STRIDE = TURN + RUN;

__shared__ __align__(16) float terms[WARPS][d_weight_given ? GROUP : 1][STRIDE];

// Eight columns; their terms of the weight's gradient.
template <bool VECTOR>
__device__ __forceinline__ Run grad_run(const Given& given, u64 row, u32 start, float weight) {
    const u32 width = given.scalars.width, n = run_length<VECTOR>(start, width);
    const u64 base = row * 2 * width;
    const Run gate = load_run<VECTOR>(given.gate_up, base + start, n);
    const Run up = load_run<VECTOR>(given.gate_up, base + width + start, n);
    const Run d_out = load_run<VECTOR>(given.d_out, row * width + start, n);
    Run d_gate, d_up, term;
#pragma unroll
    for (u32 e = 0; e < RUN; ++e) {
        const float g = gate.at[e], u = up.at[e], d = d_out.at[e] * weight;
        const float s = f32_sigmoid(g), h = g * s;
        term.at[e] = d_out.at[e] * (h * u);
        d_gate.at[e] = (d * u) * (s * (1.0f + g * (1.0f - s)));
        d_up.at[e] = d * h;
    }
    store_run<VECTOR>(given.d_gate_up, base + start, n, d_gate);
    store_run<VECTOR>(given.d_gate_up, base + width + start, n, d_up);
    return term;
}

template <bool VECTOR>
__device__ __forceinline__ void grad_row(const Given& given, u64 row, u32 lane) {
    const u32 width = given.scalars.width;
    const float weight = weight_given ? given.weight[row] : 1.0f;
    if constexpr (!d_weight_given) {
        for (u32 start = lane * RUN; start < width; start += TURN) grad_run<VECTOR>(given, row, start, weight);
    } else {
        auto& blocks = terms[threadIdx.x / LANES];
        float total = 0.0f;
        for (u32 first = 0; first < width; first += GROUP * TURN) {
            const u32 count = min(GROUP, (width - first + TURN - 1) / TURN);
            for (u32 block = 0; block < count; ++block) {
                const u32 start = first + block * TURN + lane * RUN;
                Run term = {};
                if (start < width) term = grad_run<VECTOR>(given, row, start, weight);
                store_run<true>(blocks[block], lane * RUN, RUN, term);
            }
            __syncwarp();
            float sum = 0.0f;
            if (lane / 4 < count) {
                // What lies past the row is +0, which changes no sum.
                for (u32 i = lane % 4 * 2; i < TURN; i += RUN) {
                    sum += blocks[lane / 4][i];
                    sum += blocks[lane / 4][i + 1];
                }
            }
            sum += __shfl_xor_sync(ALL_LANES, sum, 1);
            sum += __shfl_xor_sync(ALL_LANES, sum, 2);
            for (u32 block = 0; block < count; ++block) total += __shfl_sync(ALL_LANES, sum, block * 4);
            __syncwarp();
        }
        if (lane == 0) given.d_weight[row] = total;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) swiglu_grad(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 rows = limit_given ? min(p.rows, *given.limit) : p.rows, lane = lane_id();
    const bool vector = vectors(p.width, given.gate_up, given.d_out, given.d_gate_up);
    for (u64 row = warp_index(); row < rows; row += warp_count()) {
        if (vector) {
            grad_row<true>(given, row, lane);
        } else {
            grad_row<false>(given, row, lane);
        }
    }
}
