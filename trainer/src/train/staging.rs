//! A copy of this rank's part of a checkpoint in the memory of the host, which is made while the device goes on and read
//! by the thread that writes the part.
//!
//! The memory is taken once, before the first step: on cuda it is pinned, so that the device copies at the full speed of
//! its connection, beside its other work.

use dropless_core::backend::{Event, Queue};
use dropless_core::ops::Offload;
use dropless_core::{Backend, Caps, DType, Memory, Tensor};
use dropless_model::Model;
use dropless_model::hf::tensors::Head;

use super::state;
use crate::checkpoint::Stem;
use crate::error::Result;

/// Values that are read at once.
const BLOCK: usize = 1 << 22;

/// See the module.
#[derive(Debug)]
pub(super) struct Staging<'a> {
    backend: &'a dyn Backend,
    /// f32, all tensors one after the other; None if this rank has none.
    memory: Option<Tensor>,
    /// In the order of [`Stem::ALL`].
    tensors: [Vec<Staged>; 2],
}

#[derive(Debug)]
struct Staged {
    head: Head,
    from: usize,
}

impl<'a> Staging<'a> {
    /// What a thread that writes holds beside it.
    pub(super) const BLOCK_BYTES: u64 = (BLOCK * size_of::<f32>()) as u64;

    /// Takes the memory for this rank's part of the model.
    ///
    /// # Errors
    /// [`dropless_core::Error::Capacity`] when it is not there.
    pub(super) fn new(backend: &'a dyn Backend, model: &Model) -> Result<Staging<'a>> {
        let mut len = 0;
        let tensors = state::part(backend.caps(), model)?.map(|tensors| {
            let place = |(head, values): (Head, Tensor)| {
                let staged = Staged { head, from: len };
                len += values.len();
                staged
            };
            tensors.into_iter().map(place).collect()
        });
        let memory = if len == 0 { None } else { Some(backend.alloc(DType::F32, &[len], Memory::Host)?) };
        Ok(Staging { backend, memory, tensors })
    }

    /// How many values the largest part of any rank has.
    ///
    /// # Errors
    /// As [`state::part`].
    pub(super) fn largest(caps: &Caps, model: &Model) -> Result<usize> {
        let of_rank = |rank| -> Result<usize> {
            let part = state::part(&Caps { rank, ..caps.clone() }, model)?;
            Ok(part.iter().flatten().map(|(_, values)| values.len()).sum())
        };
        (0..caps.ranks).try_fold(0, |most, rank| Ok(of_rank(rank)?.max(most)))
    }

    /// Queues the copies. Until the event, nothing may change the model: [`Queue::Compute`] has to wait for it.
    ///
    /// # Errors
    /// Those of the backend.
    pub(super) fn copy(&self, model: &Model) -> Result<Event> {
        let computed = self.backend.record(Queue::Compute)?;
        self.backend.wait_for(Queue::Offload, &computed)?;
        if let Some(memory) = &self.memory {
            let values = state::part(self.backend.caps(), model)?.into_iter().flatten();
            for (staged, (_, values)) in self.tensors.iter().flatten().zip(values) {
                let to = memory.slice(staged.from, staged.from + values.len())?;
                Offload { from: &values, to: &to }.run(self.backend)?;
            }
        }
        Ok(self.backend.record(Queue::Offload)?)
    }

    /// Waits until the copies are done.
    ///
    /// # Errors
    /// Those of the backend.
    pub(super) fn landed(&self) -> Result<()> {
        match &self.memory {
            Some(memory) => Ok(self.backend.read(&memory.slice(0, 1)?, &mut [0; size_of::<f32>()])?),
            None => Ok(()),
        }
    }

    /// The tensors of a file.
    pub(super) fn heads(&self, stem: Stem) -> Vec<Head> {
        self.of(stem).iter().map(|staged| staged.head.clone()).collect()
    }

    /// Gives the values of one of them to `out`, block by block, with its name.
    ///
    /// # Errors
    /// Those of the backend and of `out`.
    pub(super) fn values(&self, stem: Stem, at: usize, mut out: impl FnMut(&str, &[f32]) -> Result<()>) -> Result<()> {
        let (Some(memory), Some(staged)) = (&self.memory, self.of(stem).get(at)) else { return Ok(()) };
        let to = staged.from + staged.head.shape.iter().product::<usize>();
        let mut values = vec![0f32; BLOCK.min(to - staged.from)];
        for from in (staged.from..to).step_by(BLOCK) {
            let values = &mut values[..BLOCK.min(to - from)];
            self.backend.read(&memory.slice(from, from + values.len())?, bytemuck::cast_slice_mut(values))?;
            out(&staged.head.name, values)?;
        }
        Ok(())
    }

    fn of(&self, stem: Stem) -> &[Staged] {
        let [weights, optimizer] = &self.tensors;
        match stem {
            Stem::Weights => weights,
            Stem::Optimizer => optimizer,
        }
    }
}
