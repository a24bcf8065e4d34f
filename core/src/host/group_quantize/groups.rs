//! The rows of the groups and the blocks along them.

use std::ops::Range;

use super::OP;
use crate::error::{Error, Result};
use crate::ops::offsets;

/// The rows of the groups, one group after another: group g has the rows `0[g]..0[g + 1]`, from row 0 on.
pub(super) struct Groups(Vec<usize>);

/// A block along the rows of a group.
pub(super) struct Block {
    /// Its rows in the input, fewer than a whole block at the end of a group.
    pub(super) rows: Range<usize>,
    /// Its place in the result; what exceeds `rows` is padding.
    pub(super) at: Range<usize>,
}

impl Groups {
    /// Those that the offsets name.
    pub(super) fn ragged(offsets: &[u32], rows: usize) -> Groups {
        Groups(offsets::counted(offsets, rows, 1))
    }

    /// `groups` groups of `rows` rows each.
    pub(super) fn stacked(groups: usize, rows: usize) -> Groups {
        Groups((0..=groups).map(|g| g * rows).collect())
    }

    /// Rows in all groups.
    pub(super) fn rows(&self) -> usize {
        self.0[self.0.len() - 1]
    }

    pub(super) fn len(&self) -> usize {
        self.0.len() - 1
    }

    /// The blocks of every group, each group padded to whole blocks.
    pub(super) fn padded(&self, block: usize) -> Vec<Block> {
        let mut blocks: Vec<Block> = (0..self.len()).flat_map(|group| self.blocks_of(group, block)).collect();
        for (i, b) in blocks.iter_mut().enumerate() {
            b.at = i * block..(i + 1) * block;
        }
        blocks
    }

    /// The blocks of one group, placed from 0 on without padding.
    pub(super) fn blocks_of(&self, group: usize, block: usize) -> Vec<Block> {
        let rows = self.0[group]..self.0[group + 1];
        let blocks = rows.clone().step_by(block).map(|from| from..rows.end.min(from + block));
        blocks.map(|b| Block { at: b.start - rows.start..b.end - rows.start, rows: b }).collect()
    }

    /// Writes the offsets of the groups when each is padded to whole blocks.
    pub(super) fn store_padded(&self, block: usize, out: &mut [u32]) -> Result<()> {
        let mut offset = 0;
        for (group, out) in out.iter_mut().enumerate() {
            *out = u32::try_from(offset).map_err(|_| Error::Argument {
                op: OP,
                field: "column.offsets",
                expected: "below 2^32".into(),
                found: offset.to_string(),
            })?;
            if group < self.len() {
                offset += (self.0[group + 1] - self.0[group]).next_multiple_of(block);
            }
        }
        Ok(())
    }
}
