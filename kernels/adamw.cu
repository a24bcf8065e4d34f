// AdamW in place: NUMERICS.md, "Optimizer". Numbers that depend on beta alone come rounded from the launcher. A thread
// has a run.

template <bool VECTOR>
__device__ __forceinline__ void update_run(const Given& given, u64 i, u32 n) {
    const Scalars& p = given.scalars;
    const float beta1 = __uint_as_float(p.beta1), rest1 = __uint_as_float(p.rest1);
    const float beta2 = __uint_as_float(p.beta2), rest2 = __uint_as_float(p.rest2);
    const float eps = __uint_as_float(p.eps), decay = __uint_as_float(p.decay);
    const float factor = given.clip[1], rate = given.step[0], c1 = given.step[1], c2 = given.step[2];
    const Run grad = load_run<VECTOR>(given.grad, i, n);
    Run param = load_run<VECTOR>(given.param, i, n);
    Run m = load_run<VECTOR>(given.m, i, n), v = load_run<VECTOR>(given.v, i, n);
#pragma unroll
    for (u32 e = 0; e < RUN; ++e) {
        const float g = grad.at[e] * factor;
        m.at[e] = __fmaf_rn(beta1, m.at[e], rest1 * g);
        v.at[e] = __fmaf_rn(beta2, v.at[e], (rest2 * g) * g);
        const float u = (m.at[e] / c1) / (sqrtf(v.at[e] / c2) + eps);
        const float decayed = param.at[e] - rate * (decay * param.at[e]);
        param.at[e] = decayed - rate * u;
    }
    store_run<VECTOR>(given.m, i, n, m);
    store_run<VECTOR>(given.v, i, n, v);
    store_run<VECTOR>(given.param, i, n, param);
    if constexpr (param_bf16_given) {
        store_run<VECTOR>(given.param_bf16, i, n, param);
    }
}

extern "C" __global__ void __launch_bounds__(128) adamw(const __grid_constant__ Given given) {
    begin(given);
    const u64 elements = given.scalars.elements, i = thread_index() * RUN;
    if (i >= elements) {
        return;
    }
    if (vectors(elements, given.grad, given.param, given.m, given.v, given.param_bf16)) {
        update_run<true>(given, i, RUN);
    } else {
        update_run<false>(given, i, run_length<false>(i, elements));
    }
}
