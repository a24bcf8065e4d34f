// How the offsets of ragged groups count, whatever they hold: NUMERICS.md, "Indices from the device".

// The end of a group that begins at `begin`. `offset` and `last`: its offset and the last one; `rows`: all rows.
fn counted_offset(begin: u32, offset: u32, last: u32, rows: u32) -> u32 {
    return max(begin, min(offset, min(last, rows)));
}
