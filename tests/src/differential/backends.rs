//! The backends that are compared with the host. Another one is a line of [`UNDER_TEST`].

use dropless_core::host::{Host, HostOptions};
use dropless_core::{Backend, Error, NumericModel, Result};
use dropless_cuda::{Cuda, CudaOptions};
use dropless_wgpu::{Wgpu, WgpuOptions};

use crate::specification::Specification;

/// The ranks of a backend.
pub type Ranks = Vec<Box<dyn Backend>>;

/// A backend that can be opened.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Its name, by which `DROPLESS_REQUIRE` asks for it.
    pub name: &'static str,
    /// Whether several ranks can share a process.
    pub ranks: bool,
    /// Opens that many ranks.
    pub open: fn(usize, NumericModel) -> Result<Ranks>,
}

/// Every backend but the host, and what all of them follow: each op's specification, one element after the other.
pub const UNDER_TEST: &[Candidate] = &[
    Candidate { name: "specification", open: specification, ranks: true },
    Candidate { name: "wgpu", open: wgpu, ranks: true },
    Candidate { name: "cuda", open: cuda, ranks: false },
];

impl Candidate {
    /// The device in words.
    ///
    /// # Errors
    /// Why there is none; but where `DROPLESS_REQUIRE` names the backend, that is a panic.
    pub fn device(&self) -> std::result::Result<String, String> {
        let required = std::env::var("DROPLESS_REQUIRE").is_ok_and(|names| names.split(',').any(|n| n == self.name));
        match (self.open)(1, NumericModel::Hopper) {
            Err(Error::Unavailable { why, .. }) if !required => Err(why),
            opened => Ok(opened.unwrap_or_else(|error| panic!("{error}"))[0].caps().device.clone()),
        }
    }
}

/// The host, whose bits every other backend must have.
///
/// # Errors
/// As [`Host::ranks`].
pub fn host(ranks: usize, numerics: NumericModel) -> Result<Ranks> {
    Ok(boxed(Host::ranks(ranks, HostOptions { numerics, threads: 1, ..HostOptions::default() })?))
}

fn specification(ranks: usize, numerics: NumericModel) -> Result<Ranks> {
    let hosts = Host::ranks(ranks, HostOptions { numerics, threads: 1, ..HostOptions::default() })?;
    Ok(boxed(hosts.into_iter().map(Specification::new).collect()))
}

fn wgpu(ranks: usize, numerics: NumericModel) -> Result<Ranks> {
    Ok(boxed(Wgpu::ranks(ranks, &WgpuOptions { numerics, ..WgpuOptions::default() })?))
}

/// A GPU is a rank with a process of its own, so there is one.
fn cuda(_ranks: usize, numerics: NumericModel) -> Result<Ranks> {
    Ok(boxed(vec![Cuda::new(&CudaOptions { numerics, ..CudaOptions::default() })?]))
}

fn boxed<B: Backend + 'static>(ranks: Vec<B>) -> Ranks {
    ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Backend>).collect()
}
