// Which keys a row sees: those from its document's start to itself. NUMERICS.md, "Attention".

// The first key that a row sees. A row that sees none, as those past the sequence's end, has one past itself.
fn first_key(pair: u32, row: u32) -> u32 {
    if row >= given.scalars.sequence {
        return row + 1u;
    }
    return select(0u, start_at(token_of(pair, row)), start_given());
}
