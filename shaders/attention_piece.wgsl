// What the shaders of attention share: a piece of the work, and where its rows, keys and scores lie. NUMERICS.md,
// "Attention".
//
// A pair is a sequence and one of its key heads; `pair` counts within the piece. A piece has one query head of each of
// its pairs, all keys, and the rows from `row` on. What belongs to a row and a key is stored key by key, `width` rows
// beside each other, so that neighbouring invocations of a row-wise shader read neighbouring elements, and a product
// finds the rows of its tile together whichever way its chain runs. Rows and keys are padded to squares, the longest
// step of a chain. Probabilities and their gradients are UNSEEN where a row does not see a key; in squares beyond the
// diagonal nothing is written and nothing read.

const SQUARE: u32 = 16u;
const KEY_TILE: u32 = 128u;
// A NaN that no operation gives, in either type.
const UNSEEN: u32 = 0xFFC00000u;

fn to_squares(extent: u32) -> u32 {
    return (extent + SQUARE - 1u) / SQUARE * SQUARE;
}

// A chain's end: a zero has no sign.
fn end_of(chain: u32) -> u32 {
    return select(chain, 0u, f32_abs(chain) == 0u);
}

fn token_of(pair: u32, row: u32) -> u32 {
    return (given.scalars.pair + pair) / given.scalars.kv_heads * given.scalars.sequence + row;
}

fn key_head_of(pair: u32) -> u32 {
    return (given.scalars.pair + pair) % given.scalars.kv_heads;
}

// A key of a pair, counted over all tokens and key heads.
fn key_of(pair: u32, key: u32) -> u32 {
    return token_of(pair, key) * given.scalars.kv_heads + key_head_of(pair);
}

// A query of a pair, counted over all tokens and query heads.
fn query_of(pair: u32, row: u32) -> u32 {
    return key_of(pair, row) * given.scalars.group + given.scalars.member;
}

// Where a pair's score of a row of the sequence lies.
fn score_place(pair: u32, key: u32, row: u32) -> u32 {
    return (pair * given.scalars.keys + key) * given.scalars.width + row - given.scalars.row;
}
