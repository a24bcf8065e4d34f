//! The backends of this program, and how to open them.

use std::time::Duration;

use dropless_core::host::{Host, HostOptions};
use dropless_core::lockstep::Lockstep;
use dropless_core::{Backend, Error as CoreError, NumericModel};
use dropless_cuda::{Cuda, CudaOptions, World};
use dropless_wgpu::{Wgpu, WgpuOptions};

use crate::error::Result;
use crate::options::{BackendKind, TrainOptions};

/// How long a rank waits for the others: the first one writes the last of a large checkpoint alone. A rank that failed is
/// not waited for.
const PATIENCE: Duration = Duration::from_secs(1800);

impl TrainOptions {
    fn host(&self, numerics: NumericModel) -> HostOptions {
        HostOptions {
            numerics,
            threads: self.threads,
            simd: self.simd,
            expert_ranks: self.expert_parallel,
            timeout: PATIENCE,
            ..HostOptions::default()
        }
    }

    fn wgpu(&self, numerics: NumericModel) -> WgpuOptions {
        WgpuOptions {
            numerics,
            adapter: self.adapter.clone(),
            expert_ranks: self.expert_parallel,
            timeout: PATIENCE,
            ..WgpuOptions::default()
        }
    }

    fn cuda(&self, numerics: NumericModel) -> dropless_core::Result<Vec<Cuda>> {
        let started = self.world.as_ref().map_or(1, |world| world.ranks);
        if self.ranks != started {
            let why = format!(
                "{} ranks asked for, but {started} started: a GPU is one rank, in a process of its own \
                 (dropless launch --nproc {} -- ...)",
                self.ranks, self.ranks
            );
            return Err(CoreError::Unavailable { backend: "cuda", why });
        }
        let options = CudaOptions {
            numerics,
            device: self.world.as_ref().map_or(Ok(0), World::device)?,
            world: self.world.clone(),
            expert_ranks: self.expert_parallel,
            transport: self.transport,
            timeout: self.timeout,
            ..CudaOptions::default()
        };
        Ok(vec![Cuda::new(&options)?])
    }

    /// Opens the ranks that this process drives: of host and wgpu all of them, of cuda one.
    ///
    /// # Errors
    /// [`dropless_core::Error::Unavailable`] when the backend cannot be had here.
    pub fn open_ranks(&self, numerics: NumericModel) -> Result<Vec<Box<dyn Backend>>> {
        fn beside<B: Backend + 'static>(host: Vec<Host>, ranks: Vec<B>) -> Result<Vec<Box<dyn Backend>>> {
            let pairs = host.into_iter().zip(ranks).map(|(host, rank)| Lockstep::new(host, rank));
            Ok(boxed(pairs.collect::<dropless_core::Result<Vec<_>>>()?))
        }
        fn boxed<B: Backend + 'static>(ranks: Vec<B>) -> Vec<Box<dyn Backend>> {
            ranks.into_iter().map(|rank| Box::new(rank) as Box<dyn Backend>).collect()
        }
        let host = || Host::ranks(self.ranks, self.host(numerics));
        let wgpu = || Wgpu::ranks(self.ranks, &self.wgpu(numerics));
        let cuda = || self.cuda(numerics);
        Ok(match self.backend {
            BackendKind::Host => boxed(host()?),
            BackendKind::Wgpu => boxed(wgpu()?),
            BackendKind::Cuda => boxed(cuda()?),
            BackendKind::WgpuBesideHost => beside(host()?, wgpu()?)?,
            BackendKind::CudaBesideHost => beside(host()?, cuda()?)?,
        })
    }

    /// Opens one rank, whatever the number of ranks says.
    ///
    /// # Errors
    /// As [`open_ranks`](TrainOptions::open_ranks).
    pub fn open_one(&self, numerics: NumericModel) -> Result<Box<dyn Backend>> {
        let one = TrainOptions { ranks: 1, world: None, expert_parallel: None, ..self.clone() };
        Ok(one.open_ranks(numerics)?.swap_remove(0))
    }
}
