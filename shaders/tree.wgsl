// Sums along the binary tree over leaves lo..hi with mid = lo + (hi - lo) / 2: NUMERICS.md, "Sums". Leaves come in
// ascending order; absent ones are skipped.

// Partial sums, each with the depth at which the tree parts it from the one before. Depths ascend from bottom to top, so
// there are no more of them than levels.
var<private> sums: array<u32, 33>;
var<private> depths: array<u32, 33>;
var<private> height: u32;

// The depth of the node that parts leaf a from leaf b, a < b; that of the leaf itself if they are equal.
fn parting(lo: u32, hi: u32, a: u32, b: u32) -> u32 {
    var low = lo;
    var high = hi;
    var depth = 0u;
    loop {
        let mid = low + (high - low) / 2u;
        if (a < mid && mid <= b) || high - low <= 1u {
            break;
        }
        if b < mid {
            high = mid;
        } else {
            low = mid;
        }
        depth += 1u;
    }
    return depth;
}

// Adds the topmost two while the node that parts them lies at `depth` (several values of one leaf) or below.
fn merge_below(depth: u32) {
    while height > 1u && depths[height - 1u] >= depth {
        height -= 1u;
        sums[height - 1u] = f32_add(sums[height - 1u], sums[height]);
    }
}

// The next leaf, parted from the one before at `depth`.
fn push_leaf(value: u32, depth: u32) {
    merge_below(depth);
    sums[height] = value;
    depths[height] = depth;
    height += 1u;
}

// The sum of all leaves; +0 of none.
fn tree_sum() -> u32 {
    while height > 1u {
        height -= 1u;
        sums[height - 1u] = f32_add(sums[height - 1u], sums[height]);
    }
    return select(0u, sums[0], height > 0u);
}
