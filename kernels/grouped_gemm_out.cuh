// The results of a grouped product on their way to memory: NUMERICS.md, "Matrix products".
//
// Constants: RAGGED_CHAIN, ACCUMULATE. Scalars: rows, columns. Tensor: out.

// Where element (row, column) of the group's output lies.
__device__ __forceinline__ u64 out_place(const Scalars& p, u32 group, u32 row, u32 column) {
    const u64 base = RAGGED_CHAIN ? u64(group) * p.rows : 0;
    return (base + row) * p.columns + column;
}

__device__ __forceinline__ void put(float* out, u64 i, float value) { out[i] = ACCUMULATE ? out[i] + value : value; }

__device__ __forceinline__ void put(bf16* out, u64 i, float value) { store(out, i, value); }
