// The sum of each row's slots along the tree over their leaves, then two further terms: NUMERICS.md, "Sums". A block
// has a row; a slot outside of x counts as absent, and so does a leaf outside of the tree.
//
// Dynamic shared memory: the stack, then five arrays of k words (the plan has one more).

extern __shared__ float4 shared[];

// The leaves of a row that are there, in ascending order, with the slot of each.
struct Leaves {
    u32 count;
    u32* slots;
    u32* plan;
};

// All threads call it together.
__device__ __forceinline__ Leaves leaves_of(const Given& given, u64 row) {
    const Scalars& p = given.scalars;
    u32* ids = reinterpret_cast<u32*>(shared + p.levels * 2 * blockDim.x);
    u32 *choices = ids + p.k, *ordered = choices + p.k;
    Leaves leaves = {0, ordered + p.k, ordered + 2 * p.k};
    for (u32 first = 0; first < p.k; first += blockDim.x) {
        const u32 c = first + threadIdx.x;
        bool present = false;
        if (c < p.k) {
            const u32 slot = given.slots[row * p.k + c];
            ids[c] = ids_given ? given.ids[row * p.k + c] : p.leaf_begin + c;
            present = slot < p.slots && ids[c] - p.leaf_begin < p.leaf_end - p.leaf_begin;
            choices[c] = present ? slot : NONE;
        }
        leaves.count += __syncthreads_count(present);
    }
    for (u32 c = threadIdx.x; c < p.k; c += blockDim.x) {
        if (choices[c] != NONE) {
            u32 place = 0;
            for (u32 other = 0; other < p.k; ++other) {
                place += choices[other] != NONE && (ids[other] < ids[c] || (ids[other] == ids[c] && other < c));
            }
            ordered[place] = ids[c];
            leaves.slots[place] = choices[c];
        }
    }
    __syncthreads();
    for (u32 n = 1 + threadIdx.x; n < leaves.count; n += blockDim.x) {
        leaves.plan[n] = parting(p.leaf_begin, p.leaf_end, ordered[n - 1], ordered[n]);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        plan_tree(leaves.plan, leaves.count);
    }
    __syncthreads();
    return leaves;
}

template <bool VECTOR>
__device__ __forceinline__ void combine_row(const Given& given, u64 row, const Leaves& leaves) {
    const u32 columns = given.scalars.columns;
    for (u32 start = threadIdx.x * RUN; start < columns; start += blockDim.x * RUN) {
        const u32 n = run_length<VECTOR>(start, columns);
        const u64 i = row * columns + start;
        Run sum = sum_tree(leaves.plan, leaves.count, shared, [&](u32 leaf) {
            return load_run<VECTOR>(given.x, u64(leaves.slots[leaf]) * columns + start, n);
        });
        if constexpr (first_given) {
            const Run first = load_run<VECTOR>(given.first, i, n);
#pragma unroll
            for (u32 e = 0; e < RUN; ++e) {
                sum.at[e] += first.at[e];
            }
        }
        if constexpr (second_given) {
            const Run second = load_run<VECTOR>(given.second, i, n);
#pragma unroll
            for (u32 e = 0; e < RUN; ++e) {
                sum.at[e] += second.at[e];
            }
        }
        store_run<VECTOR>(given.out, i, n, sum);
    }
}

extern "C" __global__ void __launch_bounds__(128) combine(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 row = blockIdx.x, token = row % p.window_period;
    if (token < p.window_begin || token >= p.window_end) {
        return;
    }
    const Leaves leaves = leaves_of(given, row);
    if (vectors(p.columns, given.x, given.first, given.second, given.out)) {
        combine_row<true>(given, row, leaves);
    } else {
        combine_row<false>(given, row, leaves);
    }
}
