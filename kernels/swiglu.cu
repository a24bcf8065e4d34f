// SwiGLU: NUMERICS.md, "Row-wise ops". The threads take the runs of the rows that count in turn.

template <bool VECTOR>
__device__ __forceinline__ void swiglu_run(const Given& given, Place place) {
    const u32 width = given.scalars.width, n = run_length<VECTOR>(place.column, width);
    const u64 at = place.row * 2 * width + place.column;
    const Run gate = load_run<VECTOR>(given.gate_up, at, n), up = load_run<VECTOR>(given.gate_up, at + width, n);
    // A weight of 1 has the bits of no weight.
    const float weight = weight_given ? given.weight[place.row] : 1.0f;
    Run out;
#pragma unroll
    for (u32 e = 0; e < RUN; ++e) {
        out.at[e] = ((gate.at[e] * f32_sigmoid(gate.at[e])) * up.at[e]) * weight;
    }
    store_run<VECTOR>(given.out, place.row * width + place.column, n, out);
}

extern "C" __global__ void __launch_bounds__(128) swiglu(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u64 rows = limit_given ? min(p.rows, *given.limit) : p.rows;
    const bool vector = vectors(p.width, given.gate_up, given.out);
    for (u64 run = thread_index(); run < rows * runs_of(p.width); run += thread_count()) {
        if (vector) {
            swiglu_run<true>(given, place_of(run, p.width));
        } else {
            swiglu_run<false>(given, place_of(run, p.width));
        }
    }
}
