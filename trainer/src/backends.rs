//! The backends of this program, and how to open them.

use dropless_core::host::{Host, HostOptions};
use dropless_core::lockstep::Lockstep;
use dropless_core::{Backend, NumericModel};
use dropless_wgpu::{Wgpu, WgpuOptions};

use crate::error::Result;
use crate::options::{BackendKind, TrainOptions};

impl TrainOptions {
    fn host(&self, numerics: NumericModel) -> HostOptions {
        HostOptions { numerics, threads: self.threads, simd: self.simd, ..HostOptions::default() }
    }

    fn wgpu(&self, numerics: NumericModel) -> WgpuOptions {
        WgpuOptions { numerics, adapter: self.adapter.clone(), ..WgpuOptions::default() }
    }

    /// Opens every rank of a run.
    ///
    /// # Errors
    /// [`dropless_core::Error::Unavailable`] when the backend cannot be had here.
    pub fn open_ranks(&self, numerics: NumericModel) -> Result<Vec<Box<dyn Backend>>> {
        fn boxed<B: Backend + 'static>(ranks: Vec<B>) -> Vec<Box<dyn Backend>> {
            ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Backend>).collect()
        }
        let host = || Host::ranks(self.ranks, self.host(numerics));
        let wgpu = || Wgpu::ranks(self.ranks, &self.wgpu(numerics));
        Ok(match self.backend {
            BackendKind::Host => boxed(host()?),
            BackendKind::Wgpu => boxed(wgpu()?),
            BackendKind::WgpuBesideHost => {
                let pairs = host()?.into_iter().zip(wgpu()?);
                boxed(pairs.map(|(host, wgpu)| Lockstep::new(host, wgpu)).collect::<dropless_core::Result<Vec<_>>>()?)
            }
        })
    }

    /// Opens one rank, whatever the number of ranks says.
    ///
    /// # Errors
    /// As [`open_ranks`](TrainOptions::open_ranks).
    pub fn open_one(&self, numerics: NumericModel) -> Result<Box<dyn Backend>> {
        let one = TrainOptions { ranks: 1, ..self.clone() };
        Ok(one.open_ranks(numerics)?.swap_remove(0))
    }
}
