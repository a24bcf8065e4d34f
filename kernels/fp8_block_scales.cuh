// Where the scales of FP8 blocks lie: NUMERICS.md, "Block formats".
//
//   a_scale [a_sources, chain / 128], b_scale [groups, columns / 128, chain / 128]; where the groups divide the chain,
//   [chain / 128, rows] and [chain / 128, columns]; all rounded up.
//
// Constant: RAGGED_CHAIN. Scalars: rows, columns, chain, a_sources. Tensor: a_gather.

constexpr u32 BLOCK = 128;

// The row of the first factor that row `row` of the product is; NONE if it is gathered from outside of the tensor.
__device__ __forceinline__ u32 scaled_row(const Given& given, u32 row) {
    if constexpr (a_gather_given) {
        const u32 source = given.a_gather[row];
        return source < given.scalars.a_sources ? source : NONE;
    }
    return row;
}

__device__ __forceinline__ u64 row_scale_place(const Scalars& p, u32 row, u32 term) {
    return RAGGED_CHAIN ? u64(term / BLOCK) * p.rows + row : u64(row) * ceil_div(p.chain, BLOCK) + term / BLOCK;
}

__device__ __forceinline__ u64 column_scale_place(const Scalars& p, u32 group, u32 column, u32 term) {
    if (RAGGED_CHAIN) return u64(term / BLOCK) * p.columns + column;
    const u64 row = u64(group) * ceil_div(p.columns, BLOCK) + column / BLOCK;
    return row * ceil_div(p.chain, BLOCK) + term / BLOCK;
}
