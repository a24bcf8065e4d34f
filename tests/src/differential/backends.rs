//! The backends that are compared with the host. Another one is a line of [`UNDER_TEST`].

use dropless_core::host::{Host, HostOptions};
use dropless_core::{Backend, NumericModel, Result};
#[cfg(target_os = "linux")]
use dropless_cuda::{Cuda, CudaOptions};
use dropless_wgpu::{Wgpu, WgpuOptions};

use crate::require::Need;
use crate::specification::Specification;

/// The ranks of a backend.
pub type Ranks = Vec<Box<dyn Backend>>;

/// A backend that can be opened.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    /// Its name.
    pub name: &'static str,
    /// What a machine may lack for it.
    pub need: Option<Need>,
    /// Whether several ranks can share a process.
    pub ranks: bool,
    /// Opens that many ranks.
    pub open: fn(usize, NumericModel) -> Result<Ranks>,
}

/// Every backend but the host, and what all of them follow: each op's specification, one element after the other.
pub const UNDER_TEST: &[Candidate] = &[
    Candidate { name: "specification", need: None, open: specification, ranks: true },
    Candidate { name: "wgpu", need: Some(Need::Wgpu), open: wgpu, ranks: true },
    #[cfg(target_os = "linux")]
    Candidate { name: "cuda", need: Some(Need::Cuda), open: cuda, ranks: false },
];

impl Candidate {
    /// The device in words.
    ///
    /// # Errors
    /// Why there is none; but where `DROPLESS_REQUIRE` names the backend, that is a panic.
    pub fn device(&self) -> std::result::Result<String, String> {
        let opened = (self.open)(1, NumericModel::Hopper);
        let ranks = match self.need {
            Some(need) => need.available(opened)?,
            None => opened.map_err(|error| error.to_string())?,
        };
        Ok(ranks[0].caps().device.clone())
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
#[cfg(target_os = "linux")]
fn cuda(_ranks: usize, numerics: NumericModel) -> Result<Ranks> {
    Ok(boxed(vec![Cuda::new(&CudaOptions { numerics, ..CudaOptions::default() })?]))
}

fn boxed<B: Backend + 'static>(ranks: Vec<B>) -> Ranks {
    ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Backend>).collect()
}
