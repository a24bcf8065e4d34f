// Where the scales of FP8 blocks lie: NUMERICS.md, "Block formats".
//
//   a_scale [rows, chain / 128]; b_scale [columns, chain / 128] or, where each group has a matrix of its own,
//   [groups, columns / 128, chain / 128]; all rounded up.
//
// Constant: RAGGED_CHAIN. Scalars: rows, columns, chain.

constexpr u32 BLOCK = 128;

__device__ __forceinline__ u64 row_scale_place(const Scalars& p, u32 row, u32 term) {
    return u64(row) * ceil_div(p.chain, BLOCK) + term / BLOCK;
}

__device__ __forceinline__ u64 column_scale_place(const Scalars& p, u32 group, u32 column, u32 term) {
    const u64 row = RAGGED_CHAIN ? column : u64(group) * ceil_div(p.columns, BLOCK) + column / BLOCK;
    return row * ceil_div(p.chain, BLOCK) + term / BLOCK;
}
