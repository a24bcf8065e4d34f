//! From the kind of a product and the extents of its layer to the shapes of its factors: the one place that derives them.

use super::GemmKind;

/// A grouped product in the words of a BLAS: `m x n` outputs, each a chain of `k` terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product {
    /// Number of groups.
    pub groups: usize,
    /// Rows of the output: those of all groups together (at least as many as there are), in `Wgrad` those of each group's
    /// matrix.
    pub m: usize,
    /// Columns of the output.
    pub n: usize,
    /// Terms of a chain; in `Wgrad` those of all groups together (at least as many as there are).
    pub k: usize,
    /// The factors: `m` rows of the first and `n` rows of the second, all along the chain.
    pub sides: [Side; 2],
}

/// What the groups divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ragged {
    /// The rows.
    Rows,
    /// The chain.
    Chain,
    /// Nothing: each group has a matrix of its own.
    Stacked,
}

/// One factor of a product: `rows` rows of `chain` elements, stored with either of them last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Side {
    /// Matrices: one, or one for each group.
    pub matrices: usize,
    /// Rows of a matrix.
    pub rows: usize,
    /// Elements along the chain.
    pub chain: usize,
    /// Whether the chain's dimension is the last one.
    pub chain_last: bool,
    /// What the groups divide.
    pub ragged: Ragged,
}

impl GemmKind {
    /// The product of this kind over `groups` groups of `rows` rows in all, with `n` and `k` the layer's outputs and inputs
    /// as the kinds' shapes have them.
    pub fn product(self, groups: usize, rows: usize, n: usize, k: usize) -> Product {
        let (m, n, k, a, b) = match self {
            GemmKind::Forward => (rows, n, k, (true, Ragged::Rows), (true, Ragged::Stacked)),
            GemmKind::Dgrad => (rows, k, n, (true, Ragged::Rows), (false, Ragged::Stacked)),
            GemmKind::Wgrad => (n, k, rows, (false, Ragged::Chain), (false, Ragged::Chain)),
        };
        let side = |rows, (chain_last, ragged)| {
            let matrices = if ragged == Ragged::Stacked { groups } else { 1 };
            Side { matrices, rows, chain: k, chain_last, ragged }
        };
        Product { groups, m, n, k, sides: [side(m, a), side(n, b)] }
    }
}

impl Product {
    /// Whether the groups divide the chain, so that each has an output of its own.
    pub fn ragged_chain(&self) -> bool {
        self.sides[0].ragged == Ragged::Chain
    }

    /// The extent that the groups divide (at least as much as they have).
    pub fn ragged_extent(&self) -> usize {
        if self.ragged_chain() { self.k } else { self.m }
    }

    /// The shape of the output.
    pub fn out_shape(&self) -> Vec<usize> {
        if self.ragged_chain() { vec![self.groups, self.m, self.n] } else { vec![self.m, self.n] }
    }
}

impl Side {
    /// The shape of a plain operand, which is that of MXFP8 codes, too.
    pub fn shape(&self) -> Vec<usize> {
        let [rows, cols] = if self.chain_last { [self.rows, self.chain] } else { [self.chain, self.rows] };
        if self.ragged == Ragged::Stacked { vec![self.matrices, rows, cols] } else { vec![rows, cols] }
    }

    /// As FP8 blocks are stored.
    pub fn chain_last(self) -> Side {
        Side { chain_last: true, ..self }
    }

    /// The scales of MXFP8 codes.
    pub fn mxfp8_scales(self) -> Side {
        Side { chain: self.chain / 32, ..self }
    }

    /// The inverse scales of FP8 blocks, which in a weight also span 128 of its rows; where the groups divide the chain,
    /// those of a block lie side by side.
    pub fn fp8_scales(self) -> Side {
        let rows = if self.ragged == Ragged::Stacked { self.rows.div_ceil(128) } else { self.rows };
        Side { rows, chain: self.chain.div_ceil(128), chain_last: self.ragged != Ragged::Chain, ..self }
    }

    /// Distance in memory from one row to the next, and from one element along the chain to the next.
    pub fn strides(self) -> [usize; 2] {
        if self.chain_last { [self.chain, 1] } else { [1, self.rows] }
    }

    /// Where in memory the element of a row along the chain lies.
    pub fn place(self, group: usize, row: usize, along: usize) -> usize {
        let [row_stride, chain_stride] = self.strides();
        let matrix = if self.ragged == Ragged::Stacked { group * self.rows * self.chain } else { 0 };
        matrix + row * row_stride + along * chain_stride
    }
}
