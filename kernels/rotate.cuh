// The rotation of a pair by an angle, or back: NUMERICS.md, "Row-wise ops". Two products and a sum each, no fma.

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

// Rotates the neighbouring pairs of the first n elements of a run, which begins with pair `first`.
__device__ __forceinline__ void rotate_run(Run& run, u32 n, Angles angles, u32 first, bool inverse) {
#pragma unroll
    for (u32 e = 0; e < RUN; e += 2) {
        if (e < n) {
            const Pair x = rotate({run.at[e], run.at[e + 1]}, angles, first + e / 2, inverse);
            run.at[e] = x.a;
            run.at[e + 1] = x.b;
        }
    }
}
