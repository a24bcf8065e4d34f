// What the products of attention give operands.wgsl.

fn term_of(value: u32) -> Term {
    if MODEL == 1u { // decided
        return term_from_bf16(value);
    } else {
        return Term(0, i32(value));
    }
}

// Of a number for a row and a key. What a row does not see is in no product, so that not even an infinity enters.
fn seen_term_of(value: u32) -> Term {
    let term = term_of(value);
    return Term(select(term.exponent, OUTSIDE, value == UNSEEN), select(term.sig, 0, value == UNSEEN));
}

fn a_place(t: u32) -> u32 {
    return t * given.scalars.a_chain;
}

fn b_place(t: u32) -> u32 {
    return t * given.scalars.b_chain;
}

// The first key that one of the TILE rows from `row` on sees.
fn first_key_of_tile(pair: u32, row: u32) -> u32 {
    var first = row + TILE;
    for (var r = 0u; r < TILE; r += 1u) {
        first = min(first, first_key(pair, row + r));
    }
    return first;
}
