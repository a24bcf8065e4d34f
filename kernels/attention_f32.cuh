// Attention whose chains are f32 fused multiply-adds, term after term: NUMERICS.md, "F32". A warp has a row or a key, and
// keeps what it works on in shared memory. For validation; fast enough for that. After attention_visible.cuh.

extern __shared__ float shared[];

// Copies a row of a head to shared memory.
template <class T>
__device__ __forceinline__ void load_row(float* to, const T* x, u64 first, u32 dim) {
    for (u32 i = lane_id(); i < dim; i += LANES) to[i] = load(x, first + i);
}

__device__ __forceinline__ void clear_row(float* to, u32 dim) {
    for (u32 i = lane_id(); i < dim; i += LANES) to[i] = 0.0f;
}

// The chain of a row in shared memory with one in global memory.
template <class T>
__device__ __forceinline__ float chain(const float* a, const T* x, u64 first, u32 dim) {
    float sum = 0.0f;
    for (u32 i = 0; i < dim; i++) sum = __fmaf_rn(a[i], load(x, first + i), sum);
    return sum;
}

// The chains of `sums` go on with `count` factors and as many rows of a head, `stride` elements apart, but for those that
// are not `seen`.
template <class T, class Seen>
__device__ __forceinline__ void continue_chains(
    float* sums, float alpha, const float* factors, u32 count, Seen seen, const T* x, u64 first, u64 stride, u32 dim) {
    for (u32 i = lane_id(); i < dim; i += LANES) {
        float sum = sums[i] * alpha;
        for (u32 j = 0; j < count; j++) {
            if (seen(j)) sum = __fmaf_rn(factors[j], load(x, first + j * stride + i), sum);
        }
        sums[i] = sum;
    }
}

// Rounded to the type of the operands.
__device__ __forceinline__ float round_like(const float*, float x) { return x; }
__device__ __forceinline__ float round_like(const bf16*, float x) { return bf16_round(x); }
