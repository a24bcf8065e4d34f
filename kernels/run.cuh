// A run: eight consecutive elements of a row, which one thread reads or writes at once. They are the eight that belong
// to one lane of a row reduction (NUMERICS.md, "Sums").
//
// Kernels come in two forms. With VECTOR, every run is whole and starts at a multiple of 16 bytes, so that it moves as
// one vector (bf16) or two (f32); without, element by element. `vectors` says which form the operands allow.

struct Run {
    float at[RUN];
};

__device__ __forceinline__ u64 thread_index() {
    return u64(blockIdx.x) * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ u64 thread_count() {
    return u64(gridDim.x) * blockDim.x;
}

__device__ __forceinline__ u64 warp_index() {
    return thread_index() / LANES;
}

__device__ __forceinline__ u64 warp_count() {
    return thread_count() / LANES;
}

// Runs of a row; the last one may be short.
__device__ __forceinline__ u32 runs_of(u32 columns) {
    return (columns + RUN - 1) / RUN;
}

// Elements of the run that begins at `start`, below `end`.
template <bool VECTOR>
__device__ __forceinline__ u32 run_length(u64 start, u64 end) {
    return VECTOR || end - start > RUN ? RUN : u32(end - start);
}

// Where a run lies when the threads take those of one row after the other.
struct Place {
    u64 row;
    u32 column;
};

__device__ __forceinline__ Place place_of(u64 thread, u32 columns) {
    const u32 runs = runs_of(columns);
    return {thread / runs, u32(thread % runs) * RUN};
}

// Calls use(i, load(i)) for i = first, first + step, .. below end, in order. GROUP loads are under way before the first
// is used: a compiler keeps a load behind the branch that ends a loop.
template <u32 GROUP, typename Load, typename Use>
__device__ __forceinline__ void in_groups(u64 first, u64 end, u32 step, Load load, Use use) {
    u64 i = first;
    for (; i + (GROUP - 1) * step < end; i += GROUP * step) {
        decltype(load(i)) loaded[GROUP];
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) {
            loaded[g] = load(i + g * step);
        }
#pragma unroll
        for (u32 g = 0; g < GROUP; ++g) {
            use(i + g * step, loaded[g]);
        }
    }
    for (; i < end; i += step) {
        use(i, load(i));
    }
}

// Whether the operands allow vectors. `extents`: the columns, or several extents joined by |, all of which must be
// multiples of a run. An absent tensor is null and allows them.
template <typename... T>
__device__ __forceinline__ bool vectors(u64 extents, const T*... tensors) {
    return extents % RUN == 0 && (reinterpret_cast<u64>(tensors) | ...) % 16 == 0;
}

__device__ __forceinline__ const uint4* quads(const void* at) {
    return static_cast<const uint4*>(at);
}

__device__ __forceinline__ uint4* quads(void* at) {
    return static_cast<uint4*>(at);
}

// No kernel writes what it takes as const, so such a load may pass the stores that stand before it.
__device__ __forceinline__ uint4 fetch(const uint4* at) {
    return __ldg(at);
}

__device__ __forceinline__ uint4 fetch(uint4* at) {
    return *at;
}

// Elements i to i + n as f32; the rest of the run is +0.
template <bool VECTOR, typename T>
__device__ __forceinline__ Run load_run(T* from, u64 i, u32 n) {
    Run run;
    if constexpr (VECTOR && sizeof(T) == 2) {
        const uint4 pairs = fetch(quads(from + i));
        const u32 words[] = {pairs.x, pairs.y, pairs.z, pairs.w};
#pragma unroll
        for (u32 w = 0; w < RUN / 2; ++w) {
            run.at[2 * w] = __uint_as_float(words[w] << 16);
            run.at[2 * w + 1] = __uint_as_float(words[w] & 0xFFFF0000u);
        }
    } else if constexpr (VECTOR) {
        const uint4 low = fetch(quads(from + i)), high = fetch(quads(from + i) + 1);
        const u32 words[] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            run.at[e] = __uint_as_float(words[e]);
        }
    } else {
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            run.at[e] = e < n ? load(from, i + e) : 0.0f;
        }
    }
    return run;
}

// The first n elements of a run to i, i + 1, ...
template <bool VECTOR>
__device__ __forceinline__ void store_run(bf16* to, u64 i, u32 n, const Run& run) {
    if constexpr (VECTOR) {
        const float* x = run.at;
        *quads(to + i) =
            make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
    } else {
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            if (e < n) {
                store(to, i + e, run.at[e]);
            }
        }
    }
}

template <bool VECTOR>
__device__ __forceinline__ void store_run(float* to, u64 i, u32 n, const Run& run) {
    if constexpr (VECTOR) {
        float4* vectors = reinterpret_cast<float4*>(to + i);
        vectors[0] = make_float4(run.at[0], run.at[1], run.at[2], run.at[3]);
        vectors[1] = make_float4(run.at[4], run.at[5], run.at[6], run.at[7]);
    } else {
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            if (e < n) {
                store(to, i + e, run.at[e]);
            }
        }
    }
}

// A run from one tensor to another of its type: the bits.
template <bool VECTOR, typename T>
__device__ __forceinline__ void copy_run(T* to, u64 at, const T* from, u64 i, u32 n) {
    if constexpr (VECTOR) {
#pragma unroll
        for (u32 q = 0; q < RUN * sizeof(T) / 16; ++q) {
            quads(to + at)[q] = fetch(quads(from + i) + q);
        }
    } else {
        for (u32 e = 0; e < n; ++e) {
            to[at + e] = from[i + e];
        }
    }
}

// To another float type: one rounding.
template <bool VECTOR, typename T, typename S>
__device__ __forceinline__ void copy_run(T* to, u64 at, const S* from, u64 i, u32 n) {
    store_run<VECTOR>(to, at, n, load_run<VECTOR>(from, i, n));
}

// A row from one tensor to another of its type, by a warp: the bits.
template <bool VECTOR, typename T>
__device__ __forceinline__ void copy_row(T* to, const T* from, u32 columns) {
    if constexpr (VECTOR) {
        const auto load_quad = [&](u64 q) { return fetch(quads(from) + q); };
        in_groups<4>(lane_id(), u64(columns) * sizeof(T) / 16, LANES, load_quad, [&](u64 q, const uint4& bits) {
            quads(to)[q] = bits;
        });
    } else {
        const auto load_one = [&](u64 i) { return from[i]; };
        in_groups<4>(lane_id(), columns, LANES, load_one, [&](u64 i, T bits) { to[i] = bits; });
    }
}

// To another float type: one rounding.
template <bool VECTOR, typename T, typename S>
__device__ __forceinline__ void copy_row(T* to, const S* from, u32 columns) {
    const auto load_from = [&](u64 start) {
        return load_run<VECTOR>(from, start, run_length<VECTOR>(start, columns));
    };
    in_groups<4>(lane_id() * RUN, columns, TURN, load_from, [&](u64 start, const Run& run) {
        store_run<VECTOR>(to, start, run_length<VECTOR>(start, columns), run);
    });
}
