// The order in which the terms of a chain go by, LENGTH at a time: NUMERICS.md, "Matrix products" and "Split operands".
//
// A split factor is three planes of bf16, the low, the middle and the high parts of f32 values, and its product a sum of
// parts: one for each SPLIT_BLOCK terms, in which these go by once for each pair of planes that counts.
//
// Constants: A_SPLIT, B_SPLIT.

constexpr u32 SPLIT_BLOCK = 128;
constexpr bool SPLIT = A_SPLIT || B_SPLIT;
constexpr u32 PAIRS = A_SPLIT && B_SPLIT ? 6 : SPLIT ? 3 : 1;

template <u32 LENGTH>
struct Chain {
    static_assert(SPLIT_BLOCK % LENGTH == 0, "no piece lies in two blocks");

    const u32 terms;
    // Where the piece begins.
    u32 done = 0;
    // Which planes it is of.
    u32 pair = 0;

    __device__ explicit Chain(u32 terms) : terms(terms) {}

    __device__ __forceinline__ bool more() const { return done < terms; }

    // Terms from here to the end of the block, or of the chain.
    __device__ __forceinline__ u32 left() const { return end() - done; }

    // Whether the piece is the first, or the last, of a part.
    __device__ __forceinline__ bool begins() const { return pair == 0 && done % SPLIT_BLOCK == 0; }
    __device__ __forceinline__ bool ends() const { return pair == PAIRS - 1 && left() <= LENGTH; }

    __device__ __forceinline__ void next() {
        if (!SPLIT || left() > LENGTH) {
            done += LENGTH;
        } else if (pair + 1 < PAIRS) {
            pair += 1;
            done -= done % SPLIT_BLOCK;
        } else {
            pair = 0;
            done = end();
        }
    }

    __device__ __forceinline__ u32 a_plane() const { return A_SPLIT ? B_SPLIT ? u32(0x221210 >> 4 * pair & 3) : pair : 0; }
    __device__ __forceinline__ u32 b_plane() const { return B_SPLIT ? A_SPLIT ? u32(0x212012 >> 4 * pair & 3) : pair : 0; }

   private:
    __device__ __forceinline__ u32 end() const {
        return SPLIT ? min(done - done % SPLIT_BLOCK + SPLIT_BLOCK, terms) : terms;
    }
};
