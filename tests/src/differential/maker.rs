//! Makes the operands of one problem on a backend and runs its ops: the same draw makes the same problem on every
//! backend.
//!
//! What shapes a problem (extents, types, options) comes from the draw's choices, which shrink: the smallest choice is
//! the simplest, as in Hypothesis (MacIver and Donaldson, ECOOP 2020). What fills it comes from the draw's seed.

use std::fmt::{self, Debug};
use std::slice;

use dropless_core::ops::NONE;
use dropless_core::{Backend, DType, Memory, NumericModel, Result, Tensor};
use proptest::prelude::*;

use super::compare::{Outcome, Output};
use super::random::Random;

/// Elements after each tensor that nothing may change.
const AFTER: usize = 8;

/// The byte that lies around each tensor; no float type makes a NaN of it.
const GUARD: u8 = 0x5A;

/// What a problem is made of.
#[derive(Clone)]
pub struct Draw {
    choices: Vec<u16>,
    seed: u64,
}

impl fmt::Debug for Draw {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let end = self.choices.iter().rposition(|&choice| choice > 0).map_or(0, |last| last + 1);
        write!(f, "seed {}, choices {:?} and then 0", self.seed, &self.choices[..end])
    }
}

/// Any draw. It has more choices than any problem makes.
pub fn draws() -> impl Strategy<Value = Draw> {
    let choices = proptest::collection::vec(any::<u16>(), 96);
    (choices, any::<u64>().no_shrink()).prop_map(|(choices, seed)| Draw { choices, seed })
}

/// Element types of every size.
pub const TYPES: [DType; 4] = [DType::F32, DType::U32, DType::Bf16, DType::E4m3];

/// The values that an output holds before its op runs: a NaN where the type has one.
pub(super) fn unwritten(dtype: DType) -> &'static [u8] {
    match dtype {
        DType::F32 => &[0xA5, 0xA5, 0xA5, 0xFF],
        DType::Bf16 => &[0xA5, 0xFF],
        DType::E4m3 | DType::Ue8m0 => &[0xFF],
        DType::E2m1x2 => &[0xA5],
        DType::U32 => &[0xA5; 4],
    }
}

/// A tensor that ops write, in its buffer between guards.
#[derive(Debug)]
struct Written {
    name: &'static str,
    whole: Tensor,
    view: Tensor,
}

/// See the module.
#[derive(Debug)]
pub struct Maker<'a> {
    backend: &'a dyn Backend,
    choices: slice::Iter<'a, u16>,
    /// For the elements of operands.
    pub random: Random,
    ops: Vec<String>,
    written: Vec<Written>,
}

impl<'a> Maker<'a> {
    /// For one rank. Ranks share the choices but not the elements.
    pub(super) fn new(backend: &'a dyn Backend, draw: &'a Draw) -> Maker<'a> {
        let random = Random(draw.seed.wrapping_add(backend.caps().rank as u64));
        Maker { backend, choices: draw.choices.iter(), random, ops: Vec::new(), written: Vec::new() }
    }

    /// 0 to `n` - 1.
    pub fn below(&mut self, n: usize) -> usize {
        let choice = self.choices.next().expect("a draw has more choices than any problem makes");
        (usize::from(*choice) * n) >> 16
    }

    /// True or false.
    pub fn flag(&mut self) -> bool {
        self.below(2) == 1
    }

    /// One of these, the first being the simplest.
    pub fn one_of<T: Copy>(&mut self, any: &[T]) -> T {
        any[self.below(any.len())]
    }

    /// One of the float types.
    pub fn float(&mut self) -> DType {
        self.one_of(&[DType::F32, DType::Bf16])
    }

    /// 1 to `most`, with a liking for 1 and for powers of two and their neighbours.
    pub fn extent(&mut self, most: usize) -> usize {
        let extent = match self.below(3) {
            0 => 1,
            1 => 1 + self.below(most),
            _ => (1usize << self.below(10)) + self.below(3) - 1,
        };
        extent.clamp(1, most)
    }

    /// The arithmetic of the backend's products.
    pub fn numerics(&self) -> NumericModel {
        self.backend.caps().numerics
    }

    /// The ranks that take part.
    pub fn ranks(&self) -> usize {
        self.backend.caps().ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.backend.caps().rank
    }

    /// A tensor of random elements.
    pub fn tensor(&mut self, dtype: DType, shape: &[usize]) -> Tensor {
        let bytes = self.random.elements(dtype, shape.iter().product());
        self.with_bytes(dtype, shape, &bytes)
    }

    /// A tensor of integers.
    pub fn integers(&mut self, shape: &[usize], values: &[u32]) -> Tensor {
        self.with_bytes(DType::U32, shape, bytemuck::cast_slice(values))
    }

    /// Now and then lets some indices (or counts) out of their range, which ends before `end`, and some repeat another.
    pub fn stray(&mut self, values: &mut [u32], end: usize) {
        if !self.flag() {
            return;
        }
        for i in 0..values.len() {
            if self.random.below(4) == 0 {
                let near = end as u32 + self.random.below(3) as u32;
                let any =
                    [near, near, NONE, NONE - 1, 100u32.wrapping_neg(), 1 << 31, values[self.random.below(i + 1)]];
                values[i] = any[self.random.below(any.len())];
            }
        }
    }

    /// A tensor of given elements.
    pub fn with_bytes(&mut self, dtype: DType, shape: &[usize], bytes: &[u8]) -> Tensor {
        self.guarded(dtype, shape, bytes, Memory::Device).1
    }

    /// A tensor that the problem's ops write.
    pub fn output(&mut self, name: &'static str, dtype: DType, shape: &[usize]) -> Tensor {
        self.output_in(name, dtype, shape, Memory::Device)
    }

    /// The same in either memory.
    pub fn output_in(&mut self, name: &'static str, dtype: DType, shape: &[usize], memory: Memory) -> Tensor {
        let bytes = unwritten(dtype).repeat(shape.iter().product());
        self.written(name, dtype, shape, &bytes, memory)
    }

    /// A tensor of random elements that the problem's ops change.
    pub fn in_place(&mut self, name: &'static str, dtype: DType, shape: &[usize]) -> Tensor {
        let bytes = self.random.elements(dtype, shape.iter().product());
        self.written(name, dtype, shape, &bytes, Memory::Device)
    }

    fn written(&mut self, name: &'static str, dtype: DType, shape: &[usize], bytes: &[u8], memory: Memory) -> Tensor {
        let (whole, view) = self.guarded(dtype, shape, bytes, memory);
        self.written.push(Written { name, whole, view: view.clone() });
        view
    }

    /// A buffer and the tensor in it, often at an odd place.
    fn guarded(&mut self, dtype: DType, shape: &[usize], bytes: &[u8], memory: Memory) -> (Tensor, Tensor) {
        let len: usize = shape.iter().product();
        let before = if self.random.below(2) == 0 { 0 } else { 1 + self.random.below(300) };
        let whole = self.backend.alloc(dtype, &[before + len + AFTER], memory).unwrap();
        let guard = |elements: usize| vec![GUARD; elements * dtype.size()];
        self.backend.write(&whole, &[&guard(before), bytes, &guard(AFTER)].concat()).unwrap();
        let view = whole.slice(before, before + len).unwrap().reshape(shape).unwrap();
        (whole, view)
    }

    /// Runs an op: `m.run(Cast { .. }, Cast::run)`.
    pub fn run<T: Debug>(&mut self, op: T, run: impl FnOnce(T, &dyn Backend) -> Result<()>) {
        let described = format!("{op:?}");
        run(op, self.backend).unwrap_or_else(|error| panic!("{error}\n  {described}"));
        self.ops.push(described);
    }

    /// What the ops left.
    pub(super) fn finish(self) -> Outcome {
        let Maker { backend, ops, written, .. } = self;
        let read = |Written { name, whole, view }: Written| {
            let bytes = backend.download::<u8>(&whole).unwrap();
            let (before, rest) = bytes.split_at(view.offset() * view.dtype().size());
            let (values, after) = rest.split_at(view.bytes());
            let guarded = [before, after].concat().iter().all(|&byte| byte == GUARD);
            let (shape, rank) = (view.shape().to_vec(), backend.caps().rank);
            Output { name, rank, dtype: view.dtype(), shape, values: values.to_vec(), guarded }
        };
        Outcome { backend: backend.caps().backend, ops, outputs: written.into_iter().map(read).collect() }
    }
}
