//! The one trait that a device implements.

use std::iter::StepBy;
use std::ops::Range;
use std::time::Duration;

use crate::error::{Result, ensure};
use crate::numerics::NumericModel;
use crate::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Route};
use crate::tensor::{DType, Memory, Tensor};
use crate::timeouts::Timeouts;
use crate::trace::{LaunchClock, Log};

/// What a backend is and can do. Ops are checked against it once, before they are queued.
#[derive(Clone, Debug)]
pub struct Caps {
    /// `host`, `wgpu` or `cuda`.
    pub backend: &'static str,
    /// The name of the device.
    pub device: String,
    /// The arithmetic of its matrix products.
    pub numerics: NumericModel,
    /// This rank.
    pub rank: usize,
    /// Number of ranks.
    pub ranks: usize,
    /// Number of ranks that share one set of experts; divides `ranks`. See [`Group`].
    pub expert_ranks: usize,
    /// The largest buffer it can address, in bytes.
    pub max_buffer_bytes: u64,
    /// Peak FLOP/s of its matrix units in dense bf16 products; None if that says nothing about its speed.
    pub peak_flops: Option<f64>,
    /// Suspends collective timeouts while this rank is busy with work of its own, such as writing a file.
    pub timeouts: Timeouts,
}

/// Where the time of a device went, measured by events on its queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timings {
    /// In [`Backend::grouped_gemm`] and [`Backend::group_quantize`].
    pub gemm: Duration,
    /// In [`Backend::attention`].
    pub attention: Duration,
    /// In [`Backend::all_to_all`] among [`Group::Experts`]: dispatch and combine.
    pub dispatch: Duration,
    /// In [`Backend::all_to_all`] of any group while the compute queue was idle: communication that nothing overlapped.
    pub exposed: Duration,
}

/// Which ranks take part in [`Backend::all_to_all`]: those of one group, which includes this rank.
///
/// The ranks form a matrix of `ranks / expert_ranks` rows and `expert_ranks` columns in row-major order. The ranks of a
/// row share one set of experts (expert parallelism), those of a column hold the same experts (data parallelism).
///
/// ```text
/// ranks = 6, expert_ranks = 2      experts 0..e/2   experts e/2..e
///                    Experts ───▶        0                1
///                                        2                3
///                                        4                5
///                                        ▲ Replicas       ▲
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Group {
    /// All ranks.
    World,
    /// The ranks that share one set of experts with this one: its row.
    Experts,
    /// The ranks that hold the same experts as this one: its column.
    Replicas,
}

impl Group {
    /// Every group, in declaration order.
    pub const ALL: [Group; 3] = [Group::World, Group::Experts, Group::Replicas];
}

impl Caps {
    /// The ranks of this rank's group, in order.
    pub fn members(&self, group: Group) -> StepBy<Range<usize>> {
        let row = self.rank - self.rank % self.expert_ranks;
        match group {
            Group::World => (0..self.ranks).step_by(1),
            Group::Experts => (row..row + self.expert_ranks).step_by(1),
            Group::Replicas => (self.rank - row..self.ranks).step_by(self.expert_ranks),
        }
    }

    /// Number of ranks in a group.
    pub fn size(&self, group: Group) -> usize {
        self.members(group).len()
    }

    /// This rank's place among the [`members`](Caps::members) of a group.
    pub fn place(&self, group: Group) -> usize {
        match group {
            Group::World => self.rank,
            Group::Experts => self.rank % self.expert_ranks,
            Group::Replicas => self.rank / self.expert_ranks,
        }
    }
}

/// The size of an expert-parallel group among `ranks` ranks: the one asked for, or all of them.
///
/// # Errors
/// [`crate::Error::Argument`] when it does not divide the ranks.
pub fn expert_ranks(ranks: usize, asked: Option<usize>) -> Result<usize> {
    let size = asked.unwrap_or(ranks);
    let divides = size > 0 && ranks.is_multiple_of(size);
    ensure(divides, "ranks", "expert_ranks", || format!("a divisor of the {ranks} ranks"), || size.to_string())?;
    Ok(size)
}

/// The queues of a device. Work on one queue runs in order; events order work across queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// Every op except the two below.
    Compute,
    /// [`Backend::all_to_all`].
    Comm,
    /// [`Backend::offload`].
    Offload,
}

/// A point in a queue.
#[derive(Clone, Debug)]
pub struct Event(pub std::sync::Arc<dyn EventState>);

/// A backend's own state of an [`Event`].
pub trait EventState: std::any::Any + Send + Sync + std::fmt::Debug {}

/// A device with its memory, its ops and its place among the ranks.
///
/// Ops are queued in the order of the calls; only [`read`](Backend::read) and [`wait`](Backend::wait) block. An op
/// never reads a group size, an offset or a count on the host. Ops take [`Checked`] arguments, so an implementation
/// need not look at shapes again.
pub trait Backend: std::fmt::Debug + Send + Sync {
    /// What this backend is and can do.
    fn caps(&self) -> &Caps;

    /// A new buffer with undefined contents.
    ///
    /// # Errors
    /// [`crate::Error::Capacity`] when there is not enough memory.
    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor>;

    /// Copies `bytes` (little endian, row-major, as long as the tensor) into `dst`, ordered with the compute queue.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the lengths differ.
    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()>;

    /// Waits for the compute queue and copies `src` out.
    ///
    /// # Errors
    /// [`crate::Error::Argument`] when the lengths differ; any failure of the work waited for.
    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()>;

    /// Waits for every queue.
    ///
    /// # Errors
    /// Any failure of the work waited for.
    fn wait(&self) -> Result<()>;

    /// Where the time went of the work that [`wait`](Backend::wait) has waited for since the last call of this; None
    /// where it is not measured. The first call starts the measurement. Does not block.
    ///
    /// # Errors
    /// A failure of the device.
    fn timings(&self) -> Result<Option<Timings>>;

    /// What times each launch, on a device that can; None where the calls themselves have to be timed.
    fn launch_clock(&self) -> Option<&dyn LaunchClock> {
        None
    }

    /// Where calls are written down; None, but while [`crate::trace::Traced`] does so.
    fn log(&self) -> Option<&Log> {
        None
    }

    /// Marks the current end of a queue.
    ///
    /// # Errors
    /// A failure of the device.
    fn record(&self, queue: Queue) -> Result<Event>;

    /// Later work on `queue` starts only after `event`.
    ///
    /// # Errors
    /// A failure of the device.
    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()>;

    /// See [`GroupedGemm`].
    ///
    /// # Errors
    /// A failure of the device, or a tensor of another backend; likewise for every op below.
    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()>;

    /// See [`GroupQuantize`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()>;

    /// See [`AllToAll`].
    ///
    /// # Errors
    /// [`crate::Error::Collective`] when ranks disagree, fail, exit, stop responding or never join.
    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()>;

    /// See [`Offload`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()>;

    /// See [`Route`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn route(&self, op: &Checked<Route<'_>>) -> Result<()>;

    /// See [`Attention`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()>;

    /// See [`Map`].
    ///
    /// # Errors
    /// As [`grouped_gemm`](Backend::grouped_gemm).
    fn map(&self, op: &Checked<Map<'_>>) -> Result<()>;
}

impl dyn Backend + '_ {
    /// A new device tensor holding `values`, whose size must be that of `dtype` (bf16 codes as u16, e4m3 as u8).
    ///
    /// # Errors
    /// As [`Backend::alloc`] and [`Backend::write`].
    pub fn upload<T: bytemuck::NoUninit>(&self, dtype: DType, shape: &[usize], values: &[T]) -> Result<Tensor> {
        let tensor = self.alloc(dtype, shape, Memory::Device)?;
        self.write(&tensor, bytemuck::cast_slice(values))?;
        Ok(tensor)
    }

    /// The elements of a tensor.
    ///
    /// # Errors
    /// As [`Backend::read`].
    pub fn download<T: bytemuck::AnyBitPattern + bytemuck::NoUninit>(&self, tensor: &Tensor) -> Result<Vec<T>> {
        let mut values = vec![T::zeroed(); tensor.bytes() / size_of::<T>()];
        self.read(tensor, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caps(rank: usize, ranks: usize, expert_ranks: usize) -> Caps {
        let (device, numerics) = (String::new(), NumericModel::F32);
        Caps {
            backend: "none",
            device,
            numerics,
            rank,
            ranks,
            expert_ranks,
            max_buffer_bytes: 0,
            peak_flops: None,
            timeouts: Timeouts::default(),
        }
    }

    #[test]
    fn groups_are_the_rows_and_columns_of_the_ranks() {
        let members = |rank, group| caps(rank, 6, 2).members(group).collect::<Vec<_>>();
        assert_eq!(members(3, Group::World), [0, 1, 2, 3, 4, 5]);
        assert_eq!(members(3, Group::Experts), [2, 3]);
        assert_eq!(members(3, Group::Replicas), [1, 3, 5]);
        assert_eq!(members(4, Group::Experts), [4, 5]);
        assert_eq!(members(4, Group::Replicas), [0, 2, 4]);
    }

    #[test]
    fn a_rank_is_at_its_place_in_each_of_its_groups() {
        for (ranks, expert_ranks) in [(1, 1), (4, 4), (4, 1), (6, 2), (8, 4)] {
            for (rank, group) in (0..ranks).flat_map(|rank| Group::ALL.map(|group| (rank, group))) {
                let caps = caps(rank, ranks, expert_ranks);
                assert_eq!(caps.members(group).nth(caps.place(group)), Some(rank), "{caps:?} {group:?}");
                assert_eq!(caps.members(group).count(), caps.size(group));
            }
        }
    }

    #[test]
    fn an_expert_group_divides_the_ranks() {
        assert_eq!((expert_ranks(6, None).unwrap(), expert_ranks(6, Some(2)).unwrap()), (6, 2));
        for size in [0, 4, 12] {
            let error = expert_ranks(6, Some(size)).unwrap_err().to_string();
            assert_eq!(error, format!("ranks: expert_ranks is {size}, expected a divisor of the 6 ranks"));
        }
    }
}
