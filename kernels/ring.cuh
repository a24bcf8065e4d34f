// Places in a ring of STAGES in shared memory, which producers fill and consumers read.

// A place, and the parity of its present phase.
struct Place {
    u32 stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void advance() {
        stage += 1;
        if (stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }

    // The stage before.
    __device__ __forceinline__ u32 before() const { return (stage == 0 ? STAGES : stage) - 1; }
};
