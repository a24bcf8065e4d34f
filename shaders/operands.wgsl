// The chains of an invocation, TILE x TILE of them, and their operands: NUMERICS.md, "Matrix products".
//
// An invocation goes along its chains STEP terms at a time. It holds those of all its columns, and takes its rows in
// turns: whatever belongs to rows (`acc`, `rows`, `bundles`) moves on by one place with each, so that every index is a
// constant and the arrays are registers, while the code is there once for all rows.
//
// A product declares the bindings `a` and `b`, `a_place(t)` and `b_place(t)` (where element t of the chain lies, counted
// from a row's or column's first, in elements), `term_of(value)` (a factor under its model) and `left_term_of(value)` (the
// same of `a`, or OUTSIDE for a place in the chain that has no product). What lies NOWHERE is +0: a term of the chain, or
// one of the rows. Constants: TILE; PAIRS (of its elements, rounded up); those of mma.wgsl; MODEL (0: a chain of f32 fma, a
// term being the bits of an f32); A_CHAIN_LAST, B_CHAIN_LAST (the chain's dimension is the last in memory); A_UNITS,
// B_UNITS (what lies side by side begins at a multiple of 16 bytes); UNIT (elements in them).

// A place that is not there.
const NOWHERE: u32 = 0xFFFFFFFFu;

fn is_there(first: u32, place: u32) -> bool {
    return first != NOWHERE && place != NOWHERE;
}

// Where to read an element; what is read for one that is not there does not count.
fn place_in(first: u32, place: u32) -> u32 {
    return select(0u, first + place, is_there(first, place));
}

var<private> acc: array<array<u32, TILE>, TILE>;
// Where each row and column begins.
var<private> rows: array<u32, TILE>;
var<private> columns: array<u32, TILE>;
// Element i of the present step, of each row.
var<private> bundles: array<array<u32, PAIRS>, STEP>;

// The next row becomes the first, and the first the last.
fn turn_rows() {
    let row = rows[0];
    let chains = acc[0];
    for (var i = 1u; i < TILE; i += 1u) { // unrolled
        rows[i - 1u] = rows[i];
        acc[i - 1u] = acc[i];
    }
    rows[TILE - 1u] = row;
    acc[TILE - 1u] = chains;
}

// The next column becomes the first in `columns` and in the first row's chains.
fn turn_columns() {
    let column = columns[0];
    let chain = acc[0][0];
    for (var i = 1u; i < TILE; i += 1u) { // unrolled
        columns[i - 1u] = columns[i];
        acc[0][i - 1u] = acc[0][i];
    }
    columns[TILE - 1u] = column;
    acc[0][TILE - 1u] = chain;
}

// Element j of what a unit or a bundle holds.
fn element(word: u32, j: u32) -> u32 {
    if UNIT == 16u { // decided
        return (word >> ((j & 3u) * 8u)) & 0xFFu;
    } else {
        return select(word << 16u, word & 0xFFFF0000u, (j & 1u) != 0u);
    }
}

fn set_left(i: u32, value: u32, inside: bool) {
    let term = left_term_of(select(0u, value, inside));
    left[i] = Term(term.exponent, term.sig << select(LEFT_SHIFT, 0u, MODEL == 0u));
}

fn set_right(c: u32, i: u32, value: u32, inside: bool) {
    right[c][i] = term_of(select(0u, value, inside));
}

// Terms t.. of all rows, where they lie side by side.
fn fill_bundles(t: u32, end: u32) {
    for (var i = 0u; i < STEP; i += 1u) { // unrolled loads
        let term = a_place(min(t + i, end - 1u));
        let place = place_in(rows[0], term);
        if TILE == 8u { // decided
            let unit = a_unit(place);
            for (var j = 0u; j < PAIRS; j += 1u) { // unrolled
                bundles[i][j] = select(0u, unit[j & 3u], term != NOWHERE);
            }
        } else {
            for (var j = 0u; j < PAIRS; j += 1u) { // unrolled
                bundles[i][j] = select(0u, a_word(place + 2u * j), term != NOWHERE);
            }
        }
    }
}

// Terms t.. of the first row; past the chain's end they are zero.
fn fill_left(t: u32, end: u32) {
    if A_UNITS == 0u { // decided
        for (var i = 0u; i < STEP; i += 1u) { // unrolled loads
            let place = a_place(min(t + i, end - 1u));
            set_left(i, a_at(place_in(rows[0], place)), t + i < end && is_there(rows[0], place));
        }
    } else if A_CHAIN_LAST == 1u { // decided
        for (var i = 0u; i < STEP; i += UNIT) { // unrolled loads
            let unit = a_unit(place_in(rows[0], select(t, t + i, t + i < end)));
            for (var j = 0u; j < UNIT; j += 1u) { // unrolled
                set_left(i + j, element(unit[j * 4u / UNIT], j), t + i + j < end && rows[0] != NOWHERE);
            }
        }
    } else {
        for (var i = 0u; i < STEP; i += 1u) { // unrolled
            set_left(i, bundles[i][0] << 16u, t + i < end);
            // The next row's element comes to the front.
            let first = bundles[i][0];
            for (var j = 0u; j < PAIRS - 1u; j += 1u) { // unrolled
                bundles[i][j] = (bundles[i][j] >> 16u) | (bundles[i][j + 1u] << 16u);
            }
            bundles[i][PAIRS - 1u] = (bundles[i][PAIRS - 1u] >> 16u) | (first << 16u);
        }
    }
}

// Terms t.. of every column.
fn fill_right(t: u32, end: u32) {
    if B_UNITS == 1u && B_CHAIN_LAST == 0u { // decided
        for (var i = 0u; i < STEP; i += 1u) { // unrolled loads
            let term = b_place(min(t + i, end - 1u));
            let place = place_in(columns[0], term);
            var pairs: array<u32, PAIRS>;
            if TILE == 8u { // decided
                let unit = b_unit(place);
                for (var j = 0u; j < PAIRS; j += 1u) { // unrolled
                    pairs[j] = select(0u, unit[j & 3u], term != NOWHERE);
                }
            } else {
                for (var j = 0u; j < PAIRS; j += 1u) { // unrolled
                    pairs[j] = select(0u, b_word(place + 2u * j), term != NOWHERE);
                }
            }
            for (var c = 0u; c < TILE; c += 1u) { // unrolled
                set_right(c, i, element(pairs[c / 2u], c), t + i < end);
            }
        }
    } else {
        for (var c = 0u; c < TILE; c += 1u) { // unrolled
            if B_UNITS == 1u { // decided
                for (var i = 0u; i < STEP; i += UNIT) { // unrolled loads
                    let unit = b_unit(columns[c] + select(t, t + i, t + i < end));
                    for (var j = 0u; j < UNIT; j += 1u) { // unrolled
                        set_right(c, i + j, element(unit[j * 4u / UNIT], j), t + i + j < end);
                    }
                }
            } else {
                for (var i = 0u; i < STEP; i += 1u) { // unrolled loads
                    let place = b_place(min(t + i, end - 1u));
                    set_right(c, i, b_at(place_in(columns[c], place)), t + i < end && place != NOWHERE);
                }
            }
        }
    }
}

// Inside the chain only: unlike a matrix unit, fma tells a zero term of one sign from none.
fn fma_step(c: u32, start: u32, length: u32) -> u32 {
    var chain = start;
    for (var i = 0u; i < STEP; i += 1u) { // unrolled
        let sum = f32_fma(u32(left[i].sig), u32(right[c][i].sig), chain);
        chain = select(chain, sum, i < length && left[i].exponent != OUTSIDE);
    }
    return chain;
}

// Whether the products of the first row and column end in a NaN.
fn chain_is_nan(begin: u32, end: u32) -> bool {
    var seen: Specials;
    for (var t = begin; t < end; t += 1u) {
        let a_term = a_place(t);
        let b_term = b_place(t);
        let x = left_term_of(select(0u, a_at(place_in(rows[0], a_term)), is_there(rows[0], a_term)));
        if x.exponent != OUTSIDE {
            let value = select(0u, b_at(place_in(columns[0], b_term)), b_term != NOWHERE);
            seen = with_product(seen, x, term_of(value));
        }
    }
    return seen.nan || (seen.positive && seen.negative);
}

// Every chain goes on with its terms begin .. end; begin is where a step begins.
fn continue_chains(begin: u32, end: u32) {
    highest = 2 * ABSENT;
    for (var t = begin; t < end; t += STEP) {
        fill_right(t, end);
        if A_UNITS == 1u && A_CHAIN_LAST == 0u { // decided
            fill_bundles(t, end);
        }
        for (var r = 0u; r < TILE; r += 1u) {
            fill_left(t, end);
            for (var c = 0u; c < TILE; c += 1u) { // unrolled
                if MODEL == 0u { // decided
                    acc[0][c] = fma_step(c, acc[0][c], end - t);
                } else {
                    acc[0][c] = mma_step(c, acc[0][c]);
                }
            }
            turn_rows();
        }
    }
    if MODEL == 1u { // decided
        // Nothing to do but where a special factor was.
        let side = select(0u, TILE, highest >= INFINITE);
        for (var r = 0u; r < side; r += 1u) {
            for (var c = 0u; c < side; c += 1u) {
                acc[0][0] = select(acc[0][0], NAN, chain_is_nan(begin, end));
                turn_columns();
            }
            turn_rows();
        }
    }
}
