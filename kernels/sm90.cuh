// Hopper's building blocks: barriers in shared memory, asynchronous copies, swizzled tiles and `wgmma`.
//
// Tiles lie in shared memory in rows of 128 bytes, eight rows to an atom of 1024 bytes at which every tile is aligned,
// with the 16-byte pieces of each row exchanged by its number within the atom ("128-byte swizzle"): the layout that TMA
// (the tensor memory accelerator, cp.async.bulk.tensor) writes and `wgmma` reads without bank conflicts. Two kinds of
// tile hold an operand of `wgmma`:
//
//   Major::CHAIN  a row is one row (column) of the operand, 128 bytes along the chain: [rows][128 bytes].
//   Major::ROWS   a row is one element of the chain, 64 rows (columns) of the operand: [rows / 64][chain][64], 16-bit
//                 elements only.
//
// `wgmma` runs on sm_90a alone; the rest is on later chips, too.

enum class Major : u32 { CHAIN = 0, ROWS = 1 };

// ---- Addresses ----

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return u32(__cvta_generic_to_shared(pointer));
}

// Where the byte at `offset` of a tile lies.
__device__ constexpr u32 swizzled(u32 offset) { return offset ^ (offset >> 3 & 0x70); }

// ---- Barriers ----
//
// A phase ends when all arrivals and all expected bytes have come. `parity` is that of the phase waited for, 0 at first
// and then changing. Waiting for parity 1 of a fresh barrier returns at once.

__device__ __forceinline__ void barrier_init(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Makes the initialised barriers visible to TMA; a __syncthreads() must follow.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// The same at that barrier of another block of the cluster, of which only TMA and the tensor cores learn: it
// orders no loads and stores of this thread. (Where it did, it would wait for all of them.)
__device__ __forceinline__ void barrier_arrive_in(u32 block, u64* barrier) {
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(shared_address(barrier)),
                 "r"(block)
                 : "memory");
}

// The present phase also waits for this many bytes from TMA.
__device__ __forceinline__ void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Arrives once the copies that this thread started with `copy_async` are done.
__device__ __forceinline__ void barrier_arrive_after_copies(u64* barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

__device__ __forceinline__ void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do {
        asm volatile("{\n"
                     ".reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
                     "selp.u32 %0, 1, 0, done;\n"
                     "}"
                     : "=r"(done)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (done == 0);
}

// A barrier of some of the block's threads, COUNT in all. 0 is that of __syncthreads().
template <u32 ID, u32 COUNT>
__device__ __forceinline__ void threads_meet() {
    asm volatile("barrier.sync %0, %1;" ::"n"(ID), "n"(COUNT) : "memory");
}

// The same of a barrier that threads choose.
template <u32 COUNT>
__device__ __forceinline__ void threads_meet(u32 id) {
    asm volatile("barrier.sync %0, %1;" ::"r"(id), "n"(COUNT) : "memory");
}

// All threads of the cluster's blocks.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// ---- Copies ----

// 4 bytes to shared memory.
__device__ __forceinline__ void store_shared(u32 to, u32 word) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// What this thread wrote to shared memory (or knows to be written, from a barrier) is visible to `wgmma` and to
// TMA from here on.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four matrices of 8 x 8 16-bit elements, of which a lane has two neighbours each: rows `lane % 4 * 2` and the next of column
// `lane / 4`. Lane 8 m + r says where row r of matrix m goes, 16 bytes.
__device__ __forceinline__ void store_shared_transposed(u32 to, const u32 (&m)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
                 ::"r"(to), "r"(m[0]), "r"(m[1]), "r"(m[2]), "r"(m[3])
                 : "memory");
}

// 16 bytes from global to shared memory: the first `bytes` (0 to 16) are copied, the rest become zero. Both addresses
// are multiples of 16; with 0 bytes nothing is read.
__device__ __forceinline__ void copy_async_16(u32 to, const void* from, u32 bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes)
                 : "memory");
}

// 4 bytes.
__device__ __forceinline__ void copy_async_4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(__cvta_generic_to_global(from)) : "memory");
}

// A group of copies ends here; `copies_wait<N>` waits until at most the last N groups of this thread are under way.
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <u32 PENDING>
__device__ __forceinline__ void copies_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Waits until all of this thread's copies are done.
__device__ __forceinline__ void copies_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// `bytes`, a multiple of 16, from global to shared memory, which arrive at the barrier. Addresses are multiples of 16.
__device__ __forceinline__ void copy_bulk(u32 to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

// The same the other way, as a store: see `stores_commit`.
__device__ __forceinline__ void store_bulk(void* to, u32 from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(__cvta_generic_to_global(to)), "r"(from), "r"(bytes)
                 : "memory");
}

// The box of a map of three dimensions that starts at these coordinates, fastest first. What lies outside of the tensor
// becomes zero, and the bytes of the whole box arrive at the barrier.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, u64* barrier, u32 x, u32 y, u32 z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
        ::"r"(to), "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
}

// The same for every block of the cluster whose bit is in `blocks`: to the same place, for the same barrier of each.
__device__ __forceinline__ void copy_box_to(u16 blocks, u32 to, const TensorMap& map, u64* barrier, u32 x, u32 y,
                                            u32 z) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5}], [%2], %6;"
        ::"r"(to), "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "h"(blocks)
        : "memory");
}

// The same box the other way: what of it lies in the tensor is written.
__device__ __forceinline__ void store_box(const TensorMap& map, u32 from, u32 x, u32 y, u32 z) {
    asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];"
                 ::"l"(&map), "r"(from), "r"(x), "r"(y), "r"(z)
                 : "memory");
}

// A group of stores ends here, even one of none.
__device__ __forceinline__ void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most the last PENDING groups of this thread still read shared memory.
template <u32 PENDING>
__device__ __forceinline__ void stores_wait() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Brings the 128 bytes around an address to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* at) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(at)));
}

// Before its first use a map is brought to where TMA looks for it.
__device__ __forceinline__ void prefetch(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// The same of a map of four dimensions.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap& map, u64* barrier, u32 x, u32 y, u32 z, u32 w) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];"
        ::"r"(to), "l"(&map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
        : "memory");
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// ---- Registers of a warpgroup ----

template <u32 REGISTERS>
__device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <u32 REGISTERS>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- wgmma ----

// An operand in a swizzled tile. One instruction takes 32 bytes along the chain.
//
//   Major::CHAIN  step i of four starts 32 * i bytes into the tile; `stride` does not matter.
//   Major::ROWS   step i starts 2048 * i bytes (16 elements of the chain) into the tile; `stride`: bytes from one 64
//                 rows to the next.
__device__ __forceinline__ u64 descriptor(u32 tile, u32 stride = 16) {
    constexpr u64 ATOM = 1024, SWIZZLE_128 = 1;
    return (tile & 0x3FFFF) >> 4 | u64(stride >> 4) << 16 | ATOM >> 4 << 32 | SWIZZLE_128 << 62;
}

// Descriptors hold addresses in units of 16 bytes.
__device__ __forceinline__ u64 advanced(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }

// Keeps the compiler from moving accesses to an accumulator past this point.
template <u32 COUNT>
__device__ __forceinline__ void pin(float (&d)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

// The same of left factors in registers.
template <u32 STEPS>
__device__ __forceinline__ void pin(u32 (&a)[STEPS][4]) {
#pragma unroll
    for (u32 i = 0; i < STEPS * 4; i++) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// Before the first instruction on these accumulators, and whenever registers that an instruction reads were written.
template <class... Registers>
__device__ __forceinline__ void wgmma_begin(Registers&... registers) {
    (pin(registers), ...);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// A group of instructions ends here.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most the last PENDING groups are under way. The registers of the others may be used from here on.
template <u32 PENDING, class... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... registers) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
    (pin(registers), ...);
}

// D = A B + D for 64 rows and N columns, D = A B without `keep`; f32 accumulators, 128 threads.
//
// Thread t of the warpgroup holds in d[4 i + 2 h + j] row 16 (t / 32) + 8 h + t / 4 % 8 and column 8 i + 2 (t % 4) + j.
// As an operand in registers, a[2 i + h] holds the bf16 pair of that row h and columns 8 i + 2 (t % 4) and the next:
// the accumulators of 16 columns, rounded and packed in pairs, are the A of one step.
template <u32 N>
struct Wgmma;

// ACCUMULATORS are operands 0 to N / 2 - 1 of the instruction, P0 and so on the numbers that follow.
#define WGMMA(N, REGISTERS, ACCUMULATORS, P0, P1, P2, P3, P4, P5, P6)                                                  \
    template <>                                                                                                        \
    struct Wgmma<N> {                                                                                                  \
        template <Major A, Major B>                                                                                    \
        static __device__ __forceinline__ void bf16_shared(float (&d)[N / 2], u64 a, u64 b, bool keep) {               \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #P2 ", 0;\n"                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, %" #P0 ", %" #P1   \
                         ", keep, 1, 1, %" #P3 ", %" #P4 ";\n}"                                                        \
                         : ACCUMULATORS                                                                                \
                         : "l"(a), "l"(b), "r"(u32(keep)), "n"(u32(A)),                                                \
                           "n"(u32(B)));                                                                               \
        }                                                                                                              \
        template <Major B>                                                                                             \
        static __device__ __forceinline__ void bf16_registers(float (&d)[N / 2], const u32 (&a)[4], u64 b,             \
                                                              bool keep) {                                           \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #P5 ", 0;\n"                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS "}, {%" #P0 ", %" #P1  \
                         ", %" #P2 ", %" #P3 "}, %" #P4 ", keep, 1, 1, %" #P6 ";\n}"                                   \
                         : ACCUMULATORS                                                                                \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(u32(keep)),                         \
                           "n"(u32(B)));                                                                               \
        }                                                                                                              \
        /* Both operands are Major::CHAIN. */                                                                          \
        static __device__ __forceinline__ void e4m3_shared(float (&d)[N / 2], u64 a, u64 b, bool keep) {               \
            asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, %" #P2 ", 0;\n"                                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3 {" REGISTERS "}, %" #P0 ", %" #P1   \
                         ", keep, 1, 1;\n}"                                                                            \
                         : ACCUMULATORS                                                                                \
                         : "l"(a), "l"(b), "r"(u32(keep)));                                                            \
        }                                                                                                              \
    }

#define WGMMA_D8(i)                                                                                                    \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define WGMMA_D16(i) WGMMA_D8(i), WGMMA_D8(i + 8)
#define WGMMA_D32(i) WGMMA_D16(i), WGMMA_D16(i + 16)
#define WGMMA_D64(i) WGMMA_D32(i), WGMMA_D32(i + 32)
#define WGMMA_D96(i) WGMMA_D64(i), WGMMA_D32(i + 64)
#define WGMMA_D128(i) WGMMA_D64(i), WGMMA_D64(i + 64)
#define WGMMA_R8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_R16 WGMMA_R8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_R32 WGMMA_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_R64                                                                                                      \
    WGMMA_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55"       \
        ",%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_R96                                                                                                      \
    WGMMA_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"       \
        ",%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_R128                                                                                                     \
    WGMMA_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115"       \
        ",%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

WGMMA(16, WGMMA_R8, WGMMA_D8(0), 8, 9, 10, 11, 12, 13, 14);
WGMMA(32, WGMMA_R16, WGMMA_D16(0), 16, 17, 18, 19, 20, 21, 22);
WGMMA(64, WGMMA_R32, WGMMA_D32(0), 32, 33, 34, 35, 36, 37, 38);
WGMMA(128, WGMMA_R64, WGMMA_D64(0), 64, 65, 66, 67, 68, 69, 70);
WGMMA(192, WGMMA_R96, WGMMA_D96(0), 96, 97, 98, 99, 100, 101, 102);
WGMMA(256, WGMMA_R128, WGMMA_D128(0), 128, 129, 130, 131, 132, 133, 134);

#endif
