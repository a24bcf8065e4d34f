// The results of a grouped product on their way to memory: NUMERICS.md, "Matrix products".
//
// Constants: RAGGED_CHAIN, ACCUMULATE. Params: rows, columns. Tensor: out.

// Where element (row, column) of the group's output lies.
__device__ __forceinline__ u64 out_place(const Params& p, u32 group, u32 row, u32 column) {
    const u64 base = RAGGED_CHAIN ? u64(group) * p.rows : 0;
    return (base + row) * p.columns + column;
}

__device__ __forceinline__ void put(float* out, u64 i, float value) { out[i] = ACCUMULATE ? out[i] + value : value; }

__device__ __forceinline__ void put(bf16* out, u64 i, float value) { store(out, i, value); }

// Two neighbours at an even place of an output whose address is a multiple of two elements.
__device__ __forceinline__ void put_pair(float* out, u64 i, float x, float y) {
    float2* at = reinterpret_cast<float2*>(out + i);
    if (ACCUMULATE) {
        const float2 before = *at;
        x = before.x + x;
        y = before.y + y;
    }
    *at = make_float2(x, y);
}

__device__ __forceinline__ void put_pair(bf16* out, u64 i, float x, float y) {
    *reinterpret_cast<u32*>(out + i) = bf16_pair(x, y);
}

template <class Element>
__device__ __forceinline__ bool pairs_aligned(const Element* out, u32 columns) {
    return columns % 2 == 0 && reinterpret_cast<u64>(out) % (2 * sizeof(Element)) == 0;
}
