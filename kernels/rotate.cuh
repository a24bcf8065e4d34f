// The pairs of a rotated part of a head, and the rotation of one by an angle, or back: NUMERICS.md, "Row-wise ops". Two
// products and a sum each, no fma.

struct Pair {
    float a, b;
};

__device__ __forceinline__ Pair rotate(Pair x, float cosine, float sine, bool inverse) {
    const float s = inverse ? -sine : sine;
    return {x.a * cosine - x.b * s, x.b * cosine + x.a * s};
}

// A token's row of the rotation tables, `rows` rows of `pairs` columns. Outside of them nothing is rotated.
struct Angles {
    const float *cos, *sin;
    u64 base;
    bool inside;
};

__device__ __forceinline__ Angles angles_of(const float* cos, const float* sin, u32 position, u32 rows, u32 pairs) {
    return {cos, sin, u64(position) * pairs, position < rows};
}

__device__ __forceinline__ Pair rotate(Pair x, Angles angles, u32 pair, bool inverse) {
    if (!angles.inside) return x;
    return rotate(x, __ldg(angles.cos + angles.base + pair), __ldg(angles.sin + angles.base + pair), inverse);
}

// How many consecutive columns of a rotated part its runs divide, so that pairs meet in one thread: all of them where
// pairs are neighbours, the first half where they are halves (a thread then has the run half of the part further, too).
__device__ __forceinline__ u32 rotated_stretch(u32 pairs, u32 halves) {
    return halves ? pairs : 2 * pairs;
}

// Rotates the pairs of the run that begins at column `start` of a part's stretch. load(column, n) gives n elements of the
// part, store(column, n, run) takes them.
template <bool VECTOR, typename Load, typename Store>
__device__ __forceinline__ void rotate_run(
    u32 start, u32 pairs, u32 halves, Angles angles, bool inverse, Load load, Store store) {
    const u32 n = run_length<VECTOR>(start, rotated_stretch(pairs, halves));
    Run run = load(start, n);
    if (halves) {
        Run other = load(start + pairs, n);
#pragma unroll
        for (u32 e = 0; e < RUN; ++e) {
            if (e < n) {
                const Pair x = rotate({run.at[e], other.at[e]}, angles, start + e, inverse);
                run.at[e] = x.a;
                other.at[e] = x.b;
            }
        }
        store(start + pairs, n, other);
    } else {
#pragma unroll
        for (u32 e = 0; e < RUN; e += 2) {
            if (e < n) {
                const Pair x = rotate({run.at[e], run.at[e + 1]}, angles, (start + e) / 2, inverse);
                run.at[e] = x.a;
                run.at[e + 1] = x.b;
            }
        }
    }
    store(start, n, run);
}
