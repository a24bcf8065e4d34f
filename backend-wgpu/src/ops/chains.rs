//! What the launchers of matrix products share: the tile of an invocation, and the constants of operands.wgsl.

use dropless_core::numerics::mma::Tensorcore;
use dropless_core::{DType, Tensor};

use crate::device::UNIT;
use crate::shader::word;

/// Invocations of a workgroup along rows and along columns.
pub(crate) const SIDE: usize = 8;

/// The tile of chains under a matrix unit, as many as a GPU has registers for, and of those of f32 fma.
pub(crate) fn tile(unit: Option<Tensorcore>) -> usize {
    if unit.is_some() { 4 } else { 2 }
}

/// The chains of a product, and how their operands lie in memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chains {
    /// Of both operands.
    pub(crate) dtype: DType,
    /// None: chains of f32 fma.
    pub(crate) unit: Option<Tensorcore>,
    /// Rows and columns of outputs of one invocation. No bit depends on it.
    pub(crate) tile: usize,
    /// Whether the chain runs along what is last in memory, in each operand.
    pub(crate) chain_last: [bool; 2],
    /// Whether what is last in memory begins at multiples of [`elements`].
    pub(crate) aligned: [bool; 2],
}

/// Elements that a shader reads at once.
pub(crate) fn elements(dtype: DType) -> usize {
    UNIT / dtype.size()
}

/// Whether rows of this many elements begin at multiples of [`elements`].
pub(crate) fn aligned(tensor: &Tensor, row: usize) -> bool {
    let elements = elements(tensor.dtype());
    tensor.offset().is_multiple_of(elements) && row.is_multiple_of(elements)
}

impl Chains {
    /// The values of TILE, PAIRS, STEP, FRACTION_BITS, RESULT_BITS, MODEL, UNIT, A_CHAIN_LAST, B_CHAIN_LAST, A_UNITS and
    /// B_UNITS: the constants that a product's shader names first.
    pub(crate) fn constants(&self) -> Vec<u32> {
        // A chain of f32 fma needs no lookahead, and reads element by element.
        let f32_chain = Tensorcore { step: 1, fraction_bits: 0, result_bits: 0 };
        let Tensorcore { step, fraction_bits, result_bits } = self.unit.unwrap_or(f32_chain);
        let units = self.aligned.map(|aligned| u32::from(aligned && self.unit.is_some()));
        vec![
            word(self.tile),
            word(self.tile.div_ceil(2)),
            word(step),
            fraction_bits.cast_unsigned(),
            result_bits.cast_unsigned(),
            u32::from(self.unit.is_some()),
            word(elements(self.dtype)),
            u32::from(self.chain_last[0]),
            u32::from(self.chain_last[1]),
            units[0],
            units[1],
        ]
    }
}
