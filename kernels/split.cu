// f32 values as three planes of bf16, the low, the middle and the high parts: NUMERICS.md, "Split operands".
//
// x [count]; out [3, count]. A thread takes one element after the other.

extern "C" __global__ void __launch_bounds__(256) split(const __grid_constant__ Given given) {
    begin(given);
    const u64 count = given.scalars.count, threads = u64(gridDim.x) * blockDim.x;
    for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += threads) {
        const float x = given.x[i], high = bf16_round(x);
        const bool finite = fabsf(high) < INFINITY_F32;
        const float middle = finite ? bf16_round(x - high) : 0.0f;
        const float low = finite ? x - high - middle : 0.0f;
        store(given.out, i, low);
        store(given.out, count + i, middle);
        store(given.out, 2 * count + i, high);
    }
}
