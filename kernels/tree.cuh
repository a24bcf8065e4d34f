// Sums along the binary tree over leaves lo..hi with mid = lo + (hi - lo) / 2, absent leaves skipped: NUMERICS.md,
// "Sums".
//
// Leaves come in ascending order and go on a stack of partial sums, whose top two are added as soon as no later leaf
// can come between them. A block plans these additions once; its threads then follow the plan, each with runs of its
// own.

// The depth of the node that parts leaf a from leaf b, a < b; that of the leaf itself if they are equal.
__device__ __forceinline__ u32 parting(u32 lo, u32 hi, u32 a, u32 b) {
    u32 depth = 0;
    while (hi - lo > 1) {
        const u32 mid = lo + (hi - lo) / 2;
        if (a < mid && mid <= b) {
            break;
        }
        if (b < mid) {
            hi = mid;
        } else {
            lo = mid;
        }
        ++depth;
    }
    return depth;
}

// Plans the sum of `count` leaves; one thread. Values of one leaf are added in the order they come in. On entry plan[n] is the depth at which leaf n parts from the one before,
// for 0 < n < count; then it is the number of additions before leaf n is put on the stack, and plan[count] those at the
// end. The depths on the stack ascend, so it is never higher than the tree.
__device__ __forceinline__ void plan_tree(u32* plan, u32 count) {
    u32 depths[33], height = 0;
    for (u32 n = 1; n < count; ++n) {
        u32 additions = 0;
        for (; height > 0 && depths[height - 1] >= plan[n]; --height) {
            ++additions;
        }
        depths[height++] = plan[n];
        plan[n] = additions;
    }
    plan[count] = height;
}

// Sums below the top one, which the threads keep in registers: two vectors in shared memory for each level and thread.
struct Stack {
    float4* below;

    __device__ __forceinline__ void push(const Run& top) {
        below[0] = make_float4(top.at[0], top.at[1], top.at[2], top.at[3]);
        below[blockDim.x] = make_float4(top.at[4], top.at[5], top.at[6], top.at[7]);
        below += 2 * blockDim.x;
    }

    __device__ __forceinline__ void add_to(Run& top) {
        below -= 2 * blockDim.x;
        const float4 low = below[0], high = below[blockDim.x];
        const float sums[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            top.at[e] = sums[e] + top.at[e];
        }
    }
};

// The sum of `count` leaves by a plan; `leaf(n)` is the n-th. `shared`: room for the stack, as high as the plan needs.
template <typename Leaf>
__device__ __forceinline__ Run sum_tree(const u32* plan, u32 count, float4* shared, Leaf leaf) {
    if (count == 0) {
        return Run{};
    }
    Stack stack = {shared + threadIdx.x};
    Run top = leaf(0);
    for (u32 n = 1; n < count; ++n) {
        // Asked for before the additions, so that they pass while it comes.
        const Run next = leaf(n);
        for (u32 additions = plan[n]; additions > 0; --additions) {
            stack.add_to(top);
        }
        stack.push(top);
        top = next;
    }
    for (u32 additions = plan[count]; additions > 0; --additions) {
        stack.add_to(top);
    }
    return top;
}
