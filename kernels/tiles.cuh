// The tiles of a grouped product's output: NUMERICS.md, "The three products of a layer".
//
// Tiles are counted group after group, in a group by rows of tiles, in such a row by columns, so that the blocks that
// run at one time share rows of the first factor. The groups' sizes are known here alone, on the device.
//
// Constant: RAGGED_CHAIN (the groups divide the chain: Wgrad; else they divide the rows). Params: groups, rows,
// columns, chain. Tensor: offsets.

struct Tile {
    u32 group;
    // The first row, counted over the rows of all groups, or from 0 in every group if the groups divide the chain.
    u32 row;
    // Rows that belong to the group, at most the tile's.
    u32 rows;
    u32 column;
    // The first term of the chain, counted over all groups if they divide the chain, and how many there are.
    u32 first;
    u32 terms;
};

__device__ __forceinline__ u32 ceil_div(u32 n, u32 by) { return n / by + (n % by != 0 ? 1 : 0); }

template <u32 ROWS, u32 COLUMNS>
class Tiles {
   public:
    __device__ explicit Tiles(const Given& given) : offsets(given.offsets), p(given.params) {}

    // Tile number `index`, for a whole warp. The numbers ascend from call to call. False: there are no more tiles.
    __device__ bool find(u64 index, Tile& tile) {
        const u32 across = ceil_div(p.columns, COLUMNS);
        const u64 down = index / across;
        tile.column = u32(index - down * across) * COLUMNS;
        return RAGGED_CHAIN ? in_matrices(down, tile) : in_groups(down, tile);
    }

   private:
    // Every group has a matrix of `rows` rows.
    __device__ bool in_matrices(u64 down, Tile& tile) {
        const u32 each = ceil_div(p.rows, ROWS);
        const u64 group = down / each;
        if (group >= p.groups) return false;
        tile.group = u32(group);
        tile.row = u32(down - group * each) * ROWS;
        tile.rows = min(p.rows - tile.row, ROWS);
        tile.first = offset(tile.group, p.chain);
        tile.terms = max(offset(tile.group + 1, p.chain), tile.first) - tile.first;
        return true;
    }

    // A lane looks at a group, 32 of them at a time.
    __device__ bool in_groups(u64 down, Tile& tile) {
        for (; window < p.groups; window += LANES) {
            const u32 group = window + lane_id();
            u32 begin = 0, end = 0;
            if (group < p.groups) {
                begin = offset(group, p.rows);
                end = max(offset(group + 1, p.rows), begin);
            }
            const u32 count = ceil_div(end - begin, ROWS);
            u32 through = count;
#pragma unroll
            for (u32 by = 1; by < LANES; by *= 2) {
                const u32 left = __shfl_up_sync(ALL_LANES, through, by);
                if (lane_id() >= by) through += left;
            }
            const u32 owners = __ballot_sync(ALL_LANES, down < before + through);
            if (owners != 0) {
                const u32 owner = __ffs(owners) - 1;
                tile.group = window + owner;
                const u32 skipped = __shfl_sync(ALL_LANES, through - count, owner);
                tile.row = __shfl_sync(ALL_LANES, begin, owner) + u32(down - before - skipped) * ROWS;
                tile.rows = min(__shfl_sync(ALL_LANES, end, owner) - tile.row, ROWS);
                tile.first = 0;
                tile.terms = p.chain;
                return true;
            }
            before += __shfl_sync(ALL_LANES, through, LANES - 1);
        }
        return false;
    }

    // Whatever the offsets hold, nothing outside of the tensors is touched.
    __device__ u32 offset(u32 group, u32 most) const { return min(offsets[group], most); }

    const u32* offsets;
    const Params& p;
    // The first group of the 32 looked at, and the rows of tiles of the groups before it.
    u32 window = 0;
    u64 before = 0;
};
