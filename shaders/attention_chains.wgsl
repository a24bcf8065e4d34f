// The chains of an invocation, TILE x TILE of them: NUMERICS.md, "Matrix products". See operands.wgsl and mma.wgsl for
// the constants; MODEL (0: a chain of f32 fma).

var<private> acc: array<array<u32, TILE>, TILE>;

// What MODEL adds up: f32 bits, or terms of a matrix unit.
fn word_of(value: u32) -> u32 {
    if MODEL == 0u {
        return value;
    }
    return term_from_bf16(value >> 16u);
}

fn a_place(t: u32) -> u32 {
    return t * given.params.a_chain;
}

fn b_place(t: u32) -> u32 {
    return t * given.params.b_chain;
}

// Every chain goes on with its terms begin .. end; begin is where a step begins.
fn continue_chains(rows: array<u32, TILE>, columns: array<u32, TILE>, begin: u32, end: u32) {
    for (var t = begin; t < end; t += STEP) {
        fill_left(rows, t, end);
        fill_right(columns, t, end);
        for (var r = 0u; r < TILE; r += 1u) {
            for (var c = 0u; c < TILE; c += 1u) {
                if MODEL == 0u {
                    acc[r][c] = fma_step(r, c, end - t, acc[r][c]);
                } else {
                    acc[r][c] = mma_step(r, c, acc[r][c]);
                }
            }
        }
    }
}

// The first key that one of the TILE rows from `row` on sees.
fn first_key_of_tile(pair: u32, row: u32) -> u32 {
    var first = row + TILE;
    for (var r = 0u; r < TILE; r += 1u) {
        first = min(first, first_key(pair, row + r));
    }
    return first;
}
