// The gradients of SwiGLU: NUMERICS.md, "Row-wise ops". A warp has a row.

template <bool VECTOR>
__device__ __forceinline__ void grad_row(const Given& given, u64 row, u32 lane) {
    const u32 width = given.scalars.width;
    const u64 base = row * 2 * width;
    const float weight = weight_given ? given.weight[row] : 1.0f;
    float sum = 0.0f;
    for (u32 start = lane * RUN; start < width; start += TURN) {
        const u32 n = run_length<VECTOR>(start, width);
        const Run gate = load_run<VECTOR>(given.gate_up, base + start, n);
        const Run up = load_run<VECTOR>(given.gate_up, base + width + start, n);
        const Run d_out = load_run<VECTOR>(given.d_out, row * width + start, n);
        Run d_gate, d_up;
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            const float g = gate.at[e], u = up.at[e], d = d_out.at[e] * weight;
            const float one_plus = 1.0f + f32_exp(-g);
            const float s = 1.0f / one_plus, h = g / one_plus;
            sum += d_out.at[e] * (h * u);
            d_gate.at[e] = (d * u) * (s * (1.0f + g * (1.0f - s)));
            d_up.at[e] = d * h;
        }
        store_run<VECTOR>(given.d_gate_up, base + start, n, d_gate);
        store_run<VECTOR>(given.d_gate_up, base + width + start, n, d_up);
    }
    if constexpr (d_weight_given) {
        sum = butterfly(sum);
        if (lane == 0) {
            given.d_weight[row] = sum;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128) swiglu_grad(const __grid_constant__ Given given) {
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
