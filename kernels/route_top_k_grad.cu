// The gradient of the choice of experts: NUMERICS.md, "Routing". A warp has a token.
//
// Constants: EXPERTS; SOFTMAX (0: sigmoid).

constexpr u32 WARPS = 4;

// The gradients of the chosen scores, into d. An id that is none of the experts is no choice.
__device__ __forceinline__ void choices(const Given& given, u64 token, float (&d)[OWN]) {
    const Scalars& p = given.scalars;
    const float* scores = given.scores + token * EXPERTS;
    const u32* ids = given.ids + token * p.k;
    const float* d_weights = given.d_weights + token * p.k;
    const float scale = __uint_as_float(p.scale);
    float sum = 0.0f, dot = 0.0f;
    for (u32 n = 0; n < p.k; ++n) {
        if (ids[n] < EXPERTS) {
            sum += scores[ids[n]];
        }
    }
    const float divisor = sum + __uint_as_float(p.guard);
    for (u32 n = 0; n < p.k; ++n) {
        if (ids[n] < EXPERTS) {
            dot += (scale * d_weights[n]) * (scores[ids[n]] / divisor);
        }
    }
    for (u32 n = 0; n < p.k; ++n) {
        const float dr = scale * d_weights[n];
        const float ds = p.normalize == 1 ? (dr - dot) / divisor : dr;
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            d[i] = expert_of(i) == ids[n] ? ds : d[i];
        }
    }
}

// Adds the gradient of the auxiliary loss to d.
__device__ __forceinline__ void balance(const Given& given, u64 token, const float (&score)[OWN], float (&d)[OWN]) {
    const Scalars& p = given.scalars;
    const u64 sequence = token / p.sequence;
    const u32 valid = given.valid[sequence];
    const float sum = sum_experts(score);
    float slope[OWN], term[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        const u32 e = expert_of(i);
        slope[i] = 0.0f;
        term[i] = 0.0f;
        if (e < EXPERTS) {
            const float load = expert_load(given.counts[sequence * EXPERTS + e], p.k * valid);
            slope[i] = (__uint_as_float(p.coefficient) * load) / float(valid);
            term[i] = slope[i] * share(score[i], sum);
        }
    }
    const float dot = sum_experts(term);
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        d[i] = sum != 0.0f ? d[i] + (slope[i] - dot) / sum : d[i];
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) route_top_k_grad(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u64 token = u64(blockIdx.x) * WARPS + threadIdx.x / LANES;
    if (token >= p.tokens) {
        return;
    }
    float score[OWN], d[OWN] = {};
    if (is_valid(given.ids + token * p.k, p.k, EXPERTS)) {
        load_experts(given.scores + token * EXPERTS, score);
        choices(given, token, d);
        if constexpr (counts_given) {
            balance(given, token, score, d);
        }
        if constexpr (SOFTMAX == 1) {
            float term[OWN];
#pragma unroll
            for (u32 i = 0; i < OWN; ++i) {
                term[i] = expert_of(i) < EXPERTS ? d[i] * score[i] : 0.0f;
            }
            const float dot = sum_experts(term);
#pragma unroll
            for (u32 i = 0; i < OWN; ++i) {
                d[i] = score[i] * (d[i] - dot);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < OWN; ++i) {
                d[i] = d[i] * (score[i] * (1.0f - score[i]));
            }
        }
    }
    store_experts(given.d_logits + token * EXPERTS, d);
}
