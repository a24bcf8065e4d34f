// Blocks along rows, along columns, or both from one reading: NUMERICS.md, "Block formats".
//
// A thread block has a tile of ROWS rows and 128 columns; a thread 4 consecutive rows of 8 columns, in registers, so that
// 16 lanes read 256 contiguous bytes of bf16. ROWS is the block where a scale spans rows, so that every scale is made
// within one thread block; else 32. Shared memory, at most 26 KiB: the amaxes of the warps, those of the columns and
// their factors, and the codes of FP8 blocks while they are transposed.
//
// Constants: ROWS; SQUARE (1: a scale for each square); those of blocks.cuh.

constexpr u32 COLUMNS = 128;
constexpr u32 OCTETS = COLUMNS / 8;
constexpr u32 STRIP = 4;
constexpr u32 THREADS = ROWS / STRIP * OCTETS;
constexpr u32 WARPS = THREADS / LANES;
// Lanes whose octets make a block.
constexpr u32 BLOCK_LANES = BLOCK / 8;
constexpr bool TRANSPOSED = FORMAT == FP8_BLOCK;
// FP8 blocks store one scale for a square, the others one for each of its rows or columns.
constexpr bool ONE_SCALE = SQUARE == 1 && FORMAT == FP8_BLOCK;
// Words of a column of transposed codes, and from an octet of columns to the next: the padding spreads them over the
// banks and keeps columns at multiples of 16 bytes.
constexpr u32 TURNED_COLUMN = ROWS / STRIP;
constexpr u32 TURNED_OCTET = 8 * TURNED_COLUMN + 4;

// The rows of a tile: `begin` to `end` of the input, in the stacked matrix `matrix` its `block`th.
struct Rows {
    u32 begin, end, matrix, block;
};

// Whether vectors of `bytes` may be used at an address.
__device__ __forceinline__ bool aligned(const void* at, u32 bytes) {
    return reinterpret_cast<u64>(at) % bytes == 0;
}

__device__ __forceinline__ u32 blocks_of(u32 extent, u32 block) { return (extent + block - 1) / block; }

__device__ __forceinline__ Rows rows_of(const Given& given, u32 tile) {
    const Scalars& p = given.scalars;
    const u32 place = tile * ROWS;
    if constexpr (padded_given) {
        if (place >= given.padded[p.groups]) {
            return {};
        }
        // The last group that begins at or before the place: empty groups begin where their successor does.
        u32 group = 0, beyond = p.groups;
        while (beyond - group > 1) {
            const u32 middle = group + (beyond - group) / 2;
            if (given.padded[middle] <= place) {
                group = middle;
            } else {
                beyond = middle;
            }
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

// The largest value of the lanes whose octets make a block. None is NaN.
__device__ __forceinline__ float block_max(float value) {
#pragma unroll
    for (u32 width = 1; width < BLOCK_LANES; width *= 2) {
        value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, width));
    }
    return value;
}

// The codes of eight values: two words of e4m3.
__device__ __forceinline__ uint2 encode_e4m3(const float (&x)[8], const float (&factor)[8]) {
    u32 pairs[4];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
        pairs[i] = e4m3_pair(x[2 * i] * factor[2 * i], x[2 * i + 1] * factor[2 * i + 1]);
    }
    return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// The codes of eight values: a word of e2m1. `block` is the place of their block in the tensor, `half` theirs in it; each
// value has a byte of the block's random words.
__device__ __forceinline__ uint2 encode_e2m1(const Scalars& p, const float (&x)[8], float factor, u64 block, u32 half) {
    u32 random[2] = {};
    if constexpr (OPTION == 1) {
        const uint4 words = philox4x32({p.key_low, p.key_high}, {u32(block), u32(block >> 32), p.stream, 0});
        random[0] = half == 0 ? words.x : words.z;
        random[1] = half == 0 ? words.y : words.w;
    }
    u32 codes = 0;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
        const float scaled = x[i] * factor;
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

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS)
    group_quantize(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u32 tiles_across = blocks_of(p.columns, COLUMNS), row_blocks = blocks_of(p.columns, BLOCK);
    const u32 tile = blockIdx.x / tiles_across, across = blockIdx.x % tiles_across;
    const Rows rows = rows_of(given, tile);
    if (rows.begin >= rows.end) {
        return;
    }
    const u32 octet = threadIdx.x % OCTETS, strip = threadIdx.x / OCTETS;
    const u32 row = rows.begin + strip * STRIP, column = across * COLUMNS + octet * 8;
    const u32 present = column < p.columns ? min(8u, p.columns - column) : 0;
    float whole = 0.0f;
    if constexpr (whole_given) {
        whole = given.whole[0];
    }

    // What lies beyond the rows or the columns counts as zero: it changes no amax, and its codes are zero.
    Run x[STRIP] = {};
    const bool vector = vectors(p.columns, given.x);
#pragma unroll
    for (u32 j = 0; j < STRIP; ++j) {
        const u64 at = u64(row + j) * p.columns + column;
        if (row + j < rows.end && present > 0) {
            x[j] = vector ? load_run<true>(given.x, at, RUN) : load_run<false>(given.x, at, present);
        }
    }

    __shared__ float column_amax[COLUMNS], column_factor[COLUMNS];
    if constexpr (column_codes_given || SQUARE == 1) {
        __shared__ float4 warp_amax[WARPS][OCTETS][2];
        float amax[8] = {};
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
#pragma unroll
            for (u32 j = 0; j < STRIP; ++j) {
                amax[i] = fmaxf(amax[i], fabsf(x[j].at[i]));
            }
        }
        if constexpr (SQUARE == 1) {
            float largest = 0.0f;
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                largest = fmaxf(largest, amax[i]);
            }
            largest = block_max(largest);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                amax[i] = largest;
            }
        }
        // The two strips of a warp, then the warps.
#pragma unroll
        for (u32 i = 0; i < 8; ++i) {
            amax[i] = fmaxf(amax[i], __shfl_xor_sync(ALL_LANES, amax[i], OCTETS));
        }
        if (lane_id() < OCTETS) {
            warp_amax[threadIdx.x / LANES][octet][0] = {amax[0], amax[1], amax[2], amax[3]};
            warp_amax[threadIdx.x / LANES][octet][1] = {amax[4], amax[5], amax[6], amax[7]};
        }
        __syncthreads();
        for (u32 c = threadIdx.x; c < COLUMNS; c += THREADS) {
            const float* of_warps = reinterpret_cast<const float*>(warp_amax) + c;
            float largest = of_warps[0];
            for (u32 warp = 1; warp < WARPS; ++warp) {
                largest = fmaxf(largest, of_warps[warp * COLUMNS]);
            }
            const Scale scale = block_scale(largest, whole);
            column_amax[c] = largest;
            column_factor[c] = scale.factor;
            const u32 of_column = across * COLUMNS + c;
            if constexpr (column_codes_given && !ONE_SCALE) {
                if (of_column < p.columns) {
                    const u64 place = TRANSPOSED ? u64(of_column) * (p.height / BLOCK) + tile
                                                 : u64(tile) * p.columns + of_column;
                    store_scale(given.column_scales + place, scale);
                }
            }
        }
        __syncthreads();
    }

    if constexpr (row_codes_given) {
        u8* codes = reinterpret_cast<u8*>(given.row_codes);
#pragma unroll
        for (u32 j = 0; j < STRIP; ++j) {
            float amax = 0.0f;
            if constexpr (SQUARE == 1) {
                amax = column_amax[octet * 8];
            } else {
#pragma unroll
                for (u32 i = 0; i < 8; ++i) {
                    amax = fmaxf(amax, fabsf(x[j].at[i]));
                }
                amax = block_max(amax);
            }
            const Scale scale = block_scale(amax, whole);
            const u64 block = u64(row + j) * row_blocks + column / BLOCK;
            if (row + j < rows.end && present > 0) {
                const u64 at = u64(row + j) * p.columns + column;
                if constexpr (FORMAT == NVFP4) {
                    store_codes(codes + at / 2, encode_e2m1(p, x[j].at, scale.factor, block, octet % 2), present);
                } else {
                    const float f = scale.factor;
                    store_codes(codes + at, encode_e4m3(x[j].at, {f, f, f, f, f, f, f, f}), present);
                }
                if (!ONE_SCALE && column % BLOCK == 0) {
                    store_scale(given.row_scales + block, scale);
                }
            }
        }
    }
    if constexpr (ONE_SCALE) {
        if (threadIdx.x == 0) {
            const u32 down = blocks_of(p.group_rows, BLOCK);
            const Scale scale = block_scale(column_amax[0], whole);
            if constexpr (row_codes_given) {
                store_scale(given.row_scales + (u64(tile) * row_blocks + across), scale);
            }
            if constexpr (column_codes_given) {
                store_scale(given.column_scales + ((u64(rows.matrix) * row_blocks + across) * down + rows.block), scale);
            }
        }
    }

    if constexpr (column_codes_given) {
        u8* codes = reinterpret_cast<u8*>(given.column_codes);
        const Run factor = load_run<false>(column_factor, octet * 8, RUN);
        if constexpr (!TRANSPOSED) {
            // Matrices have whole blocks of rows, and groups are padded to them.
            for (u32 j = 0; j < STRIP && present > 0; ++j) {
                const u64 at = u64(tile * ROWS + strip * STRIP + j) * p.columns + column;
                store_codes(codes + at, encode_e4m3(x[j].at, factor.at), present);
            }
        } else {
            // A word has the codes of a strip in one column.
            __shared__ uint4 turned[OCTETS * TURNED_OCTET / 4];
            uint2 rows_codes[STRIP];
#pragma unroll
            for (u32 j = 0; j < STRIP; ++j) {
                rows_codes[j] = encode_e4m3(x[j].at, factor.at);
            }
#pragma unroll
            for (u32 i = 0; i < 8; ++i) {
                u32 word = 0;
#pragma unroll
                for (u32 j = 0; j < STRIP; ++j) {
                    const u32 four = i < 4 ? rows_codes[j].x : rows_codes[j].y;
                    word |= (four >> (i % 4 * 8) & 0xFFu) << (8 * j);
                }
                reinterpret_cast<u32*>(turned)[octet * TURNED_OCTET + i * TURNED_COLUMN + strip] = word;
            }
            __syncthreads();
            // Rows of the tile in the result: padded groups have whole blocks.
            const u32 height = padded_given ? ROWS : rows.end - rows.begin;
            const u64 first = padded_given ? u64(tile) * ROWS
                                           : u64(rows.matrix) * p.group_rows * p.columns + rows.block * ROWS;
            constexpr u32 PIECES = ROWS / 16;
            for (u32 piece = threadIdx.x; piece < COLUMNS * PIECES; piece += THREADS) {
                const u32 c = piece / PIECES, begin = piece % PIECES * 16, of_column = across * COLUMNS + c;
                if (of_column >= p.columns || begin >= height) {
                    continue;
                }
                const u32 at_word = c / 8 * TURNED_OCTET + c % 8 * TURNED_COLUMN + begin / 4;
                u8* at = codes + (first + u64(of_column) * p.height + begin);
                if (height - begin >= 16 && aligned(at, 16)) {
                    *reinterpret_cast<uint4*>(at) = turned[at_word / 4];
                } else {
                    for (u32 i = 0; i < min(16u, height - begin); ++i) {
                        at[i] = reinterpret_cast<const u8*>(turned)[at_word * 4 + i];
                    }
                }
            }
        }
    }
}
