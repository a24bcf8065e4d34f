//! Any GPU that Vulkan, Metal or Direct3D 12 reaches, with the bits of the host.
//!
//! The shaders (in `shaders/` of the repository) compute in 32-bit integers only, because nothing in WGSL promises the
//! bits of a float operation. So a laptop, a CI machine without any GPU and a data-center card give the same results,
//! slowly. Read `shaders/prelude.wgsl`, one op in `ops/`, and its shader.

mod adapter;
mod backend;
mod buffer;
mod collective;
mod device;
mod dispatch;
mod expand;
mod host_memory;
mod ops;
mod pipeline;
pub mod recording;
mod shader;

#[cfg(test)]
mod soft_float;

pub use adapter::{AdapterReport, adapters};
pub use backend::{Wgpu, WgpuOptions};

/// The name of this backend in messages and in [`dropless_core::Caps`].
const BACKEND: &str = "wgpu";

/// A backend for a test, or None when there is no adapter and `DROPLESS_REQUIRE` does not name wgpu.
#[cfg(test)]
fn test_backend(options: &WgpuOptions) -> Option<Wgpu> {
    dropless_tests::require::Need::Wgpu.or_skip(Wgpu::new(options))
}
