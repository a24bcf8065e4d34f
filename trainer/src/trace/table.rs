//! A step as a table: where its time went, the most first, by op and, where the device times them, by kernel.

use std::collections::HashMap;
use std::time::Duration;

use dropless_core::trace::Measured;

use super::{QUEUES, TracedStep};

/// What was added up under a name.
#[derive(Clone, Copy, Debug, Default)]
struct Row {
    times: usize,
    time: Duration,
    bytes: f64,
    flops: f64,
}

impl Row {
    fn add(&mut self, time: Duration) {
        self.times += 1;
        self.time += time;
    }
}

type Rows = HashMap<String, Row>;

pub(super) fn lines(traced: &TracedStep<'_>) -> Vec<String> {
    let trace = &traced.trace;
    let (mut ops, mut kernels, mut busy) = (Rows::new(), Rows::new(), [Duration::ZERO; 3]);
    let mut used = |queue, time| {
        let at = QUEUES.iter().position(|(known, _)| *known == queue);
        busy[at.unwrap_or_default()] += time;
    };
    for span in &trace.spans {
        let Some(call) = &span.call else { continue };
        let work = trace.on_queues(span);
        if work.is_empty() {
            continue;
        }
        let name = call.kind.map_or_else(|| span.name.to_owned(), |kind| format!("{} {kind}", span.name));
        let row = ops.entry(name).or_default();
        row.add(work.iter().map(|(_, time)| time.length()).sum());
        row.bytes += call.bytes as f64;
        row.flops += call.flops.unwrap_or(0.0);
        if trace.measured == Measured::Calls {
            work.iter().for_each(|(queue, time)| used(*queue, time.length()));
        }
    }
    for launch in &trace.launches {
        kernels.entry(launch.name.to_owned()).or_default().add(launch.time.length());
        used(launch.queue, launch.time.length());
    }
    let shares = QUEUES.iter().zip(busy).filter(|(_, time)| !time.is_zero());
    let shares = shares.map(|((_, name), time)| format!("{name} {:.1} %", percent(time, trace.length)));
    let mut lines = vec![
        format!("step {}: {:.3} ms; {}", traced.step, milliseconds(trace.length), traced.measured()),
        format!("queues at work: {}", shares.collect::<Vec<_>>().join(", ")),
    ];
    for (title, times, rows) in [("op", "calls", ops), ("kernel", "launches", kernels)] {
        lines.extend(table(title, times, rows, trace.length));
    }
    lines
}

fn table(title: &str, times: &str, rows: Rows, whole: Duration) -> Vec<String> {
    let mut rows: Vec<(String, Row)> = rows.into_iter().collect();
    if rows.is_empty() {
        return Vec::new();
    }
    rows.sort_by(|(a, one), (b, other)| other.time.cmp(&one.time).then(a.cmp(b)));
    let width = rows.iter().map(|(name, _)| name.len()).max().unwrap_or(0).max(title.len());
    let rates = rows.iter().any(|(_, row)| row.bytes > 0.0);
    let mut head = format!("{title:width$} {times:>8} {:>11} {:>7}", "ms", "share");
    if rates {
        head += &format!(" {:>8} {:>8}", "TFLOP/s", "GB/s");
    }
    let line = |(name, row): &(String, Row)| {
        let (ms, share, seconds) = (milliseconds(row.time), percent(row.time, whole), row.time.as_secs_f64());
        let mut line = format!("{name:width$} {:8} {ms:11.3} {share:5.1} %", row.times);
        if rates {
            let rate = |amount: f64, unit: f64, digits: usize| match amount > 0.0 && seconds > 0.0 {
                true => format!("{:.digits$}", amount / seconds / unit),
                false => String::new(),
            };
            line += &format!(" {:>8} {:>8}", rate(row.flops, 1e12, 3), rate(row.bytes, 1e9, 1));
        }
        line.trim_end().to_owned()
    };
    std::iter::once(head).chain(rows.iter().map(line)).collect()
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn percent(time: Duration, whole: Duration) -> f64 {
    100.0 * time.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE)
}
