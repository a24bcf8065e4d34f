// Grouped products as chains of f32 fma: f32 factors, and the others under the model F32. The work is
// simt_grouped_gemm.cuh. Constant: TILE (the side of a tile).

extern "C" __global__ void __launch_bounds__(SIMT_THREADS<TILE>, 2) f32_grouped_gemm(const __grid_constant__ Given given) {
    begin(given);
    simt_grouped_gemm<TILE>(given);
}
