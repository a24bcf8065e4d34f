//! Negative controls: a backend with a fault must turn the comparisons of the suite red. Each control runs a comparison of
//! the suite against a host that was tampered with, or a wgpu backend with a changed shader, and fails if the comparison
//! does not notice.
#![expect(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::Mutex;

use dropless_core::backend::{Backend, Caps, Event, Queue, Timings};
use dropless_core::host::{Host, HostOptions};
use dropless_core::numerics::NumericModel;
use dropless_core::ops::{Checked, GroupedGemm, Map, Op, Route};
use dropless_core::{DType, Memory, Result, Tensor};
use dropless_tests::differential::{self, Candidate, Ranks, UNDER_TEST};
use dropless_tests::moe::{Outcome, Problem, problem};
use dropless_tests::ops;
use dropless_wgpu::{Wgpu, WgpuOptions};

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
    /// A cast writes one element too far.
    WrittenTooFar,
    /// A cast leaves its last element as it was.
    NotWritten,
}

#[derive(Debug)]
struct Tampered {
    host: Host,
    other: Host,
    caps: Caps,
    fault: Fault,
    /// Whole buffers, to find what lies around a view.
    buffers: Mutex<Vec<Tensor>>,
}

fn ranks(n: usize, fault: Fault) -> Vec<Tampered> {
    let hosts = |numerics| Host::ranks(n, HostOptions { numerics, ..HostOptions::default() }).unwrap();
    let pairs = hosts(NumericModel::Hopper).into_iter().zip(hosts(NumericModel::F32));
    let tampered = |(host, other): (Host, Host)| {
        let caps = Caps { backend: "tampered", ..host.caps().clone() };
        Tampered { host, other, caps, fault, buffers: Mutex::default() }
    };
    pairs.map(tampered).collect()
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

    fn forward<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()> {
        op.queue(&self.host)
    }

    /// Elements `from..to` of the buffer of a view, counted from the view's end.
    fn around(&self, view: &Tensor, from: isize, to: isize) -> Tensor {
        let buffers = self.buffers.lock().unwrap();
        let whole = buffers.iter().find(|whole| whole.shares_storage(view)).unwrap();
        let end = view.offset() + view.len();
        whole.slice(end.strict_add_signed(from), end.strict_add_signed(to)).unwrap()
    }
}

impl Backend for Tampered {
    fn caps(&self) -> &Caps {
        &self.caps
    }

    fn alloc(&self, dtype: DType, shape: &[usize], memory: Memory) -> Result<Tensor> {
        let tensor = self.host.alloc(dtype, shape, memory)?;
        self.buffers.lock().unwrap().push(tensor.clone());
        Ok(tensor)
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

    fn timings(&self) -> Result<Option<Timings>> {
        self.host.timings()
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
            (Fault::FlippedBit, DType::Bf16) => {
                self.change::<u16>(op.out, |v| v.iter_mut().take(1).for_each(|x| *x ^= 1))
            }
            (Fault::FlippedBit, _) => self.change::<u32>(op.out, |v| v.iter_mut().take(1).for_each(|x| *x ^= 1)),
            _ => Ok(()),
        }
    }

    dropless_core::each_op!(forward: group_quantize, all_to_all, offload, attention);

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

    fn map(&self, op: &Checked<Map<'_>>) -> Result<()> {
        self.host.map(op)?;
        match (self.fault, &**op) {
            (Fault::RoundedTooEarly, Map::Combine(combine)) if combine.out.dtype() == DType::F32 => {
                self.change::<f32>(combine.out, |values| {
                    values.iter_mut().for_each(|v| *v = dropless_core::numerics::bf16::round(*v));
                })
            }
            (Fault::WrittenTooFar, Map::Cast(cast)) => {
                let beyond = self.around(cast.out, 0, 1);
                self.host.write(&beyond, &vec![0; beyond.bytes()])
            }
            (Fault::NotWritten, Map::Cast(cast)) => {
                let last = self.around(cast.out, -1, 0);
                self.host.write(&last, &[0xA5, 0xA5, 0xA5, 0xFF][4 - last.bytes()..])
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

/// The comparison of the harness: a kind of problem on a backend against the host.
fn report(problem: &str, open: fn(usize, NumericModel) -> Result<Ranks>) -> std::result::Result<(), String> {
    let problem = ops::problems().into_iter().find(|p| p.name == problem).unwrap();
    // As many as the suite runs; a control is no find to keep.
    problem.compare(&Candidate { name: "tampered", need: None, open, ranks: true }, differential::cases(), None)
}

fn tampered(n: usize, fault: Fault) -> Result<Ranks> {
    Ok(ranks(n, fault).into_iter().map(|rank| Box::new(rank) as Box<dyn Backend>).collect())
}

#[test]
fn the_harness_passes_an_honest_backend() {
    for problem in ["cast", "grouped_gemm_hopper"] {
        report(problem, |n, _| tampered(n, Fault::None)).unwrap();
    }
}

#[test]
fn the_harness_notices_a_flipped_bit_and_shrinks_the_problem() {
    let report = report("grouped_gemm_hopper", |n, _| tampered(n, Fault::FlippedBit)).unwrap_err();
    assert!(report.contains("1 of 1 elements differ\n    at [0, 0]: "), "{report}");
    assert!(report.contains("GroupedGemm {") && report.contains("from seed "), "{report}");
}

#[test]
fn the_harness_notices_a_word_written_too_far() {
    let report = report("cast", |n, _| tampered(n, Fault::WrittenTooFar)).unwrap_err();
    assert!(report.contains("words around it were written"), "{report}");
}

#[test]
fn the_harness_notices_a_word_that_is_not_written() {
    let report = report("cast", |n, _| tampered(n, Fault::NotWritten)).unwrap_err();
    assert!(report.contains("(not written), not "), "{report}");
}

#[test]
fn the_harness_notices_another_model_of_the_matrix_units() {
    report("grouped_gemm_hopper", |n, _| tampered(n, Fault::OtherModel)).unwrap_err();
}

#[test]
fn the_harness_refuses_a_backend_against_itself() {
    let report = report("cast", differential::host).unwrap_err();
    assert!(report.contains("host was compared with itself"), "{report}");
}

/// The shaders with one piece of text in place of another.
fn mutated(numerics: NumericModel, shader_patch: fn(String) -> String) -> Result<Ranks> {
    let options = WgpuOptions { numerics, shader_patch: Some(shader_patch), ..WgpuOptions::default() };
    Ok(vec![Box::new(Wgpu::new(&options)?)])
}

/// Whether there is an adapter; `DROPLESS_REQUIRE` can ask for one.
fn adapter() -> bool {
    let wgpu = UNDER_TEST.iter().find(|candidate| candidate.name == "wgpu").unwrap();
    wgpu.device().inspect_err(|why| println!("skipped: {why}")).is_ok()
}

/// Up from three quarters instead of a half.
fn rounds_wrongly(text: String) -> String {
    text.replace("a + 0x7FFFu", "a + 0x3FFFu")
}

/// Not to even.
fn ties_go_up(text: String) -> String {
    text.replace("a + 0x7FFFu + ((a >> 16u) & 1u)", "a + 0x8000u")
}

fn writes_too_far(text: String) -> String {
    let too_far = "out_set(i, x_at(i)); if i + 1u == p.elements { out_set(i + 1u, 0u); }";
    text.replace("out_set(i, x_at(i));", too_far)
}

fn cuts_too_early(text: String) -> String {
    text.replace("const FRACTION_BITS: u32 = 25u;", "const FRACTION_BITS: u32 = 24u;")
}

/// The high parts first.
fn adds_parts_the_other_way_round(text: String) -> String {
    text.replace("(4u * pair)", "(4u * (PLANE_PAIRS - 1u - pair))")
}

/// Whatever the largest score is.
fn rounds_large_exponents_once(text: String) -> String {
    text.replace("f32_abs(start) < 0x4B800000u", "f32_abs(start) < INF")
}

/// A probability of zero times an infinity that the row does not see.
fn multiplies_what_is_not_seen(text: String) -> String {
    text.replace("select(term.exponent, OUTSIDE, value == UNSEEN)", "select(term.exponent, ABSENT, value == UNSEEN)")
}

/// Whatever the index is but NONE.
fn reads_any_row(text: String) -> String {
    text.replace("if row < p.sources {", "if row != 0xFFFFFFFFu {")
}

/// A group ends where its offset says.
fn believes_offsets(text: String) -> String {
    text.replace("max(begin, min(offset, min(last, rows)))", "offset")
}

/// Whatever the pairs are.
fn rotates_neighbours(text: String) -> String {
    text.replace("halves == 1u", "false")
}

fn rotates_halves(text: String) -> String {
    text.replace("halves == 1u", "true")
}

#[test]
fn the_harness_passes_the_shaders_as_they_are() {
    if adapter() {
        for problem in ["cast", "gather_rows", "rotary", "mla", "grouped_gemm_hopper", "grouped_gemm_split_hopper"] {
            report(problem, |_, numerics| mutated(numerics, std::convert::identity)).unwrap();
        }
    }
}

#[test]
fn the_harness_notices_a_shader_that_rounds_wrongly() {
    if adapter() {
        let report = report("cast", |_, numerics| mutated(numerics, rounds_wrongly)).unwrap_err();
        assert!(report.contains("elements differ"), "{report}");
    }
}

#[test]
fn the_harness_notices_a_shader_whose_ties_go_up() {
    if adapter() {
        let report = report("cast", |_, numerics| mutated(numerics, ties_go_up)).unwrap_err();
        assert!(report.contains("elements differ"), "{report}");
    }
}

#[test]
fn the_harness_notices_a_shader_that_writes_too_far() {
    if adapter() {
        let report = report("cast", |_, numerics| mutated(numerics, writes_too_far)).unwrap_err();
        assert!(report.contains("words around it were written"), "{report}");
    }
}

#[test]
fn the_harness_notices_a_shader_that_cuts_a_product_too_early() {
    if adapter() {
        let report = report("grouped_gemm_hopper", |_, numerics| mutated(numerics, cuts_too_early)).unwrap_err();
        assert!(report.contains("elements differ"), "{report}");
    }
}

#[test]
fn the_harness_notices_a_shader_that_adds_the_parts_of_split_factors_in_another_order() {
    if adapter() {
        let changed = |_, numerics| mutated(numerics, adds_parts_the_other_way_round);
        let report = report("grouped_gemm_split_hopper", changed).unwrap_err();
        assert!(report.contains("elements differ") && report.contains("Split {"), "{report}");
    }
}

#[test]
fn the_harness_notices_a_shader_that_rounds_large_exponents_once() {
    if adapter() {
        let changed = |_, numerics| mutated(numerics, rounds_large_exponents_once);
        report("attention_lengths_f32", changed).unwrap();
        let report = report("attention_scores_f32", changed).unwrap_err();
        assert!(report.contains("elements differ"), "{report}");
    }
}

#[test]
fn the_harness_notices_a_shader_that_multiplies_what_a_row_does_not_see() {
    if adapter() {
        for problem in ["attention_unseen_hopper", "attention_unseen_f32"] {
            let report = report(problem, |_, numerics| mutated(numerics, multiplies_what_is_not_seen)).unwrap_err();
            assert!(report.contains("(NaN), not "), "{report}");
        }
    }
}

#[test]
fn the_harness_notices_a_shader_that_reads_what_lies_behind() {
    if adapter() {
        let report = report("gather_rows", |_, numerics| mutated(numerics, reads_any_row)).unwrap_err();
        assert!(report.contains("elements differ"), "{report}");
    }
}

#[test]
fn the_harness_notices_a_shader_that_believes_offsets() {
    if adapter() {
        report("group_quantize_ragged", |_, numerics| mutated(numerics, believes_offsets)).unwrap_err();
    }
}

#[test]
fn the_harness_notices_a_shader_that_knows_one_kind_of_rotary_pairs() {
    if adapter() {
        for problem in ["rotary", "mla"] {
            let neighbours = report(problem, |_, numerics| mutated(numerics, rotates_neighbours)).unwrap_err();
            assert!(neighbours.contains("elements differ") && neighbours.contains("pairs: Halves"), "{neighbours}");
            let halves = report(problem, |_, numerics| mutated(numerics, rotates_halves)).unwrap_err();
            assert!(halves.contains("elements differ") && halves.contains("pairs: Neighbours"), "{halves}");
        }
    }
}
