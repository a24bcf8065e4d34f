// MXFP8 to bf16: NUMERICS.md, "Quantized operands". Exact but for the ends of the exponent range.
//
// codes, out [rows, columns]; scales [rows, columns / 32] or, with ALONG_ROWS, [rows / 32, columns]. A thread takes
// runs of 8 elements, which may pass the end of a row; `out` is aligned.

constexpr u32 BLOCK = 32, CODES = 8;

extern "C" __global__ void __launch_bounds__(256) mxfp8_dequantize(const __grid_constant__ Given given) {
    begin(given);
    const Scalars& p = given.scalars;
    const u64 count = u64(p.rows) * p.columns, threads = u64(gridDim.x) * blockDim.x;
    const bool aligned = reinterpret_cast<u64>(given.codes) % CODES == 0;
    for (u64 first = (u64(blockIdx.x) * blockDim.x + threadIdx.x) * CODES; first < count; first += threads * CODES) {
        const bool whole = first + CODES <= count;
        u64 codes = 0;
        if (aligned && whole) {
            codes = *reinterpret_cast<const u64*>(given.codes + first);
        } else {
            for (u32 i = 0; i < CODES && first + i < count; i++) codes |= u64(given.codes[first + i].bits) << 8 * i;
        }
        u64 row = first / p.columns;
        u32 column = u32(first - row * p.columns);
        float values[CODES];
#pragma unroll
        for (u32 i = 0; i < CODES; i++) {
            values[i] = 0.0f;
            if (first + i < count) {
                const u64 scale = ALONG_ROWS ? row / BLOCK * p.columns + column : (first + i) / BLOCK;
                values[i] = e4m3_to_f32(u8(codes >> 8 * i)) * ue8m0_to_f32(given.scales[scale].bits);
            }
            column += 1;
            if (column == p.columns) {
                column = 0;
                row += 1;
            }
        }
        if (whole) {
            *reinterpret_cast<uint4*>(given.out + first) =
                make_uint4(bf16_pair(values[0], values[1]), bf16_pair(values[2], values[3]),
                           bf16_pair(values[4], values[5]), bf16_pair(values[6], values[7]));
        } else {
#pragma unroll
            for (u32 i = 0; i < CODES; i++) {
                if (first + i < count) store(given.out, first + i, values[i]);
            }
        }
    }
}
