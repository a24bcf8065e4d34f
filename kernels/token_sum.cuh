// The token-sum rule: NUMERICS.md, "Sums". The blocks of 128 rows are summed by threads of their own, each with a run
// of columns; `sum_blocks` then adds the blocks in order.

constexpr u32 TOKEN_BLOCK = 128;

// The rows of one block: from `first` on, of the rows of all groups.
struct TokenBlock {
    u64 first;
    u32 rows;
};

// `block`: counted over all groups.
__device__ __forceinline__ TokenBlock token_block(u64 block, u32 group_rows) {
    const u32 blocks = (group_rows + TOKEN_BLOCK - 1) / TOKEN_BLOCK;
    const u32 start = u32(block % blocks) * TOKEN_BLOCK;
    return {block / blocks * group_rows + start, min(TOKEN_BLOCK, group_rows - start)};
}

// The sum of a block of rows, where `term(row)` is the row's run.
template <typename Term>
__device__ __forceinline__ Run block_sum(TokenBlock block, Term term) {
    Run sum = term(block.first);
    in_groups<4>(block.first + 1, block.first + block.rows, 1, term, [&](u64, const Run& next) {
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            sum.at[e] += next.at[e];
        }
    });
    return sum;
}
