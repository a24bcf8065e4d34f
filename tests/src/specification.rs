//! The specification as a backend: the memory of another one, and every op computed one element after the other as its file
//! in `core/src/ops` says.

use dropless_core::backend::{Caps, Event, Queue, Timings};
use dropless_core::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Route};
use dropless_core::{Backend, DType, Memory, Result, Tensor};

/// See the module.
#[derive(Debug)]
pub struct Specification<B> {
    memory: B,
    caps: Caps,
}

impl<B: Backend> Specification<B> {
    /// In the memory of a backend, under its model of matrix products.
    pub fn new(memory: B) -> Specification<B> {
        let caps = Caps { backend: "specification", ..memory.caps().clone() };
        Specification { memory, caps }
    }
}

impl<B: Backend> Backend for Specification<B> {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        self.memory.alloc(dtype, shape, memory)
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.memory.write(dst, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.memory.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.memory.wait()
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.memory.timings()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.memory.record(queue)
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        self.memory.wait_for(queue, event)
    }

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        op.spec(&self.memory)
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        op.spec(&self.memory)
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        op.spec(&self.memory)
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        op.spec(&self.memory)
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        op.spec(&self.memory)
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        op.spec(&self.memory)
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        op.spec(&self.memory)
    }
}
