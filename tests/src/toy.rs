//! The smallest backend that a training step runs on, inside a [`Fallback`](dropless_core::fallback::Fallback): memory of
//! its own and one op, [`Cast`].

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dropless_core::backend::{Caps, Event, EventState, Queue, Timings};
use dropless_core::numerics::bf16;
use dropless_core::ops::{Cast, Map, Op};
use dropless_core::{Backend, Checked, DType, Error, Memory, Result, Tensor};
use parking_lot::Mutex;

/// See the module.
#[derive(Debug)]
pub struct Toy {
    caps: Caps,
    casts: Arc<AtomicUsize>,
    /// The cast after which the lowest bit of the first element is flipped, counted from 1.
    wrong: Option<usize>,
}

/// Where the queue is: always at its end.
#[derive(Debug)]
struct Done;

impl EventState for Done {}

/// The memory of a tensor.
type Bytes = Mutex<Vec<u8>>;

const NAME: &str = "toy";

impl Toy {
    /// The same rank, with the same timeouts, as another backend; `wrong` numbers the cast that goes wrong.
    pub fn new(rank: &Caps, wrong: Option<usize>) -> Toy {
        Toy { caps: Caps { backend: NAME, ..rank.clone() }, casts: Arc::default(), wrong }
    }

    /// How many casts there were so far, and those to come.
    pub fn casts(&self) -> Arc<AtomicUsize> {
        self.casts.clone()
    }

    fn cast(&self, op: &Cast<'_>) -> Result<()> {
        let mut values = vec![0; op.x.bytes()];
        self.read(op.x, &mut values)?;
        let values: Vec<f32> = match op.x.dtype() {
            DType::F32 => values.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            _ => values.chunks_exact(2).map(|b| bf16::to_f32(u16::from_le_bytes([b[0], b[1]]))).collect(),
        };
        let mut out: Vec<u8> = match op.out.dtype() {
            DType::F32 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
            _ => values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes()).collect(),
        };
        let number = 1 + self.casts.fetch_add(1, Ordering::Relaxed);
        if self.wrong == Some(number) {
            out[0] ^= 1;
        }
        self.write(op.out, &out)
    }

    fn lacks<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()> {
        Err(Error::Unsupported { backend: NAME, op: op.name() })
    }
}

fn bytes<'a>(op: &'static str, tensor: &'a Tensor, len: usize) -> Result<(&'a Bytes, Range<usize>)> {
    let bytes = tensor.storage::<Bytes>().ok_or(Error::ForeignTensor { op, backend: NAME })?;
    tensor.has_bytes(op, len)?;
    let start = tensor.offset() * tensor.dtype().size();
    Ok((bytes, start..start + len))
}

impl Backend for Toy {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        let bytes = vec![0xFF; shape.iter().product::<usize>() * dtype.size()];
        Ok(Tensor::from_storage(Arc::new(Bytes::new(bytes)), shape, dtype, memory))
    }

    fn write(&self, dst: &Tensor, values: &[u8]) -> Result<()> {
        let (bytes, range) = bytes("write", dst, values.len())?;
        bytes.lock()[range].copy_from_slice(values);
        Ok(())
    }

    fn read(&self, src: &Tensor, values: &mut [u8]) -> Result<()> {
        let (bytes, range) = bytes("read", src, values.len())?;
        values.copy_from_slice(&bytes.lock()[range]);
        Ok(())
    }

    fn wait(&self) -> Result<()> {
        Ok(())
    }

    fn timings(&self) -> Result<Option<Timings>> {
        Ok(None)
    }

    fn record(&self, _queue: Queue) -> Result<Event> {
        Ok(Event(Arc::new(Done)))
    }

    fn wait_for(&self, _queue: Queue, _event: &Event) -> Result<()> {
        Ok(())
    }

    dropless_core::each_op!(lacks: grouped_gemm, group_quantize, all_to_all, offload, route, attention);

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        match &**op {
            Map::Cast(cast) => self.cast(cast),
            _ => self.lacks(op),
        }
    }
}
