//! A step in the trace event format of Chrome, as JSON: one process for the host, whose one track has the parts of the step
//! and the calls in them, and one for the device with a track for each queue. Times are microseconds from the beginning of
//! the step.

use std::time::Duration;

use dropless_core::backend::Queue;
use dropless_core::trace::{Call, Interval, Span};
use serde_json::{Map, Value, json};

use super::{QUEUES, TracedStep};

/// The processes of the file.
const HOST: u32 = 1;
const DEVICE: u32 = 2;

pub(super) fn json(traced: &TracedStep<'_>) -> Value {
    let (caps, trace) = (traced.caps, &traced.trace);
    let mut events = vec![
        label("process_name", HOST, 0, &format!("host of rank {}", caps.rank)),
        label("thread_name", HOST, 1, "queues the work"),
        label("process_name", DEVICE, 0, &format!("{}: {}", caps.backend, caps.device)),
    ];
    events.extend(QUEUES.map(|(queue, name)| label("thread_name", DEVICE, track(queue), name)));
    for (number, span) in trace.spans.iter().enumerate() {
        let arguments = arguments(traced, number, span);
        let category = if span.call.is_some() { "call" } else { "part" };
        events.push(event(&name(span), category, (HOST, 1), span.time, arguments.clone()));
        let Some(call) = &span.call else { continue };
        for (queue, time) in trace.on_queues(span) {
            let mut arguments = arguments.clone();
            rates(&mut arguments, call, time);
            events.push(event(&name(span), "op", (DEVICE, track(queue)), time, arguments));
        }
        for launch in &trace.launches[call.launches.clone()] {
            let arguments = Map::from_iter([("call".to_owned(), json!(number))]);
            events.push(event(launch.name, "launch", (DEVICE, track(launch.queue)), launch.time, arguments));
        }
    }
    json!({
        "displayTimeUnit": "ms",
        "otherData": {
            "step": traced.step,
            "rank": caps.rank,
            "ranks": caps.ranks,
            "backend": caps.backend,
            "device": caps.device,
            "queues": traced.measured(),
            "bytes": "of an op's tensors, read or written once (updated in place: twice), with all rows that there is room for",
            "flop": "useful operations of the rows that there are, as in tflops_per_rank of metrics.jsonl",
        },
        "traceEvents": events,
    })
}

/// The number of a queue's track.
fn track(queue: Queue) -> u32 {
    match queue {
        Queue::Compute => 1,
        Queue::Comm => 2,
        Queue::Offload => 3,
    }
}

/// Names a process or a track.
fn label(what: &str, process: u32, track: u32, name: &str) -> Value {
    json!({"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}})
}

fn event(
    name: &str,
    category: &str,
    (process, track): (u32, u32),
    time: Interval,
    arguments: Map<String, Value>,
) -> Value {
    json!({
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": track,
        "ts": microseconds(time.begin),
        "dur": microseconds(time.length()),
        "args": arguments,
    })
}

fn microseconds(time: Duration) -> f64 {
    time.as_nanos() as f64 / 1e3
}

fn name(span: &Span) -> String {
    match (span.index, span.call.as_ref().and_then(|call| call.kind)) {
        (Some(index), _) => format!("{} {index}", span.name),
        (None, Some(kind)) => format!("{} {kind}", span.name),
        (None, None) => span.name.into(),
    }
}

/// What there is to say of a call.
fn arguments(traced: &TracedStep<'_>, number: usize, span: &Span) -> Map<String, Value> {
    let mut arguments = Map::new();
    let Some(call) = &span.call else { return arguments };
    let parts: Vec<&Span> = traced.trace.parts(span).collect();
    let mut say = |key: &str, value: Value| arguments.insert(key.into(), value);
    say("call", json!(number));
    say("op", json!(span.name));
    if let Some(layer) = parts.iter().find(|part| part.name == "layer").and_then(|part| part.index) {
        say("layer", json!(layer));
    }
    if !parts.is_empty() {
        say("part", json!(parts.iter().rev().map(|part| name(part)).collect::<Vec<_>>().join(" / ")));
    }
    if let Some(kind) = call.kind {
        say("kind", json!(kind));
    }
    if !call.tensors.is_empty() {
        say("tensors", Value::Object(call.tensors.iter().map(|(field, it)| (field.clone(), json!(it))).collect()));
    }
    say("bytes", json!(call.bytes));
    if let Some(flops) = call.flops {
        say("flop", json!(flops));
    }
    arguments
}

/// Adds what a call did in a second.
fn rates(arguments: &mut Map<String, Value>, call: &Call, time: Interval) {
    let seconds = time.length().as_secs_f64();
    if seconds > 0.0 {
        arguments.insert("GB/s".into(), json!(call.bytes as f64 / seconds / 1e9));
        arguments.extend(call.flops.map(|flops| ("TFLOP/s".into(), json!(flops / seconds / 1e12))));
    }
}
