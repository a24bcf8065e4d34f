// The tiles of a grouped product's output: NUMERICS.md, "The three products of a layer".
//
// Tiles are counted group after group, in a group band after band: some rows of tiles, column after column. The blocks
// that run at one time then share rows of the first factor and columns of the second, which come from the L2 cache for
// all but the first of them. The groups' sizes are known here alone, on the device.
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

// At most so many rows of tiles are a band: with 132 blocks of 128 x 256 outputs, about as tall as it is wide.
constexpr u32 BAND = 16;

template <u32 ROWS, u32 COLUMNS>
class Tiles {
   public:
    __device__ explicit Tiles(const Given& given) : offsets(given.offsets), p(given.params) {}

    // Tile number `index`, for a whole warp. The numbers ascend from call to call. False: there are no more tiles.
    __device__ bool find(u64 index, Tile& tile) {
        const u32 across = ceil_div(p.columns, COLUMNS);
        const u64 down = index / across;
        const u32 column = u32(index - down * across);
        return RAGGED_CHAIN ? in_matrices(down, column, across, tile) : in_groups(down, column, across, tile);
    }

   private:
    // Every group has a matrix of `rows` rows.
    __device__ bool in_matrices(u64 down, u32 column, u32 across, Tile& tile) {
        const u32 each = ceil_div(p.rows, ROWS);
        const u64 group = down / each;
        if (group >= p.groups) return false;
        tile.group = u32(group);
        tile.first = offset(tile.group, p.chain);
        tile.terms = max(offset(tile.group + 1, p.chain), tile.first) - tile.first;
        place(u32(down - group * each), each, column, across, 0, p.rows, tile);
        return true;
    }

    // A lane looks at a group, 32 of them at a time.
    __device__ bool in_groups(u64 down, u32 column, u32 across, Tile& tile) {
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
                const auto owned = [&](u32 value) { return __shfl_sync(ALL_LANES, value, owner); };
                tile.group = window + owner;
                tile.first = 0;
                tile.terms = p.chain;
                place(u32(down - before) - owned(through - count), owned(count), column, across, owned(begin),
                      owned(end), tile);
                return true;
            }
            before += __shfl_sync(ALL_LANES, through, LANES - 1);
        }
        return false;
    }

    // From the order of rows to that of bands, in a group of `tall` rows of tiles: rows `begin` to `end` - 1. The bands
    // of a group are about equally tall.
    __device__ static void place(u32 down, u32 tall, u32 column, u32 across, u32 begin, u32 end, Tile& tile) {
        const u32 height = ceil_div(tall, ceil_div(tall, BAND));
        const u32 first = down / height * height;
        const u32 rows = min(height, tall - first), index = (down - first) * across + column;
        tile.row = begin + (first + index % rows) * ROWS;
        tile.rows = min(end - tile.row, ROWS);
        tile.column = index / rows * COLUMNS;
    }

    // Whatever the offsets hold, nothing outside of the tensors is touched.
    __device__ u32 offset(u32 group, u32 most) const { return min(offsets[group], most); }

    const u32* offsets;
    const Params& p;
    // The first group of the 32 looked at, and the rows of tiles of the groups before it.
    u32 window = 0;
    u64 before = 0;
};
