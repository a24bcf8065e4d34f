// Scores and the choice of k experts: NUMERICS.md, "Routing". A warp has a token, token after token; a thread block
// counts the choices in shared memory and adds them to the totals at the end.
//
// Constants: EXPERTS, GROUPS; SOFTMAX (0: sigmoid).

constexpr u32 WARPS = 4;
constexpr u32 GROUP = EXPERTS / GROUPS;

// An integer that orders as the values do: the larger, the better. NaN is 0, and both zeros are one.
__device__ __forceinline__ u32 order_of(float value) {
    const u32 bits = __float_as_uint(value == 0.0f ? 0.0f : value);
    return is_nan(value) ? 0 : bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(u32 order) {
    return __uint_as_float(order == 0 ? 0x7FC00000u : order >> 31 ? order & 0x7FFFFFFFu : ~order);
}

// An order and an index as one integer, never 0: value descending, then index ascending.
__device__ __forceinline__ u64 key_of(u32 order, u32 index) { return u64(order) << 32 | u32(~index); }

// The largest of the lanes' keys, in every lane.
__device__ __forceinline__ u64 largest_key(u64 key) {
    const u32 order = __reduce_max_sync(ALL_LANES, u32(key >> 32));
    const u32 index = __reduce_max_sync(ALL_LANES, u32(key >> 32) == order ? u32(key) : 0);
    return u64(order) << 32 | index;
}

__device__ __forceinline__ void scores_of(const float* logits, float (&score)[OWN]) {
    load_experts(logits, score);
    if constexpr (SOFTMAX == 1) {
        float most = -INFINITY_F32;
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            most = expert_of(i) < EXPERTS ? larger(most, score[i]) : most;
        }
        most = largest_lane(most);
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            score[i] = expert_of(i) < EXPERTS ? f32_ex2((score[i] - most) * __uint_as_float(LOG2_E_BITS)) : 0.0f;
        }
        const float sum = sum_experts(score);
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            score[i] = score[i] / sum;
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            score[i] = f32_sigmoid(score[i]);
        }
    }
}

// Clears the keys of the experts whose group is none of the best. A lane values a group.
__device__ __forceinline__ void keep_best_groups(u32 top_groups, u64 (&keys)[OWN]) {
    __shared__ u32 orders[WARPS][EXPERTS];
    __shared__ u32 group_orders[WARPS][GROUPS];
    u32* order = orders[threadIdx.x / LANES];
    u32* group_order = group_orders[threadIdx.x / LANES];
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        if (expert_of(i) < EXPERTS) {
            order[expert_of(i)] = u32(keys[i] >> 32);
        }
    }
    __syncwarp();
    for (u32 g = lane_id(); g < GROUPS; g += LANES) {
        u32 first = 0, second = 0;
        for (u32 i = 0; i < GROUP; ++i) {
            // Lanes begin at different experts, so that they use different banks.
            const u32 next = order[g * GROUP + (g + i) % GROUP];
            second = max(second, min(first, next));
            first = max(first, next);
        }
        const bool alone = SOFTMAX == 1 || GROUP == 1;
        group_order[g] = order_of(alone ? value_of(first) : value_of(first) + value_of(second));
    }
    __syncwarp();
#pragma unroll
    for (u32 i = 0; i < OWN; ++i) {
        const u32 g = expert_of(i) / GROUP;
        if (g < GROUPS) {
            const u64 own = key_of(group_order[g], g);
            u32 better = 0;
            for (u32 other = 0; other < GROUPS; ++other) {
                better += key_of(group_order[other], other) > own ? 1 : 0;
            }
            keys[i] = better < top_groups ? keys[i] : 0;
        }
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(WARPS * LANES) route_top_k(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    __shared__ u32 counts[EXPERTS];
    for (u32 e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        counts[e] = 0;
    }
    __syncthreads();
    for (u64 token = u64(blockIdx.x) * WARPS + threadIdx.x / LANES; token < p.tokens; token += u64(gridDim.x) * WARPS) {
        u32* ids = given.ids + token * p.k;
        float* weights = given.weights + token * p.k;
        float score[OWN];
        scores_of(given.logits + token * EXPERTS, score);
        store_experts(given.scores + token * EXPERTS, score);
        if (valid_given && given.valid[token] == 0) {
            for (u32 n = lane_id(); n < p.k; n += LANES) {
                ids[n] = NONE;
                weights[n] = 0.0f;
            }
            continue;
        }
        u64 keys[OWN];
#pragma unroll
        for (u32 i = 0; i < OWN; ++i) {
            const u32 e = expert_of(i);
            keys[i] = 0;
            if (e < EXPERTS) {
                keys[i] = key_of(order_of(bias_given ? score[i] + given.bias[e] : score[i]), e);
            }
        }
        if constexpr (GROUPS > 1) {
            keep_best_groups(p.top_groups, keys);
        }

        // Each choice is the best candidate after the one before. The weights wait as scores for their sum.
        u64 last = ~u64(0);
        float sum = 0.0f;
        for (u32 n = 0; n < p.k; ++n) {
            u64 best = 0;
#pragma unroll
            for (u32 i = 0; i < OWN; ++i) {
                best = keys[i] < last && keys[i] > best ? keys[i] : best;
            }
            last = largest_key(best);
            const u32 e = ~u32(last);
            float own = 0.0f;
#pragma unroll
            for (u32 i = 0; i < OWN; ++i) {
                own = expert_of(i) == e ? score[i] : own;
            }
            const float chosen = __shfl_sync(ALL_LANES, own, e / RUN % LANES);
            sum += chosen;
            if (lane_id() == 0) {
                ids[n] = e;
                weights[n] = chosen;
                atomicAdd(&counts[e], 1);
            }
        }
        __syncwarp();
        const float divisor = p.normalize == 1 ? sum + __uint_as_float(p.guard) : 1.0f;
        for (u32 n = lane_id(); n < p.k; n += LANES) {
            weights[n] = __uint_as_float(p.scale) * (weights[n] / divisor);
        }
    }
    __syncthreads();
    for (u32 e = threadIdx.x; e < EXPERTS; e += blockDim.x) {
        if (counts[e] > 0) {
            atomicAdd(given.counts + e, counts[e]);
        }
    }
}
