// The operands of a matrix product, from memory into `left` and `right` of mma.wgsl, and the chain without a matrix unit.
//
// A product declares the bindings `a` and `b`, `a_place(t)` and `b_place(t)` (where element t of the chain lies, in
// elements), and `word_of(value)` (what its model adds up). Constants: A_CHAIN_LAST, B_CHAIN_LAST (the chain's dimension
// is the last in memory); A_QUADS, B_QUADS (rows start at a multiple of four elements).

// Terms t.. of the rows that start at `rows`; past the chain's end they are zero.
fn fill_left(rows: array<u32, TILE>, t: u32, end: u32) {
    if A_QUADS == 1u && A_CHAIN_LAST == 1u {
        for (var r = 0u; r < TILE; r += 1u) {
            for (var i = 0u; i < STEP; i += 4u) {
                let inside = t + i < end;
                let quad = a_quad(rows[r] + select(t, t + i, inside));
                for (var j = 0u; j < 4u; j += 1u) {
                    left[r][i + j] = select(0u, word_of(quad[j]), t + i + j < end);
                }
            }
        }
    } else {
        for (var i = 0u; i < STEP; i += 1u) {
            let inside = t + i < end;
            let place = a_place(select(t, t + i, inside));
            if A_QUADS == 1u {
                let quad = a_quad(rows[0] + place);
                for (var r = 0u; r < TILE; r += 1u) {
                    left[r][i] = select(0u, word_of(quad[r]), inside);
                }
            } else {
                for (var r = 0u; r < TILE; r += 1u) {
                    left[r][i] = select(0u, word_of(a_at(rows[r] + place)), inside);
                }
            }
        }
    }
}

fn fill_right(columns: array<u32, TILE>, t: u32, end: u32) {
    if B_QUADS == 1u && B_CHAIN_LAST == 1u {
        for (var c = 0u; c < TILE; c += 1u) {
            for (var i = 0u; i < STEP; i += 4u) {
                let inside = t + i < end;
                let quad = b_quad(columns[c] + select(t, t + i, inside));
                for (var j = 0u; j < 4u; j += 1u) {
                    right[c][i + j] = select(0u, word_of(quad[j]), t + i + j < end);
                }
            }
        }
    } else {
        for (var i = 0u; i < STEP; i += 1u) {
            let inside = t + i < end;
            let place = b_place(select(t, t + i, inside));
            if B_QUADS == 1u {
                let quad = b_quad(columns[0] + place);
                for (var c = 0u; c < TILE; c += 1u) {
                    right[c][i] = select(0u, word_of(quad[c]), inside);
                }
            } else {
                for (var c = 0u; c < TILE; c += 1u) {
                    right[c][i] = select(0u, word_of(b_at(columns[c] + place)), inside);
                }
            }
        }
    }
}

// Inside the chain only: unlike a matrix unit, fma tells a zero term of one sign from none.
fn fma_step(r: u32, c: u32, length: u32, start: u32) -> u32 {
    var acc = start;
    for (var i = 0u; i < STEP; i += 1u) {
        acc = select(acc, f32_fma(left[r][i], right[c][i], acc), i < length);
    }
    return acc;
}
