//! Group offsets come from the device, so unlike shapes they are only known when an op runs.
//! NUMERICS.md, "Indices from the device".

/// The offsets as they count: the first as 0, the last as at most `rows`, the others as at most the last and at least the
/// one before; all as multiples of `block` (the one below, where they are none).
pub(crate) fn counted(offsets: &[u32], rows: usize, block: usize) -> Vec<usize> {
    let most = offsets.last().map_or(0, |&last| rows.min(last as usize));
    let mut highest = 0;
    let rest = offsets.iter().skip(1).map(|&offset| {
        highest = highest.max(most.min(offset as usize) / block * block);
        highest
    });
    std::iter::once(0).chain(rest).collect()
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn offsets_count_within_the_rows_and_ascend() {
        for (offsets, rows, block, expected) in [
            (&[0, 2, 2, 7][..], 9, 1, &[0, 2, 2, 7][..]),
            (&[3, 5, 2, 4, 6], 9, 1, &[0, 5, 5, 5, 6]),
            (&[0, 4, u32::MAX, 8], 9, 1, &[0, 4, 8, 8]),
            (&[0, 5, 3, 2, u32::MAX], 4, 1, &[0, 4, 4, 4, 4]),
            (&[1, 33, 31, 100], 99, 32, &[0, 32, 32, 96]),
        ] {
            assert_eq!(counted(offsets, rows, block), expected, "{offsets:?} of {rows}");
        }
    }
}
