//! Negative controls: a backend with a fault must turn the comparisons of the suite red. Each control runs a comparison of
//! the suite against a host that was tampered with, and fails if the comparison does not notice.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dropless_core::backend::{Backend, Caps, Event, Queue};
use dropless_core::host::{Host, HostOptions};
use dropless_core::numerics::NumericModel;
use dropless_core::ops::{AllToAll, Attention, Checked, GroupQuantize, GroupedGemm, Map, Offload, Route};
use dropless_core::{DType, Memory, Result, Tensor};
use dropless_tests::moe::{Outcome, Problem, problem};

/// What is done to the results of the host.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The lowest bit of one element of every product.
    FlippedBit,
    /// The last token that goes to another rank is left out.
    DroppedToken,
    /// Every product follows another model of the matrix units.
    OtherModel,
    /// The first weight of the slots is another token's.
    WrongWeight,
    /// Combine rounds its partial sums to bf16.
    RoundedTooEarly,
}

#[derive(Debug)]
struct Tampered {
    host: Host,
    other: Host,
    fault: Fault,
}

fn ranks(n: usize, fault: Fault) -> Vec<Tampered> {
    let hosts = |numerics| Host::ranks(n, HostOptions { numerics, ..HostOptions::default() }).unwrap();
    let pairs = hosts(NumericModel::Hopper).into_iter().zip(hosts(NumericModel::F32));
    pairs.map(|(host, other)| Tampered { host, other, fault }).collect()
}

impl Tampered {
    fn change<T: bytemuck::NoUninit + bytemuck::AnyBitPattern>(
        &self,
        tensor: &Tensor,
        change: impl FnOnce(&mut [T]),
    ) -> Result<()> {
        let backend: &dyn Backend = &self.host;
        let mut values = backend.download::<T>(tensor)?;
        change(&mut values);
        backend.write(tensor, bytemuck::cast_slice(&values))
    }
}

impl Backend for Tampered {
    fn caps(&self) -> &Caps {
        self.host.caps()
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        self.host.alloc(dtype, shape, memory)
    }

    fn write(&self, dst: &Tensor, bytes: &[u8]) -> Result<()> {
        self.host.write(dst, bytes)
    }

    fn read(&self, src: &Tensor, bytes: &mut [u8]) -> Result<()> {
        self.host.read(src, bytes)
    }

    fn wait(&self) -> Result<()> {
        self.host.wait()
    }

    fn record(&self, queue: Queue) -> Result<Event> {
        self.host.record(queue)
    }

    fn wait_for(&self, queue: Queue, event: &Event) -> Result<()> {
        self.host.wait_for(queue, event)
    }

    fn grouped_gemm(&self, op: &Checked<GroupedGemm<'_>>) -> Result<()> {
        if self.fault == Fault::OtherModel {
            return self.other.grouped_gemm(op);
        }
        self.host.grouped_gemm(op)?;
        match (self.fault, op.out.dtype()) {
            (Fault::FlippedBit, DType::Bf16) => self.change::<u16>(op.out, |v| v[0] ^= 1),
            (Fault::FlippedBit, _) => self.change::<u32>(op.out, |v| v[0] ^= 1),
            _ => Ok(()),
        }
    }

    fn group_quantize(&self, op: &Checked<GroupQuantize<'_>>) -> Result<()> {
        self.host.group_quantize(op)
    }

    fn all_to_all(&self, op: &Checked<AllToAll<'_>>) -> Result<()> {
        self.host.all_to_all(op)
    }

    fn offload(&self, op: &Checked<Offload<'_>>) -> Result<()> {
        self.host.offload(op)
    }

    fn route(&self, op: &Checked<Route<'_>>) -> Result<()> {
        self.host.route(op)?;
        match (self.fault, &**op) {
            (Fault::DroppedToken, Route::Plan(plan)) => {
                self.change::<u32>(plan.counts, |counts| counts[1] = counts[1].saturating_sub(1))
            }
            (Fault::WrongWeight, Route::Layout(layout)) => {
                self.change::<f32>(layout.slot_weights, |weights| weights.swap(0, 1))
            }
            _ => Ok(()),
        }
    }

    fn attention(&self, op: &Checked<Attention<'_>>) -> Result<()> {
        self.host.attention(op)
    }

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        self.host.map(op)?;
        match (self.fault, &**op) {
            (Fault::RoundedTooEarly, Map::Combine(combine)) if combine.out.dtype() == DType::F32 => {
                self.change::<f32>(combine.out, |values| {
                    values.iter_mut().for_each(|v| *v = dropless_core::numerics::bf16::round(*v));
                })
            }
            _ => Ok(()),
        }
    }
}

/// The comparison of the suite: two ranks of a backend against one rank of the host.
fn differs(problem: &Problem, fault: Fault) -> bool {
    let found: Outcome = problem.run_on(ranks(2, fault));
    found.bits() != problem.run(1).bits()
}

#[test]
fn an_honest_backend_passes() {
    assert!(!differs(&problem(), Fault::None));
}

#[test]
fn a_flipped_bit_is_noticed() {
    assert!(differs(&problem(), Fault::FlippedBit));
}

#[test]
fn a_dropped_token_is_noticed() {
    assert!(differs(&problem(), Fault::DroppedToken));
}

#[test]
fn another_model_of_the_matrix_units_is_noticed() {
    assert!(differs(&problem(), Fault::OtherModel));
}

#[test]
fn a_wrong_weight_is_noticed() {
    assert!(differs(&problem(), Fault::WrongWeight));
}

#[test]
fn a_rounding_in_the_wrong_place_is_noticed() {
    assert!(differs(&problem(), Fault::RoundedTooEarly));
}
