//! Linear layers `y = x w^T` over all tokens of a rank, without bias. NUMERICS.md, "Linear layers".
//!
//! [`Linear`] computes under a recipe; the functions are the plain products, of what no recipe quantizes.

use dropless_core::ops::{BlockFormat, GemmKind, GroupedGemm, Operand};
use dropless_core::{Backend, DType, Error, Memory, Result, Tensor};

use super::Tokens;
use super::quantized::{BOTH, FP8_BLOCK, MXFP8, Rows, Uses, WeightOperands};

/// A weight and where its gradient goes.
#[derive(Clone, Debug)]
pub struct Weight {
    /// `[1, n, k]` in the type of the activations it meets (experts: `[local experts, n, k]`).
    pub value: Tensor,
    /// f32 `[shards, n, k]`, added to (experts: `[expert shards, local experts, n, k]`); None where nothing is trained.
    pub grad: Option<Tensor>,
}

impl Weight {
    /// A weight without a gradient: for a forward pass alone.
    pub fn frozen(value: Tensor) -> Weight {
        Weight { value, grad: None }
    }

    /// Where the gradient goes.
    ///
    /// # Errors
    /// [`Error::Argument`] when nothing is trained.
    pub fn grad(&self) -> Result<&Tensor> {
        self.grad.as_ref().ok_or_else(|| Error::Argument {
            op: "backward",
            field: "grad",
            expected: "a weight with a gradient".into(),
            found: format!("{:?} without one", self.value),
        })
    }
}

/// Arithmetic of the products of the linear layers outside of the experts: the projections of attention, dense MLPs and
/// shared experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinearRecipe {
    /// Unquantized operands: bf16, or f32 where the activations are.
    #[default]
    Bf16,
    /// Blocks of 32 e4m3 elements with power-of-two scales.
    Mxfp8,
    /// e4m3 in 1x128 blocks (activations, gradients) and 128x128 blocks (weights), power-of-two scales.
    Fp8Block,
}

impl LinearRecipe {
    /// Every recipe.
    pub const ALL: [LinearRecipe; 3] = [LinearRecipe::Bf16, LinearRecipe::Mxfp8, LinearRecipe::Fp8Block];

    fn format(self) -> Option<BlockFormat> {
        match self {
            LinearRecipe::Bf16 => None,
            LinearRecipe::Mxfp8 => Some(MXFP8),
            LinearRecipe::Fp8Block => Some(FP8_BLOCK),
        }
    }

    /// Rows of all tokens as operands of the layers' products. Layers that read the same rows share them.
    pub(crate) fn rows<'a>(
        self,
        backend: &dyn Backend,
        tokens: &Tokens,
        values: &'a Tensor,
        uses: Uses,
    ) -> Result<Rows<'a>> {
        Rows::new(backend, self.format(), values, None, tokens.by_shard(), uses)
    }
}

/// A linear layer under a recipe.
#[derive(Clone, Debug)]
pub struct Linear {
    /// The weight, `[1, n, k]`.
    pub weight: Weight,
    /// Arithmetic of the products.
    pub recipe: LinearRecipe,
    operands: WeightOperands,
}

impl Linear {
    /// A layer whose weight may be still undefined: [`Linear::prepare`] follows every change of it.
    pub fn new(weight: Weight, recipe: LinearRecipe) -> Linear {
        let operands = WeightOperands::plain(&weight.value);
        Linear { weight, recipe, operands }
    }

    /// Brings the weight into the form of the recipe's products.
    ///
    /// # Errors
    /// Those of the quantization.
    pub fn prepare(&mut self, backend: &dyn Backend) -> Result<()> {
        self.operands = WeightOperands::prepare(backend, self.recipe.format(), &self.weight.value)?;
        Ok(())
    }

    /// Columns of the input.
    pub(crate) fn k(&self) -> usize {
        self.operands.k()
    }

    /// `x w^T` in the type of x, of rows that are quantized along their columns.
    pub(crate) fn forward(&self, backend: &dyn Backend, tokens: &Tokens, x: &Rows<'_>) -> Result<Tensor> {
        let (w, out) = (self.operands.forward(), x.dtype());
        product(backend, tokens, GemmKind::Forward, x.row(), w, self.operands.n(), out)
    }

    /// The gradient of x for the gradient `dy` of the result. Adds `dy^T x` of each shard to the weight's gradient, of
    /// an x that is quantized along its rows: no block spans two shards.
    pub(crate) fn backward(&self, backend: &dyn Backend, tokens: &Tokens, dy: &Tensor, x: &Rows<'_>) -> Result<Tensor> {
        let dy = self.recipe.rows(backend, tokens, dy, BOTH)?;
        weight_gradient(backend, dy.column(tokens.by_shard()), x.column(tokens.by_shard()).0, &self.weight)?;
        let (w, out) = (self.operands.dgrad(), dy.dtype());
        product(backend, tokens, GemmKind::Dgrad, dy.row(), w, self.operands.k(), out)
    }
}

/// A product of all tokens, `[tokens, cols]`.
fn product(
    backend: &dyn Backend,
    tokens: &Tokens,
    kind: GemmKind,
    a: Operand<'_>,
    b: Operand<'_>,
    cols: usize,
    out: DType,
) -> Result<Tensor> {
    let out = backend.alloc(out, &[tokens.count(), cols], Memory::Device)?;
    GroupedGemm { kind, a, b, offsets: tokens.whole(), out: &out, accumulate: false }.run(backend)?;
    Ok(out)
}

/// Adds the gradient of each shard, whose rows lie between the offsets.
fn weight_gradient(
    backend: &dyn Backend,
    (dy, offsets): (Operand<'_>, &Tensor),
    x: Operand<'_>,
    w: &Weight,
) -> Result<()> {
    GroupedGemm { kind: GemmKind::Wgrad, a: dy, b: x, offsets, out: w.grad()?, accumulate: true }.run(backend)
}

/// `x w^T` in the type `out`.
///
/// # Shape
/// x: `[tokens, k]`; result: `[tokens, n]`.
///
/// # Errors
/// Those of [`GroupedGemm`] and of an allocation; so below.
pub fn forward(backend: &dyn Backend, tokens: &Tokens, x: &Tensor, w: &Weight, out: DType) -> Result<Tensor> {
    let (a, b) = (Operand::plain(x), Operand::plain(&w.value));
    product(backend, tokens, GemmKind::Forward, a, b, w.value.shape()[1], out)
}

/// `dy w`: the gradient of x, in the type `out`.
///
/// # Errors
/// As [`forward`].
pub fn dgrad(backend: &dyn Backend, tokens: &Tokens, dy: &Tensor, w: &Weight, out: DType) -> Result<Tensor> {
    let (a, b) = (Operand::plain(dy), Operand::plain(&w.value));
    product(backend, tokens, GemmKind::Dgrad, a, b, w.value.shape()[2], out)
}

/// Adds `dy^T x` of each shard to the weight's gradient.
///
/// # Errors
/// As [`forward`], and [`Weight::grad`]'s.
pub fn wgrad(backend: &dyn Backend, tokens: &Tokens, dy: &Tensor, x: &Tensor, w: &Weight) -> Result<()> {
    weight_gradient(backend, (Operand::plain(dy), tokens.by_shard()), Operand::plain(x), w)
}
