// Rows and keys that a warp computes alone, from what they see. After attention_tile.cuh and tensor_core_step.cuh.
//
// A tile multiplies what a row does not see by a zero, which adds nothing to a chain, unless it is an infinity or a NaN.
// Then the chain ends in a NaN, by which it is found when all is done, and is computed again without tensor cores. No
// chain without a NaN met such a value: its bits are right. So the tiles cost nothing, and this is for very few rows.

// The rows of a head of a tensor [tokens, heads, dim], those of one sequence.
struct HeadRows {
    const bf16* first;
    u64 stride;
    u32 dim;

    __device__ __forceinline__ HeadRows(const bf16* x, u32 heads, u32 dim, u64 token, u32 head)
        : first(x + (token * heads + head) * dim), stride(static_cast<u64>(heads) * dim), dim(dim) {}

    __device__ __forceinline__ const bf16* row(u32 i) const { return first + i * stride; }
};

// A lane has elements lane, lane + 32 and so on of a head's chains.
constexpr __device__ u32 lane_share(u32 columns) { return (columns + LANES - 1) / LANES; }

// The chain of two rows along a head; zero where the lane has none.
__device__ __forceinline__ float chain_of(const HeadRows& a, u32 i, const HeadRows& b, u32 j, bool there) {
    float sum = 0.0f;
#pragma unroll 1
    for (u32 c = 0; c < a.dim; c += STEP) {
        sum = tensor_core_step(sum, [&](u32 t) -> u32 {
            return there && c + t < a.dim ? a.row(i)[c + t].bits | u32(b.row(j)[c + t].bits) << 16 : 0;
        });
    }
    return sum;
}

// The chains of a head's elements go on with one step: `code`, those of this lane, of lanes `lane` on, times the rows of `x`
// from `row` on. `seen(i)`: whether there is a product with row i; else it is one of zeros.
template <u32 COUNT, class Seen>
__device__ __forceinline__ void continue_step(float (&sums)[COUNT], u32 code, u32 lane, const HeadRows& x, u32 row, Seen seen) {
#pragma unroll
    for (u32 j = 0; j < COUNT; j++) {
        const u32 column = j * LANES + lane_id();
        sums[j] = tensor_core_step(sums[j], [&](u32 i) -> u32 {
            const u32 factor = __shfl_sync(ALL_LANES, code, lane + i);
            return seen(row + i) && column < x.dim ? factor | u32(x.row(row + i)[column].bits) << 16 : 0;
        });
    }
}

// Whether all of a warp's chains are NaN, which they stay.
template <u32 COUNT>
__device__ __forceinline__ bool all_nan(const float (&sums)[COUNT], u32 dim) {
    bool all = true;
#pragma unroll
    for (u32 j = 0; j < COUNT; j++) all &= is_nan(sums[j]) || j * LANES + lane_id() >= dim;
    return __all_sync(ALL_LANES, all);
}

// Whether an accumulator of a thread's upper and its lower row is NaN.
template <u32 COUNT>
__device__ __forceinline__ void find_nan(bool (&found)[2], const float (&d)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) found[i / 2 % 2] |= is_nan(d[i]);
}

// Calls `alone(row)` for each of the 16 rows of a warp of which some thread says `again`, after all are stored. `row`: this
// thread's upper row.
template <class Alone>
__device__ __forceinline__ void for_rows_again(const bool (&again)[2], u32 row, Alone alone) {
    const u32 upper = __ballot_sync(ALL_LANES, again[0]), lower = __ballot_sync(ALL_LANES, again[1]);
    if ((upper | lower) == 0) return;
    __syncwarp();
#pragma unroll 1
    for (u32 i = 0; i < 16; i++) {
        if (((i < 8 ? upper : lower) >> i % 8 * 4 & 0xF) != 0) alone(row - lane_id() / 4 + i);
    }
}
