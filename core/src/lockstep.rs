//! Two backends in lockstep: every op runs on both, and the first whose bits differ is reported.
//!
//! A [`Lockstep`] is a backend itself, so a whole training step can run on it. Each of its tensors has a buffer on both
//! sides. After an op, everything that it wrote is compared; any NaN equals any NaN. This finds the op where a backend
//! leaves the specification in one pass, whatever happens to the numbers afterwards.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::backend::{Backend, Caps, Event, EventState, Queue, Timings};
use crate::error::{Error, Result, ensure};
use crate::numerics::bf16;
use crate::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Op, Route, Use};
use crate::tensor::{DType, Memory, Tensor};

/// A backend under examination beside the one that defines the bits.
#[derive(Debug)]
pub struct Lockstep<R, B> {
    reference: R,
    examined: B,
    ops: AtomicU64,
}

/// Events of both sides.
#[derive(Debug)]
struct Both(Event, Event);

impl EventState for Both {}

impl<R: Backend, B: Backend> Lockstep<R, B> {
    /// Runs both side by side; what they return is the reference's.
    ///
    /// # Errors
    /// [`Error::Argument`] when both are the same kind of backend (the comparison could not fail), or follow different
    /// models of the matrix units.
    pub fn new(reference: R, examined: B) -> Result<Lockstep<R, B>> {
        let (a, b) = (reference.caps(), examined.caps());
        let place = |caps: &Caps| (caps.rank, caps.ranks, caps.expert_ranks);
        let describe = |caps: &Caps| {
            let (rank, ranks, expert_ranks) = place(caps);
            format!("{:?} on rank {rank} of {ranks} in groups of {expert_ranks}", caps.numerics)
        };
        ensure(
            a.backend != b.backend,
            "lockstep",
            "examined",
            || format!("another backend than {}", a.backend),
            || b.backend.to_owned(),
        )?;
        ensure(
            a.numerics == b.numerics && place(a) == place(b),
            "lockstep",
            "examined",
            || describe(a),
            || describe(b),
        )?;
        Ok(Lockstep { reference, examined, ops: AtomicU64::new(0) })
    }

    /// Ops that ran so far with the same bits.
    pub fn ops(&self) -> u64 {
        self.ops.load(Ordering::Relaxed)
    }

    fn compare(&self, op: &'static str, name: &dyn std::fmt::Debug, outputs: Vec<Use<'_>>) -> Result<()> {
        let number = self.ops.fetch_add(1, Ordering::Relaxed) + 1;
        for Use { field, tensor, .. } in outputs {
            let mut sides = [vec![0u8; tensor.bytes()], vec![0u8; tensor.bytes()]];
            self.reference.read(tensor, &mut sides[0])?;
            self.examined.read(tensor, &mut sides[1])?;
            let size = tensor.dtype().size();
            let [expected, found] = sides.each_ref().map(|s| s.chunks_exact(size));
            let mut wrong = expected.zip(found).enumerate().filter(|(_, (a, b))| !same(tensor.dtype(), a, b));
            if let Some((index, (a, b))) = wrong.next() {
                let (count, cols) = (1 + wrong.count(), tensor.cols().max(1));
                let hex = |bytes: &[u8]| bytes.iter().rev().map(|b| format!("{b:02x}")).collect::<String>();
                let reference = self.reference.caps().backend;
                return Err(Error::Device {
                    backend: self.examined.caps().backend,
                    op,
                    what: format!(
                        "op {number}: {field} {tensor:?} differs from {reference} in {count} elements, first at row {}, \
                         column {}: 0x{} instead of 0x{}; the op: {name:?}",
                        index / cols,
                        index % cols,
                        hex(b),
                        hex(a),
                    ),
                });
            }
        }
        Ok(())
    }
}

/// The same bits, or both NaN.
fn same(dtype: DType, a: &[u8], b: &[u8]) -> bool {
    let nan = |x: &[u8]| match (dtype, x) {
        (DType::F32, &[p, q, r, s]) => f32::from_le_bytes([p, q, r, s]).is_nan(),
        (DType::Bf16, &[p, q]) => bf16::to_f32(u16::from_le_bytes([p, q])).is_nan(),
        (DType::E4m3, &[code]) => code & 0x7F == 0x7F,
        _ => false,
    };
    a == b || (nan(a) && nan(b))
}

impl<R: Backend, B: Backend> Backend for Lockstep<R, B> {
    fn caps(&self) -> &Caps {
        self.reference.caps()
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        let (a, b) = (self.reference.alloc(dtype, shape, memory)?, self.examined.alloc(dtype, shape, memory)?);
        // The same undefined contents, since an op may leave a part of its output as it is.
        let mut bytes = vec![0; a.bytes()];
        self.reference.read(&a, &mut bytes)?;
        self.examined.write(&b, &bytes)?;
        Ok(Tensor::twins(&a, &b))
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.reference.write(dst, bytes)?;
        self.examined.write(dst, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.reference.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.reference.wait()?;
        self.examined.wait()
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.examined.timings()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        Ok(Event(std::sync::Arc::new(Both(self.reference.record(queue)?, self.examined.record(queue)?))))
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        let any: &dyn std::any::Any = &*event.0;
        match any.downcast_ref::<Both>() {
            Some(Both(a, b)) => {
                self.reference.wait_for(queue, a)?;
                self.examined.wait_for(queue, b)
            }
            None => Err(Error::ForeignTensor { op: "wait_for", backend: "lockstep" }),
        }
    }

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        self.reference.grouped_gemm(op)?;
        self.examined.grouped_gemm(op)?;
        self.compare("grouped_gemm", &**op, op.outputs())
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        self.reference.group_quantize(op)?;
        self.examined.group_quantize(op)?;
        self.compare("group_quantize", &**op, op.outputs())
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        self.reference.all_to_all(op)?;
        self.examined.all_to_all(op)?;
        self.compare("all_to_all", &**op, op.outputs())
    }

    fn set_away(&self, away: bool) -> Result<()> {
        self.reference.set_away(away)?;
        self.examined.set_away(away)
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        self.reference.offload(op)?;
        self.examined.offload(op)?;
        self.compare("offload", &**op, op.outputs())
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        self.reference.route(op)?;
        self.examined.route(op)?;
        self.compare("route", &**op, op.outputs())
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        self.reference.attention(op)?;
        self.examined.attention(op)?;
        self.compare("attention", &**op, op.outputs())
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        self.reference.map(op)?;
        self.examined.map(op)?;
        self.compare(op.name(), &**op, op.outputs())
    }
}
