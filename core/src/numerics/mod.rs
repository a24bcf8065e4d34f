//! Number formats, f32 functions, and the models of matrix arithmetic. `NUMERICS.md` is the contract.

pub mod bf16;
pub mod blocks;
pub mod dequantize;
pub mod e2m1;
pub mod e4m3;
pub mod e5m2;
pub mod math;
pub mod mma;
pub mod philox;
pub mod reduce;
pub mod special;
pub mod ue8m0;

/// The arithmetic of a device's matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NumericModel {
    /// Sequential f32 fma in the order of the chain, for every operand type.
    F32,
    /// NVIDIA Hopper `wgmma`, measured on an H200.
    Hopper,
    /// NVIDIA Blackwell, as published by others; no such card was measured.
    Blackwell,
}
