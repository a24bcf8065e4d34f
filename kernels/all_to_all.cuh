// What the kernels of the exchange between processes share. Rows are opaque bytes.
//
// A group of ranks has a `state` in device memory, which orders the blocks and the launches of this rank, and a `board` in
// pinned memory, by which the host knows how far exchanges have come without waiting. The words of both are named in Rust.

// A header, of HEADER words: what a member announces to another about the rows it sends.
constexpr u32 ROWS = 0, CAPACITY = 1, ROW_BYTES = 2;

// ---- Memory that other processes and other devices see ----

__device__ __forceinline__ u32 load_acquire(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ __forceinline__ void store_release(u32* word, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ u32 load_shared_word(const u32* word) { return *(const volatile u32*)word; }

__device__ __forceinline__ void store_shared_word(u32* word, u32 value) { *(volatile u32*)word = value; }

// ---- The board ----

// One exchange more has begun, or has ended. Called by one thread.
__device__ __forceinline__ void count(u32* state, u32* board, u32 word) {
    u32 number = ++state[word];
    __threadfence_system();
    store_shared_word(board + word, number);
}

// The first fault stays on the board, and no later exchange moves anything.
__device__ __forceinline__ void report(u32* state, u32* board, u32 fault, u32 place, u32 found, u32 expected) {
    if (atomicCAS(state + FAILED, 0, 1) == 0) {
        store_shared_word(board + FAULT_PLACE, place);
        store_shared_word(board + FAULT_FOUND, found);
        store_shared_word(board + FAULT_EXPECTED, expected);
        __threadfence_system();
        store_shared_word(board + FAULT, fault);
    }
}

// Waits until a word that another device writes has come as far as `value`, modulo 2^32. False when the host wants all
// exchanges to end: it alone knows how long the other member may take.
__device__ __forceinline__ bool await(const u32* word, u32 value, u32* state, const u32* board) {
    for (u32 turn = 1;; ++turn) {
        if (i32(load_acquire(word) - value) >= 0) {
            return true;
        }
        if (turn % 64 == 0 && load_shared_word(board + STOP) != 0) {
            atomicExch(state + FAILED, 1);
            return false;
        }
    }
}

// Whether what member `place` announced is what this one expects; reports it if not.
__device__ __forceinline__ bool agrees(const u32* header, u32 expected, u32 capacity, u32 row_bytes, u32* state, u32* board,
                                       u32 place) {
    u32 rows = load_shared_word(header + ROWS);
    u32 their_capacity = load_shared_word(header + CAPACITY), their_bytes = load_shared_word(header + ROW_BYTES);
    if (their_capacity != capacity) {
        report(state, board, FAULT_CAPACITY, place, their_capacity, capacity);
    } else if (their_bytes != row_bytes) {
        report(state, board, FAULT_ROW_BYTES, place, their_bytes, row_bytes);
    } else if (rows != expected) {
        report(state, board, FAULT_ROWS, place, rows, expected);
    } else if (rows > capacity) {
        report(state, board, FAULT_OVERFLOW, place, rows, capacity);
    } else {
        return true;
    }
    return false;
}

// True in all threads of the block that arrives last; what all blocks wrote before is then visible to it, and to whom it
// tells. `state` is ready for the next launch.
__device__ __forceinline__ bool arrives_last(u32* state) {
    __shared__ bool last;
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(state + ARRIVED, 1) == gridDim.x - 1;
        if (last) {
            state[ARRIVED] = 0;
        }
        __threadfence_system();
    }
    __syncthreads();
    return last;
}

// ---- Copies ----

struct alignas(16) Quad {
    u32 words[4];
};

// Loads that never come from a cache which another device's stores do not reach.
__device__ __forceinline__ Quad load_shared(const Quad* from) {
    Quad quad;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(quad.words[0]), "=r"(quad.words[1]), "=r"(quad.words[2]), "=r"(quad.words[3])
                 : "l"(from));
    return quad;
}

__device__ __forceinline__ u32 load_shared(const u32* from) { return *(const volatile u32*)from; }

__device__ __forceinline__ u8 load_shared(const u8* from) { return *(const volatile u8*)from; }

// Block `part` of `parts` that copy together; four loads of a thread are on their way at once, since another device's
// memory is far.
template <typename Word>
__device__ __forceinline__ void copy_words(Word* to, const Word* from, u64 count, u32 part, u32 parts) {
    constexpr u32 AHEAD = 4;
    u64 stride = u64(parts) * blockDim.x, i = u64(part) * blockDim.x + threadIdx.x;
    for (; i + (AHEAD - 1) * stride < count; i += AHEAD * stride) {
        Word words[AHEAD];
#pragma unroll
        for (u32 n = 0; n < AHEAD; ++n) {
            words[n] = load_shared(from + i + n * stride);
        }
#pragma unroll
        for (u32 n = 0; n < AHEAD; ++n) {
            to[i + n * stride] = words[n];
        }
    }
    for (; i < count; i += stride) {
        to[i] = load_shared(from + i);
    }
}

// Copies bytes in the largest words that both ends are aligned to.
__device__ __forceinline__ void copy_bytes(u8* to, const u8* from, u64 bytes, u32 part, u32 parts) {
    u64 whole = 0, ends = u64(to) | u64(from);
    if (ends % sizeof(Quad) == 0) {
        copy_words((Quad*)to, (const Quad*)from, bytes / sizeof(Quad), part, parts);
        whole = bytes / sizeof(Quad) * sizeof(Quad);
    } else if (ends % sizeof(u32) == 0) {
        copy_words((u32*)to, (const u32*)from, bytes / sizeof(u32), part, parts);
        whole = bytes / sizeof(u32) * sizeof(u32);
    }
    copy_words(to + whole, from + whole, bytes - whole, part, parts);
}
