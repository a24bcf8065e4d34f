// The tiles of a grouped product's output: NUMERICS.md, "The three products of a layer".
//
// Tiles are counted group after group, in a group band after band: some rows of tiles, column after column. The blocks
// that run at one time then share rows of the first factor and columns of the second, which come from the L2 cache for
// all but the first of them. The groups' sizes are known here alone, on the device.
//
// Blocks may work in pairs, on tiles 2 i and 2 i + 1. Both of a pair belong to one group, so that their chains are
// equally long: a group of an odd number of tiles ends with one more, of no rows.
//
// Constant: RAGGED_CHAIN (the groups divide the chain: Wgrad; else they divide the rows). Scalars: groups, rows,
// columns, chain, offsets_block (what the groups' ends are multiples of). Tensor: offsets.

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
    // Whether the other tile of the pair has the same columns.
    bool shares;
};

__device__ __forceinline__ u32 ceil_div(u32 n, u32 by) { return n / by + (n % by != 0 ? 1 : 0); }

// At most so many rows of tiles are a band: with 132 blocks of 128 x 256 outputs, about as tall as it is wide.
constexpr u32 BAND = 16;

// How far a warp has come: the first group of the 32 looked at, where it begins, and the tiles of the groups before it. Its
// lanes may have one together, in shared memory: they write the same, after all of them have read.
struct Walk {
    u32 window;
    u32 start;
    u64 before;
};

template <u32 ROWS, u32 COLUMNS, bool PAIRS = false>
class Tiles {
   public:
    // Begins a walk.
    __device__ Tiles(const Given& given, Walk& walk) : offsets(given.offsets), p(given.scalars), walk(walk) { walk = {}; }

    // Tile number `index`, for a whole warp. The numbers ascend from call to call. False: there are no more tiles.
    __device__ bool find(u64 index, Tile& tile) {
        return RAGGED_CHAIN ? in_matrices(index, tile) : in_groups(index, tile);
    }

   private:
    // Every group has a matrix of `rows` rows.
    __device__ bool in_matrices(u64 index, Tile& tile) {
        const u32 each = tiles_of(p.rows);
        const u64 number = index / each;
        if (number >= p.groups) return false;
        const u32 group = u32(number);
        u32 end = ends(p.chain);
        for (; group - walk.window >= LANES; end = ends(p.chain)) next_window(end);
        tile.group = group;
        tile.first = __shfl_sync(ALL_LANES, group_begin(end, walk.start), group - walk.window);
        tile.terms = __shfl_sync(ALL_LANES, end, group - walk.window) - tile.first;
        place(u32(index - number * each), 0, p.rows, tile);
        return true;
    }

    // A lane looks at a group, 32 of them at a time.
    __device__ bool in_groups(u64 index, Tile& tile) {
        while (walk.window < p.groups) {
            const u32 end = ends(p.rows), begin = group_begin(end, walk.start);
            const u32 count = tiles_of(end - begin);
            u32 through = count;
#pragma unroll
            for (u32 by = 1; by < LANES; by *= 2) {
                const u32 left = __shfl_up_sync(ALL_LANES, through, by);
                if (lane_id() >= by) through += left;
            }
            const u32 owners = __ballot_sync(ALL_LANES, index < walk.before + through);
            if (owners != 0) {
                const u32 owner = __ffs(owners) - 1;
                const auto owned = [&](u32 value) { return __shfl_sync(ALL_LANES, value, owner); };
                tile.group = walk.window + owner;
                tile.first = 0;
                tile.terms = p.chain;
                place(u32(index - walk.before) - owned(through - count), owned(begin), owned(end), tile);
                return true;
            }
            const u64 beyond = walk.before + __shfl_sync(ALL_LANES, through, LANES - 1);
            next_window(end);
            walk.before = beyond;
        }
        return false;
    }

    // Where the window's groups end, `rows` at the most.
    __device__ u32 ends(u32 rows) const {
        return group_end(offsets, p.groups, rows, p.offsets_block, walk.window, walk.start);
    }

    __device__ void next_window(u32 end) {
        const u32 next = walk.window + LANES, begin = __shfl_sync(ALL_LANES, end, LANES - 1);
        __syncwarp();
        walk.window = next;
        walk.start = begin;
    }

    // Tiles beside each other.
    __device__ u32 across() const { return ceil_div(p.columns, COLUMNS); }

    // Tiles of so many rows of a group.
    __device__ u32 tiles_of(u32 rows) const {
        const u32 count = ceil_div(rows, ROWS) * across();
        return PAIRS ? count + count % 2 : count;
    }

    // Tile number `index` of a group's rows `begin` to `end` - 1, in bands of about the same height.
    __device__ void place(u32 index, u32 begin, u32 end, Tile& tile) const {
        const u32 tall = ceil_div(end - begin, ROWS), height = ceil_div(tall, ceil_div(tall, BAND));
        const bool exists = index < tall * across();
        if (!exists) index -= 1;
        const u32 first = index / (height * across()) * height, rows = min(height, tall - first);
        const u32 within = index - first * across(), row = within % rows;
        tile.row = begin + (first + row) * ROWS;
        tile.rows = exists ? min(end - tile.row, ROWS) : 0;
        tile.column = within / rows * COLUMNS;
        tile.shares = PAIRS && exists && (index % 2 == 0 ? row + 1 < rows : row > 0);
    }

    const u32* offsets;
    const Scalars& p;
    Walk& walk;
};
