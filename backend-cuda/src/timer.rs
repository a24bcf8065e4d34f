//! Where the time of a step goes, from events before and after each op. Nothing waits for them: they are read once the
//! device is done anyway. They are there from the first look on: events that nobody looks at would pile up.

use std::time::Duration;

use dropless_core::backend::Timings;
use dropless_core::{Group, Queue, Result};
use parking_lot::Mutex;

use crate::device::Gpu;
use crate::driver::Event;

const OP: &str = "timings";

/// What an op counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    Gemm,
    Attention,
    Exchange(Group),
    Other,
}

/// The ops since the last look.
#[derive(Debug, Default)]
pub(crate) struct Timer(Mutex<Spans>);

#[derive(Debug, Default)]
struct Spans {
    /// Somebody looks.
    wanted: bool,
    queued: Vec<Span>,
    /// Events that can be recorded again.
    free: Vec<Event>,
}

#[derive(Debug)]
struct Span {
    work: Work,
    begin: Event,
    end: Event,
}

/// A span in milliseconds from the first event.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Interval {
    from: f32,
    to: f32,
}

impl Timer {
    /// Queues an op, and the events around it.
    pub(crate) fn time(&self, gpu: &Gpu, work: Work, op: impl FnOnce() -> Result<()>) -> Result<()> {
        gpu.blame(self.queue(gpu, work, op))
    }

    fn queue(&self, gpu: &Gpu, work: Work, op: impl FnOnce() -> Result<()>) -> Result<()> {
        // The events of a recording would be passed at every launch.
        if !self.0.lock().wanted || gpu.recording() {
            return op();
        }
        let queue = if matches!(work, Work::Exchange(_)) { Queue::Comm } else { Queue::Compute };
        gpu.bind(OP)?;
        let event = || -> Result<Event> {
            let free = self.0.lock().free.pop();
            let event = free.map_or_else(|| Event::timed(OP), Ok)?;
            event.move_to_end(OP, gpu.stream(queue))?;
            Ok(event)
        };
        let begin = event()?;
        op()?;
        let span = Span { work, begin, end: event()? };
        self.0.lock().queued.push(span);
        Ok(())
    }

    /// Adds up the ops that are done; the others stay for the next call.
    pub(crate) fn take(&self, gpu: &Gpu) -> Result<Timings> {
        gpu.bind(OP)?;
        let mut spans = self.0.lock();
        spans.wanted = true;
        let (mut done, mut rest) = (Vec::new(), Vec::new());
        for span in spans.queued.drain(..) {
            if rest.is_empty() && span.end.passed(OP)? { done.push(span) } else { rest.push(span) }
        }
        spans.queued = rest;
        let interval = |span: &Span| -> Result<Interval> {
            let zero = &done[0].begin;
            Ok(Interval { from: span.begin.since(OP, zero)?, to: span.end.since(OP, zero)? })
        };
        let measured = done.iter().map(|span| Ok((span.work, interval(span)?))).collect::<Result<Vec<_>>>()?;
        spans.free.extend(done.into_iter().flat_map(|span| [span.begin, span.end]));
        Ok(add_up(&measured))
    }
}

fn add_up(measured: &[(Work, Interval)]) -> Timings {
    let total = |counts: &dyn Fn(Work) -> bool| {
        duration(measured.iter().filter(|(work, _)| counts(*work)).map(|(_, i)| i.to - i.from).sum())
    };
    let exchanges = measured.iter().filter(|(work, _)| matches!(work, Work::Exchange(_)));
    let busy: Vec<Interval> =
        measured.iter().filter(|(work, _)| !matches!(work, Work::Exchange(_))).map(|(_, i)| *i).collect();
    Timings {
        gemm: total(&|work| work == Work::Gemm),
        attention: total(&|work| work == Work::Attention),
        dispatch: total(&|work| work == Work::Exchange(Group::Experts)),
        exposed: duration(exchanges.map(|(_, exchange)| uncovered(*exchange, &busy)).sum()),
    }
}

/// How much of an interval none of these covers; they are in order and do not overlap.
fn uncovered(interval: Interval, covers: &[Interval]) -> f32 {
    let first = covers.partition_point(|cover| cover.to <= interval.from);
    let overlapping = covers[first..].iter().take_while(|cover| cover.from < interval.to);
    let covered: f32 = overlapping.map(|cover| cover.to.min(interval.to) - cover.from.max(interval.from)).sum();
    interval.to - interval.from - covered
}

fn duration(milliseconds: f32) -> Duration {
    Duration::from_secs_f32(milliseconds.max(0.0) / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_is_exposed_where_nothing_computes() {
        let at = |from, to| Interval { from, to };
        let covers = [at(0.0, 2.0), at(3.0, 4.0), at(6.0, 9.0)];
        assert_eq!(uncovered(at(1.0, 7.0), &covers), 3.0);
        assert_eq!(uncovered(at(4.0, 6.0), &covers), 2.0);
        assert_eq!(uncovered(at(6.5, 8.0), &covers), 0.0);
        assert_eq!(uncovered(at(10.0, 12.0), &covers), 2.0);
        let timings = add_up(&[
            (Work::Gemm, at(0.0, 2.0)),
            (Work::Exchange(Group::Experts), at(1.0, 4.0)),
            (Work::Other, at(3.0, 3.5)),
            (Work::Exchange(Group::World), at(5.0, 6.0)),
            (Work::Attention, at(6.0, 10.0)),
        ]);
        let ms = Duration::from_millis;
        assert_eq!((timings.gemm, timings.attention, timings.dispatch), (ms(2), ms(4), ms(3)));
        assert_eq!(timings.exposed, Duration::from_secs_f32(2.5 / 1e3));
    }
}
