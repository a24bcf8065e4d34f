//! NVIDIA GPUs with the bits of the host: tensor cores whose arithmetic was measured, and NCCL between them.
//!
//! Kernels (in `kernels/` of the repository) are CUDA C++, compiled for the card at run time and cached on disk.
//! Nothing here is linked against CUDA: where its libraries are missing, opening the backend says so in one line. Read
//! one op in `ops/`, its kernel, and `kernels/prelude.cuh`; below them `kernel` (from a declaration to a launch),
//! `memory` (tensors from the pool and of callers), `device` (streams and what they share) and `driver` (the only calls
//! into the driver).

mod backend;
mod comm;
mod device;
mod driver;
mod graph;
mod jit;
mod kernel;
mod loans;
mod memory;
mod ops;
mod pool;
mod progress;
#[cfg(test)]
mod special_test;
mod symbols;
mod timeline;
mod timer;

pub use backend::{Cuda, CudaOptions};
pub use comm::{Transport, avoid_multicast};
pub use device::{DeviceReport, device_of, devices, usable};
pub use graph::Graph;
pub use jit::kept_kernels;
pub use pool::block_bytes;

/// The name of this backend in messages and in [`dropless_core::Caps`].
const BACKEND: &str = "cuda";
