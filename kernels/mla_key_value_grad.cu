// The gradients of the joint keys and values, copied, and of the shared key: the heads added in order, then rotated
// back. A thread has a run of one part of a head, or the pairs of a run of the shared key.

template <bool VECTOR>
__device__ __forceinline__ void joint_run(const Given& given, u64 head, u32 run) {
    const Scalars& p = given.scalars;
    const u32 own = runs_of(p.nope);
    const u64 base = head * (p.nope + p.v);
    if (run < own) {
        const u32 start = run * RUN;
        const u64 from = head * (p.nope + 2 * p.pairs) + start;
        copy_run<VECTOR>(given.d_kv, base + start, given.d_k, from, run_length<VECTOR>(start, p.nope));
    } else {
        const u32 start = (run - own) * RUN;
        const u64 to = base + p.nope + start;
        copy_run<VECTOR>(given.d_kv, to, given.d_v, head * p.v + start, run_length<VECTOR>(start, p.v));
    }
}

template <bool VECTOR>
__device__ __forceinline__ void shared_run(const Given& given, u64 token, u32 start) {
    const Scalars& p = given.scalars;
    const u32 rope = 2 * p.pairs, width = p.nope + rope;
    const auto sum_heads = [&](u32 column, u32 n) {
        const u64 first = token * p.heads * width + p.nope + column;
        Run sum = load_run<VECTOR>(given.d_k, first, n);
        const auto load_head = [&](u64 head) { return load_run<VECTOR>(given.d_k, first + head * width, n); };
        in_groups<4>(1, p.heads, 1, load_head, [&](u64, const Run& term) {
#pragma unroll
            for (u32 e = 0; e < RUN; ++e) {
                sum.at[e] += term.at[e];
            }
        });
        return sum;
    };
    const Angles angles = angles_of(given.cos, given.sin, given.positions[token], p.table_rows, p.pairs);
    const auto store = [&](u32 column, u32 n, const Run& x) {
        store_run<VECTOR>(given.d_k_rope, token * rope + column, n, x);
    };
    rotate_run<VECTOR>(start, p.pairs, p.halves, angles, true, sum_heads, store);
}

template <bool VECTOR>
__device__ __forceinline__ void token_run(const Given& given, u64 token, u32 run) {
    const Scalars& p = given.scalars;
    const u32 head_runs = runs_of(p.nope) + runs_of(p.v), joint = p.heads * head_runs;
    if (run < joint) {
        joint_run<VECTOR>(given, token * p.heads + run / head_runs, run % head_runs);
    } else {
        shared_run<VECTOR>(given, token, (run - joint) * RUN);
    }
}

extern "C" __global__ void __launch_bounds__(128) mla_key_value_grad(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 stretch = rotated_stretch(p.pairs, p.halves);
    const u32 runs = p.heads * (runs_of(p.nope) + runs_of(p.v)) + runs_of(stretch);
    const u64 token = thread_index() / runs;
    const u32 run = thread_index() % runs;
    if (token >= p.tokens) {
        return;
    }
    if (vectors(p.nope | stretch | p.v, given.d_k, given.d_v, given.d_kv, given.d_k_rope)) {
        token_run<true>(given, token, run);
    } else {
        token_run<false>(given, token, run);
    }
}
