//! Two backends in lockstep: every op runs on both, and the first whose bits differ is reported.
//!
//! A [`Lockstep`] is a backend itself, so a whole training step can run on it. Each of its tensors has a buffer on both
//! sides. After an op, everything that it wrote is compared; any NaN equals any NaN. One pass finds the op where a
//! backend deviates from the specification, whatever happens to the numbers afterwards.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::around::same_rank;
use crate::backend::{Backend, Caps, Event, EventState, Queue, Timings};
use crate::error::{Error, Result, ensure};
use crate::numerics::bf16;
use crate::ops::{Checked, FieldName, Op, Use};
use crate::tensor::{DType, Memory, Tensor};

/// A backend under test in lockstep with the one that defines the bits.
#[derive(Debug)]
pub struct Lockstep<R, B> {
    caps: Caps,
    reference: R,
    examined: B,
    ops: AtomicU64,
}

/// The tensors of both sides.
#[derive(Debug)]
struct Sides {
    reference: Tensor,
    examined: Tensor,
}

/// Events of both sides.
#[derive(Debug)]
struct Both(Event, Event);

impl EventState for Both {}

/// Where the bits of a backend first differ from the reference.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Divergence {
    /// The backend that defines the bits.
    pub reference: &'static str,
    /// The backend under test.
    pub examined: &'static str,
    /// Its rank.
    pub rank: usize,
    /// The op.
    pub op: &'static str,
    /// Number of ops run so far, this one included.
    pub number: u64,
    /// The op, with its arguments.
    pub arguments: String,
    /// Which of its tensors.
    pub field: FieldName,
    /// That tensor's element type.
    pub dtype: DType,
    /// That tensor's extents.
    pub shape: Vec<usize>,
    /// How many of its elements differ.
    pub elements: usize,
    /// The row of the first that does, with all dimensions but the last taken together.
    pub row: usize,
    /// Its column.
    pub column: usize,
    /// Its bits on the reference.
    pub expected: u32,
    /// Its bits on the backend under test.
    pub found: u32,
}

impl fmt::Display for Divergence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Divergence { reference, examined, op, number, field, dtype, shape, elements, row, column, .. } = self;
        let digits = 2 + 2 * dtype.size();
        write!(
            f,
            "{op}: op {number} of rank {}: {field} {dtype:?}{shape:?} of {examined} differs from {reference} in \
             {elements} elements, first at row {row}, column {column}: {:#0digits$x} instead of {:#0digits$x}; the op: {}",
            self.rank, self.found, self.expected, self.arguments,
        )
    }
}

impl<R: Backend, B: Backend> Lockstep<R, B> {
    /// Runs both side by side; what they return is the reference's.
    ///
    /// # Errors
    /// [`Error::Argument`] when both are the same kind of backend (the comparison could not fail), follow different models
    /// of the matrix units, or are different ranks.
    pub fn new(reference: R, examined: B) -> Result<Lockstep<R, B>> {
        let (a, b) = (reference.caps(), examined.caps());
        ensure(
            a.backend != b.backend,
            "lockstep",
            "examined",
            || format!("another backend than {}", a.backend),
            || b.backend.to_owned(),
        )?;
        same_rank("lockstep", "examined", a, b)?;
        let caps = Caps { timeouts: a.timeouts.and(&b.timeouts), ..a.clone() };
        Ok(Lockstep { caps, reference, examined, ops: AtomicU64::new(0) })
    }

    /// Ops that ran so far with the same bits.
    pub fn ops(&self) -> u64 {
        self.ops.load(Ordering::Relaxed)
    }

    fn sides(&self, op: &'static str, tensor: &Tensor) -> Result<Sides> {
        let sides = tensor.storage::<Sides>().ok_or(Error::ForeignTensor { op, backend: "lockstep" })?;
        Ok(Sides { reference: tensor.view_of(&sides.reference)?, examined: tensor.view_of(&sides.examined)? })
    }

    fn run<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()> {
        let name = op.name();
        op.over(|t| Ok(self.sides(name, t)?.reference), |op| op.queue(&self.reference))?;
        op.over(|t| Ok(self.sides(name, t)?.examined), |op| op.queue(&self.examined))?;
        let number = self.ops.fetch_add(1, Ordering::Relaxed) + 1;
        let outputs = op.outputs();
        outputs.into_iter().try_for_each(|output| self.compare(name, number, &**op, output))
    }

    fn compare(&self, op: &'static str, number: u64, arguments: &dyn fmt::Debug, output: Use<'_>) -> Result<()> {
        let Use { field, tensor, .. } = output;
        let sides = self.sides(op, tensor)?;
        let [mut expected, mut found] = [vec![0u8; tensor.bytes()], vec![0u8; tensor.bytes()]];
        self.reference.read(&sides.reference, &mut expected)?;
        self.examined.read(&sides.examined, &mut found)?;
        let size = tensor.dtype().size();
        let pairs = expected.chunks_exact(size).zip(found.chunks_exact(size)).enumerate();
        let mut wrong = pairs.filter(|(_, (a, b))| !same(tensor.dtype(), a, b));
        let Some((index, (expected, found))) = wrong.next() else { return Ok(()) };
        let cols = tensor.cols().max(1);
        Err(Error::Divergence(Box::new(Divergence {
            reference: self.reference.caps().backend,
            examined: self.examined.caps().backend,
            rank: self.caps.rank,
            op,
            number,
            arguments: format!("{arguments:?}"),
            field,
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            elements: 1 + wrong.count(),
            row: index / cols,
            column: index % cols,
            expected: bits(expected),
            found: bits(found),
        })))
    }
}

/// The bits of an element from its bytes, the low one first.
fn bits(bytes: &[u8]) -> u32 {
    bytes.iter().rev().fold(0, |bits, &byte| bits << 8 | u32::from(byte))
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
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        let reference = self.reference.alloc(dtype, shape, memory)?;
        let examined = self.examined.alloc(dtype, shape, memory)?;
        // The same undefined contents, since an op may leave a part of its output as it is.
        let mut bytes = vec![0; reference.bytes()];
        self.reference.read(&reference, &mut bytes)?;
        self.examined.write(&examined, &bytes)?;
        Ok(Tensor::from_storage(Arc::new(Sides { reference, examined }), shape, dtype, memory))
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        let sides = self.sides("write", dst)?;
        self.reference.write(&sides.reference, bytes)?;
        self.examined.write(&sides.examined, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.reference.read(&self.sides("read", src)?.reference, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.reference.wait()?;
        self.examined.wait()
    }

    fn timings(&self) -> Result<Option<Timings>> {
        self.examined.timings()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        Ok(Event(Arc::new(Both(self.reference.record(queue)?, self.examined.record(queue)?))))
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

    crate::each_op!(run: grouped_gemm, group_quantize, all_to_all, offload, route, attention, map);
}
