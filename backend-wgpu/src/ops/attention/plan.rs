//! How the work of attention is cut into pieces that fit into scratch memory.

use std::ops::Range;

use dropless_core::ops::AttentionShape;

/// Words of scratch memory, 128 MiB. A key head of a sequence that needs more is walked in blocks of rows: at least
/// [`BLOCK`] of them, so that memory grows with the length of a sequence and not with its square.
pub(super) const SCRATCH: usize = 1 << 25;
/// Rows of a block are a multiple of this, and so of every model's step.
const BLOCK: usize = 64;
/// Rows and keys of a square, to which scores are padded.
const SQUARE: usize = 16;

/// A number of rows, keys or columns in whole squares.
pub(super) fn padded(extent: usize) -> usize {
    extent.next_multiple_of(SQUARE)
}

/// Query heads that share a key head.
pub(super) fn group(shape: AttentionShape) -> usize {
    shape.heads / shape.kv_heads
}

/// Key heads of all sequences.
pub(super) fn pairs(shape: AttentionShape) -> usize {
    shape.batch * shape.kv_heads
}

/// Part of the work whose scores lie in memory together.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    /// Key heads, counted over all sequences.
    pub(super) pairs: Range<usize>,
    /// The query head of each, among those that share it.
    pub(super) member: usize,
    pub(super) rows: Range<usize>,
}

/// The largest extents of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) pairs: usize,
    pub(super) rows: usize,
}

impl Plan {
    /// For `arrays` words a row and key and `columns` words a key, within `scratch` words if that can be.
    pub(super) fn new(shape: AttentionShape, arrays: usize, columns: usize, scratch: usize) -> Plan {
        let tokens = padded(shape.sequence);
        let (sums, row) = (tokens * columns, tokens * arrays);
        let pair = sums + tokens * row;
        if pair <= scratch {
            Plan { pairs: (scratch / pair.max(1)).min(pairs(shape)).max(1), rows: tokens.max(1) }
        } else {
            Plan { pairs: 1, rows: (scratch.saturating_sub(sums) / row / BLOCK * BLOCK).max(BLOCK).min(tokens) }
        }
    }

    /// The pieces in the order of the chains along the rows.
    pub(super) fn pieces(self, shape: AttentionShape) -> impl Iterator<Item = Piece> {
        let all = pairs(shape);
        let rows = move |row| row..shape.sequence.min(row + self.rows);
        let blocks = move || (0..shape.sequence).step_by(self.rows).map(rows);
        let members = move || (0..group(shape)).flat_map(move |member| blocks().map(move |rows| (member, rows)));
        (0..all).step_by(self.pairs).flat_map(move |first| {
            let pairs = first..all.min(first + self.pairs);
            members().map(move |(member, rows)| Piece { pairs: pairs.clone(), member, rows })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(batch: usize, sequence: usize, heads: usize, kv_heads: usize) -> AttentionShape {
        AttentionShape { batch, sequence, heads, kv_heads, qk_dim: 32, v_dim: 32, scale: 1.0 }
    }

    #[test]
    fn a_plan_keeps_within_its_memory_or_takes_one_block() {
        for sequence in [1, 16, 17, 128, 300, 1000, 4096] {
            for scratch in [1, 1 << 12, 1 << 16, 1 << 20, SCRATCH] {
                let Plan { pairs, rows } = Plan::new(shape(8, sequence, 4, 2), 2, 192, scratch);
                let tokens = padded(sequence);
                let words = pairs * tokens * (2 * rows + 192);
                let least = (pairs, rows) == (1, BLOCK.min(tokens));
                assert!(words <= scratch || least, "{sequence} {scratch}: {pairs} {rows}");
                assert!(rows == tokens || pairs == 1 && rows.is_multiple_of(BLOCK), "{sequence} {scratch}: {rows}");
            }
        }
        assert_eq!(Plan::new(shape(16, 128, 4, 4), 2, 192, SCRATCH), Plan { pairs: 64, rows: 128 }, "the default job");
    }

    #[test]
    fn pieces_have_each_row_of_each_head_once_and_in_order() {
        let shape = shape(3, 130, 6, 3);
        let pieces: Vec<_> = Plan { pairs: 4, rows: 64 }.pieces(shape).collect();
        for pair in 0..9 {
            let of_pair = pieces.iter().filter(|piece| piece.pairs.contains(&pair));
            let rows: Vec<_> = of_pair.flat_map(|piece| piece.rows.clone().map(|row| (piece.member, row))).collect();
            let expected: Vec<_> = (0..2).flat_map(|member| (0..130).map(move |row| (member, row))).collect();
            assert_eq!(rows, expected, "{pair}");
        }
        assert_eq!(Plan::new(shape_of_nothing(), 2, 192, SCRATCH).pieces(shape_of_nothing()).count(), 0);
    }

    fn shape_of_nothing() -> AttentionShape {
        shape(0, 0, 2, 1)
    }
}
