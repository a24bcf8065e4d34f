// Blocks along rows, along columns, or both from one reading: NUMERICS.md, "Block formats".
//
// A thread block has a tile of ROWS rows and 128 columns; a thread 8 consecutive rows of 8 columns, in registers, so that
// 16 lanes read 256 contiguous bytes of bf16 and a thread has 8 such loads under way. ROWS is the block where a scale
// spans rows, so that every scale is made within one thread block; else 32. Shared memory, at most 21 KiB: the amaxes of
// the warps, those of the columns' factors, and the codes of FP8 blocks while they are transposed.
//
// Constants: ROWS; SQUARE (1: a scale for each square); those of blocks.cuh.

constexpr u32 COLUMNS = 128;
constexpr u32 OCTETS = COLUMNS / 8;
constexpr u32 STRIP = 8;
constexpr u32 THREADS = ROWS / STRIP * OCTETS;
constexpr u32 WARPS = THREADS / LANES;
// Lanes whose octets make a block.
constexpr u32 BLOCK_LANES = BLOCK / 8;
constexpr bool TRANSPOSED = FORMAT == FP8_BLOCK;
// FP8 blocks store one scale for a square, the others one for each of its rows or columns.
constexpr bool ONE_SCALE = SQUARE == 1 && FORMAT == FP8_BLOCK;
constexpr bool ACROSS_ROWS = column_codes_given || SQUARE == 1;
// Bytes of a column of transposed codes, and from an octet of columns to the next: the padding spreads them over the
// banks and keeps columns at multiples of 16 bytes.
constexpr u32 TURNED_COLUMN = ROWS;
constexpr u32 TURNED_OCTET = 8 * TURNED_COLUMN + 16;

// The rows of a tile: `begin` to `end` of what is quantized, in the stacked matrix `matrix` its `block`th.
struct Rows {
    u32 begin, end, matrix, block;
};

// Whether vectors of `bytes` may be used at an address.
__device__ __forceinline__ bool aligned(const void* at, u32 bytes) {
    return reinterpret_cast<u64>(at) % bytes == 0;
}

__device__ __forceinline__ u32 blocks_of(u32 extent, u32 block) { return (extent + block - 1) / block; }

// By a whole warp.
__device__ __forceinline__ Rows rows_of(const Given& given, u32 tile) {
    const Scalars& p = given.scalars;
    const u32 place = tile * ROWS;
    if constexpr (padded_given) {
        // The last group that begins at or before the place: empty groups begin where their successor does. A lane looks at
        // a group, 32 of them at a time.
        u32 group = 0;
        for (u32 first = 0; first < p.groups; first += LANES) {
            const u32 next = first + lane_id() + 1;
            const u32 past = __popc(__ballot_sync(ALL_LANES, next <= p.groups && given.padded[next] <= place));
            group += past;
            if (past < LANES) break;
        }
        if (group == p.groups) {
            return {};
        }
        const u32 begin = given.offsets[group] + (place - given.padded[group]);
        return {begin, min(begin + ROWS, min(given.offsets[group + 1], p.rows)), 0, tile};
    } else if constexpr (offsets_given) {
        return {place, min(place + ROWS, min(given.offsets[p.groups], p.rows)), 0, tile};
    } else {
        const u32 matrix = tile / blocks_of(p.group_rows, ROWS), block = tile % blocks_of(p.group_rows, ROWS);
        const u32 begin = matrix * p.group_rows + block * ROWS;
        return {begin, min(begin + ROWS, (matrix + 1) * p.group_rows), matrix, block};
    }
}

// Eight neighbours of a row, +0 at first, and a maximum of their magnitudes that ignores NaN.
template <u32 BYTES>
struct Octet;

template <>
struct Octet<2> {
    u32 pairs[4] = {};

    __device__ __forceinline__ float at(u32 i) const {
        return __uint_as_float(i % 2 == 0 ? pairs[i / 2] << 16 : pairs[i / 2] & 0xFFFF0000u);
    }

    __device__ __forceinline__ void load(const bf16* from) {
        const uint4 quad = fetch(quads(from));
        pairs[0] = quad.x, pairs[1] = quad.y, pairs[2] = quad.z, pairs[3] = quad.w;
    }

    __device__ __forceinline__ void load(const bf16* from, u32 count) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (i < count) pairs[i / 2] |= u32(from[i].bits) << i % 2 * 16;
        }
    }

    // In each place the larger magnitude.
    __device__ __forceinline__ void raise(const Octet& x) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) pairs[i] = larger(pairs[i], x.pairs[i] & 0x7FFF7FFFu);
    }

    __device__ __forceinline__ void raise_across(u32 lanes) {
#pragma unroll
        for (u32 i = 0; i < 4; ++i) pairs[i] = larger(pairs[i], __shfl_xor_sync(ALL_LANES, pairs[i], lanes));
    }

    __device__ __forceinline__ float largest() const {
        const u32 two = larger(larger(pairs[0] & 0x7FFF7FFFu, pairs[1] & 0x7FFF7FFFu),
                               larger(pairs[2] & 0x7FFF7FFFu, pairs[3] & 0x7FFF7FFFu));
        return fmaxf(fmaxf(__uint_as_float(two << 16), __uint_as_float(two & 0xFFFF0000u)), 0.0f);
    }

   private:
    static __device__ __forceinline__ u32 larger(u32 x, u32 y) {
        u32 result;
        asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(x), "r"(y));
        return result;
    }
};

template <>
struct Octet<4> {
    float values[8] = {};

    __device__ __forceinline__ float at(u32 i) const { return values[i]; }

    __device__ __forceinline__ void load(const float* from) {
        const Run run = load_run<true>(from, 0, RUN);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) values[i] = run.at[i];
    }

    __device__ __forceinline__ void load(const float* from, u32 count) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            if (i < count) values[i] = from[i];
        }
    }

    __device__ __forceinline__ void raise(const Octet& x) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) values[i] = fmaxf(values[i], fabsf(x.values[i]));
    }

    __device__ __forceinline__ void raise_across(u32 lanes) {
#pragma unroll
        for (u32 i = 0; i < 8; ++i) values[i] = fmaxf(values[i], __shfl_xor_sync(ALL_LANES, values[i], lanes));
    }

    __device__ __forceinline__ float largest() const {
        float amax = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(values[i]));
        return amax;
    }
};

using Elements = Octet<sizeof(*Given::x)>;

// The largest value of the lanes whose octets make a block. None is NaN.
__device__ __forceinline__ float block_max(float value) {
#pragma unroll
    for (u32 width = 1; width < BLOCK_LANES; width *= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, width));
    }
    return value;
}

// Four values of e4m3 in a word, the first in the low byte.
__device__ __forceinline__ u32 e4m3_quad(float x0, float x1, float x2, float x3) {
    return e4m3_pair(x0, x1) | e4m3_pair(x2, x3) << 16;
}

// The codes of eight values: a word of e2m1. `block` is the place of their block in the tensor, `half` theirs in it; each
// value has a byte of the block's random words.
__device__ __forceinline__ uint2 encode_e2m1(const Scalars& p, const Elements& x, float factor, u64 block, u32 half) {
    u32 random[2] = {};
    if constexpr (OPTION == 1) {
        const uint4 words = philox4x32({p.key_low, p.key_high}, {u32(block), u32(block >> 32), p.stream, 0});
        random[0] = half == 0 ? words.x : words.z;
        random[1] = half == 0 ? words.y : words.w;
    }
    u32 codes = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const float scaled = x.at(i) * factor;
        const u32 byte = random[i / 4] >> (i % 4 * 8) & 0xFFu;
        codes |= u32(OPTION == 1 ? e2m1_from_f32_stochastic(scaled, byte) : e2m1_from_f32(scaled)) << (4 * i);
    }
    return {codes, 0};
}

// Stores the codes of the first `count` of eight columns.
__device__ __forceinline__ void store_codes(u8* at, uint2 codes, u32 count) {
    constexpr u32 BYTES = FORMAT == NVFP4 ? 4 : 8;
    if (count == 8 && aligned(at, BYTES)) {
        if constexpr (FORMAT == NVFP4) {
            *reinterpret_cast<u32*>(at) = codes.x;
        } else {
            *reinterpret_cast<uint2*>(at) = codes;
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < BYTES; ++i) {
        if (i < count * BYTES / 8) {
            at[i] = u8((i < 4 ? codes.x : codes.y) >> (i % 4 * 8));
        }
    }
}

// The result of blocks along the rows.
__device__ __forceinline__ void put_rows(const Given& given, const Rows& rows, const Elements (&x)[STRIP], u32 row,
                                         u32 column, u32 present, float whole, float square) {
    const Scalars& p = given.scalars;
    const u32 row_blocks = blocks_of(p.columns, BLOCK);
    u8* codes = reinterpret_cast<u8*>(given.row_codes);
#pragma unroll
    for (u32 j = 0; j < STRIP; ++j) {
        const Scale scale = block_scale(SQUARE == 1 ? square : block_max(x[j].largest()), whole);
        if (row + j >= rows.end || present == 0) continue;
        const u64 block = u64(row + j) * row_blocks + column / BLOCK, at = u64(row + j) * p.columns + column;
        if constexpr (FORMAT == NVFP4) {
            store_codes(codes + at / 2, encode_e2m1(p, x[j], scale.factor, block, column / 8 % 2), present);
        } else {
            const auto scaled = [&](u32 i) { return x[j].at(i) * scale.factor; };
            const uint2 eight = {e4m3_quad(scaled(0), scaled(1), scaled(2), scaled(3)),
                                 e4m3_quad(scaled(4), scaled(5), scaled(6), scaled(7))};
            store_codes(codes + at, eight, present);
        }
        if (!ONE_SCALE && column % BLOCK == 0) store_scale(given.row_scales + block, scale);
    }
}

// The result of blocks along the columns, stored as the input is. Matrices have whole blocks of rows, and groups are padded
// to them.
__device__ __forceinline__ void put_columns(const Given& given, u32 tile, const Elements (&x)[STRIP], u32 strip,
                                            u32 column, u32 present, const float (&factor)[8]) {
    const u32 columns = given.scalars.columns;
    u8* codes = reinterpret_cast<u8*>(given.column_codes) + u64(tile * ROWS + strip * STRIP) * columns + column;
#pragma unroll
    for (u32 j = 0; j < STRIP; ++j) {
        const auto scaled = [&](u32 i) { return x[j].at(i) * factor[i]; };
        const uint2 eight = {e4m3_quad(scaled(0), scaled(1), scaled(2), scaled(3)),
                             e4m3_quad(scaled(4), scaled(5), scaled(6), scaled(7))};
        if (present > 0) store_codes(codes + u64(j) * columns, eight, present);
    }
}

// The same, transposed.
__device__ __forceinline__ void put_turned(const Given& given, const Rows& rows, const Elements (&x)[STRIP],
                                           u32 octet, u32 strip, u32 left, const float (&factor)[8]) {
    const Scalars& p = given.scalars;
    __shared__ uint4 turned[OCTETS * TURNED_OCTET / sizeof(uint4)];
    u8* own = reinterpret_cast<u8*>(turned) + octet * TURNED_OCTET + strip * STRIP;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const auto scaled = [&](u32 j) { return x[j].at(i) * factor[i]; };
        *reinterpret_cast<uint2*>(own + i * TURNED_COLUMN) = {e4m3_quad(scaled(0), scaled(1), scaled(2), scaled(3)),
                                                             e4m3_quad(scaled(4), scaled(5), scaled(6), scaled(7))};
    }
    __syncthreads();
    // Rows of the tile in the result: padded groups have whole blocks.
    const u32 height = padded_given ? ROWS : rows.end - rows.begin;
    const u64 first = padded_given ? u64(rows.block) * ROWS
                                   : u64(rows.matrix) * p.group_rows * p.columns + rows.block * ROWS;
    constexpr u32 PIECES = ROWS / 16;
    u8* codes = reinterpret_cast<u8*>(given.column_codes) + first + u64(left) * p.height;
    for (u32 piece = threadIdx.x; piece < COLUMNS * PIECES; piece += THREADS) {
        const u32 c = piece / PIECES, begin = piece % PIECES * 16;
        if (left + c >= p.columns || begin >= height) {
            continue;
        }
        const u32 from = c / 8 * TURNED_OCTET + c % 8 * TURNED_COLUMN + begin;
        u8* at = codes + (u64(c) * p.height + begin);
        if (height - begin >= 16 && aligned(at, 16)) {
            *reinterpret_cast<uint4*>(at) = turned[from / 16];
        } else {
            for (u32 i = 0; i < min(16u, height - begin); ++i) {
                at[i] = reinterpret_cast<const u8*>(turned)[from + i];
            }
        }
    }
}

// The amaxes of the tile's columns (or of their squares), and their factors.
struct OfColumns {
    float amax[COLUMNS];
    float factor[COLUMNS];
};

__device__ __forceinline__ void find_columns(const Given& given, u32 tile, u32 left, const Elements (&x)[STRIP],
                                             u32 octet, float whole, OfColumns& of) {
    const Scalars& p = given.scalars;
    __shared__ float warp_amax[WARPS][COLUMNS + 4];
    Elements amax;
#pragma unroll
    for (u32 j = 0; j < STRIP; ++j) amax.raise(x[j]);
    // The two strips of a warp, then the warps.
    amax.raise_across(OCTETS);
    const float square = SQUARE == 1 ? block_max(amax.largest()) : 0.0f;
    if (lane_id() < OCTETS) {
        float* to = warp_amax[threadIdx.x / LANES] + octet * 8;
#pragma unroll
        for (u32 i = 0; i < 8; ++i) to[i] = SQUARE == 1 ? square : amax.at(i);
    }
    __syncthreads();
    for (u32 c = threadIdx.x; c < COLUMNS; c += THREADS) {
        float largest = 0.0f;
#pragma unroll
        for (u32 warp = 0; warp < WARPS; ++warp) largest = fmaxf(largest, warp_amax[warp][c]);
        const Scale scale = block_scale(largest, whole);
        of.amax[c] = largest;
        of.factor[c] = scale.factor;
        if (column_codes_given && !ONE_SCALE && left + c < p.columns) {
            store_scale(given.column_scales + (u64(tile) * p.columns + left + c), scale);
        }
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, 768 / THREADS)
    group_quantize(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 tiles_across = blocks_of(p.columns, COLUMNS);
    const u32 tile = blockIdx.x / tiles_across, across = blockIdx.x % tiles_across, left = across * COLUMNS;
    const Rows rows = rows_of(given, tile);
    if (rows.begin >= rows.end) {
        return;
    }
    const u32 octet = threadIdx.x % OCTETS, strip = threadIdx.x / OCTETS;
    const u32 row = rows.begin + strip * STRIP, column = left + octet * 8;
    const u32 present = column < p.columns ? min(8u, p.columns - column) : 0;
    float whole = 0.0f;
    if constexpr (whole_given) {
        whole = given.whole[0];
    }

    // What lies beyond the rows or the columns, and a gathered row that is not there, count as zero.
    Elements x[STRIP];
    const bool vector = vectors(p.columns, given.x);
#pragma unroll
    for (u32 j = 0; j < STRIP; ++j) {
        if (row + j >= rows.end || present == 0) continue;
        u32 source = row + j;
        if constexpr (gather_given) {
            source = given.gather[row + j];
            if (source >= p.sources) continue;
        }
        const auto* from = given.x + (u64(source) * p.columns + column);
        if (vector) {
            x[j].load(from);
        } else {
            x[j].load(from, present);
        }
    }

    __shared__ OfColumns of;
    if constexpr (ACROSS_ROWS) find_columns(given, tile, left, x, octet, whole, of);
    if constexpr (row_codes_given) {
        put_rows(given, rows, x, row, column, present, whole, SQUARE == 1 ? of.amax[octet * 8] : 0.0f);
    }
    if constexpr (ONE_SCALE) {
        if (threadIdx.x == 0) {
            const u32 down = blocks_of(p.group_rows, BLOCK), row_blocks = blocks_of(p.columns, BLOCK);
            const Scale scale = block_scale(of.amax[0], whole);
            if constexpr (row_codes_given) {
                store_scale(given.row_scales + (u64(tile) * row_blocks + across), scale);
            }
            if constexpr (column_codes_given) {
                store_scale(given.column_scales + ((u64(rows.matrix) * row_blocks + across) * down + rows.block), scale);
            }
        }
    }
    if constexpr (column_codes_given) {
        float factor[8];
#pragma unroll
        for (u32 i = 0; i < 8; ++i) factor[i] = of.factor[octet * 8 + i];
        if constexpr (TRANSPOSED) {
            put_turned(given, rows, x, octet, strip, left, factor);
        } else {
            put_columns(given, tile, x, strip, column, present, factor);
        }
    }
}
