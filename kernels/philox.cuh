// Philox4x32-10: NUMERICS.md, "Random numbers". The twin of core/src/numerics/philox.rs.

__device__ __forceinline__ uint4 philox4x32(uint2 key, uint4 counter) {
    uint4 c = counter;
    for (u32 round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(0xD2511F53, c.x), low0 = 0xD2511F53 * c.x;
        const u32 high1 = __umulhi(0xCD9E8D57, c.z), low1 = 0xCD9E8D57 * c.z;
        c = {high1 ^ c.y ^ key.x, low1, high0 ^ c.w ^ key.y, low0};
        key.x += 0x9E3779B9;
        key.y += 0xBB67AE85;
    }
    return c;
}
