// A token's experts in the registers of a warp: a lane has those that it adds in a row reduction.
//
// Constants: EXPERTS.

constexpr u32 OWN = (EXPERTS + TURN - 1) / TURN * RUN;

// The expert in register i of this lane; EXPERTS or more: none.
__device__ __forceinline__ u32 expert_of(u32 i) { return i / RUN * TURN + lane_id() * RUN + i % RUN; }

// A row of EXPERTS elements; +0 where there is no expert.
__device__ __forceinline__ void load_experts(const float* row, float (&x)[OWN]) {
    const bool vector = vectors(EXPERTS, row);
#pragma unroll
    for (u32 i = 0; i < OWN; i += RUN) {
        const u32 e = expert_of(i);
        Run run = {};
        if (e < EXPERTS) {
            run = vector ? load_run<true>(row, e, RUN) : load_run<false>(row, e, EXPERTS - e);
        }
#pragma unroll
        for (u32 j = 0; j < RUN; ++j) {
            x[i + j] = run.at[j];
        }
    }
}

__device__ __forceinline__ void store_experts(float* row, const float (&x)[OWN]) {
    const bool vector = vectors(EXPERTS, row);
#pragma unroll
    for (u32 i = 0; i < OWN; i += RUN) {
        const u32 e = expert_of(i);
        Run run;
#pragma unroll
        for (u32 j = 0; j < RUN; ++j) {
            run.at[j] = x[i + j];
        }
        if (e < EXPERTS && vector) {
            store_run<true>(row, e, RUN, run);
        } else if (e < EXPERTS) {
            store_run<false>(row, e, EXPERTS - e, run);
        }
    }
}

// The row reduction of x, in every lane. Where there is no expert x is +0, which leaves a lane's sum as it is.
__device__ __forceinline__ float sum_experts(const float (&x)[OWN]) {
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        sum += x[i];
    }
    return butterfly(sum);
}
