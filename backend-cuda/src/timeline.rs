//! What ran on the streams and when, launch by launch, while somebody wants to know: see `dropless_core::trace`. An event
//! before and one after each launch note the times; nothing waits for them before the end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dropless_core::trace::{Interval, Launch, LaunchClock};
use dropless_core::{Queue, Result};
use parking_lot::Mutex;

use crate::device::{Gpu, QUEUES};
use crate::driver::Event;

const OP: &str = "trace";

/// The launches of a device since the start of its clock.
#[derive(Debug, Default)]
pub(crate) struct Timeline {
    running: AtomicBool,
    recorded: Mutex<Recorded>,
}

#[derive(Debug, Default)]
struct Recorded {
    /// The moment from which times count.
    zero: Option<Event>,
    launches: Vec<Timed>,
}

/// A launch and the events around it.
#[derive(Debug)]
struct Timed {
    name: &'static str,
    queue: Queue,
    begin: Event,
    end: Event,
}

impl Gpu {
    /// Queues a launch on a stream of the device that is the thread's, and what notes its time, if that is wanted.
    pub(crate) fn timed(&self, name: &'static str, queue: Queue, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        // The events of a recording would be passed at every launch of its graph.
        if !self.timeline.running.load(Ordering::Relaxed) || self.recording() {
            return launch();
        }
        let event = || -> Result<Event> {
            let event = Event::timed(OP)?;
            event.move_to_end(OP, self.stream(queue))?;
            Ok(event)
        };
        let begin = event()?;
        launch()?;
        let timed = Timed { name, queue, begin, end: event()? };
        self.timeline.recorded.lock().launches.push(timed);
        Ok(())
    }
}

impl LaunchClock for Gpu {
    fn start(&self) -> Result<Instant> {
        self.bind(OP)?;
        self.synchronize(OP)?;
        let zero = Event::timed(OP)?;
        zero.move_to_end(OP, self.stream(Queue::Compute))?;
        zero.synchronize(OP)?;
        let now = Instant::now();
        *self.timeline.recorded.lock() = Recorded { zero: Some(zero), launches: Vec::new() };
        self.timeline.running.store(true, Ordering::Relaxed);
        Ok(now)
    }

    fn queued(&self) -> usize {
        self.timeline.recorded.lock().launches.len()
    }

    fn stop(&self) -> Result<Vec<Launch>> {
        self.timeline.running.store(false, Ordering::Relaxed);
        self.bind(OP)?;
        self.synchronize(OP)?;
        let Recorded { zero, launches } = std::mem::take(&mut *self.timeline.recorded.lock());
        let Some(zero) = zero else { return Ok(Vec::new()) };
        let mut ends = [Duration::ZERO; QUEUES.len()];
        let measured = launches.iter().map(|timed| {
            let (begin, length) = (timed.begin.since(OP, &zero)?, timed.end.since(OP, &timed.begin)?);
            let time = after(&mut ends[timed.queue as usize], duration(begin), duration(length));
            Ok(Launch { name: timed.name, queue: timed.queue, time })
        });
        measured.collect()
    }
}

/// When a launch ran that follows the one which ended at `end`. Its events say so up to their resolution, half a
/// microsecond, and that of f32, which grows with the time.
fn after(end: &mut Duration, begin: Duration, length: Duration) -> Interval {
    let begin = begin.max(*end);
    *end = begin + length;
    Interval { begin, end: *end }
}

fn duration(milliseconds: f32) -> Duration {
    Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3)
}

#[cfg(test)]
mod tests {
    use dropless_core::ops::{Add, Fill};
    use dropless_core::trace::Traced;
    use dropless_core::{Backend, DType, Memory};
    use dropless_tests::require::Need;

    use super::*;
    use crate::{Cuda, CudaOptions};

    #[test]
    fn launches_of_a_queue_follow_one_another() {
        let us = Duration::from_micros;
        let mut end = us(0);
        assert_eq!(after(&mut end, us(3), us(4)), Interval { begin: us(3), end: us(7) });
        assert_eq!(after(&mut end, us(6), us(2)), Interval { begin: us(7), end: us(9) });
        assert_eq!(after(&mut end, us(20), us(0)), Interval { begin: us(20), end: us(20) });
        assert_eq!(duration(-0.5), us(0));
        assert_eq!(duration(0.25), us(250));
    }

    #[test]
    fn every_launch_is_timed_while_a_trace_goes_on_and_none_afterwards() {
        let Some(cuda) = Need::Cuda.or_skip(Cuda::new(&CudaOptions::default())) else { return };
        let tensor = |memory| cuda.alloc(DType::F32, &[1 << 20], memory).unwrap();
        let [a, b, out] = [(); 3].map(|()| tensor(Memory::Device));
        let traced = Traced::begin(&cuda).unwrap();
        for x in [&a, &b] {
            Fill { out: x, value: 1.0 }.run(&traced).unwrap();
        }
        Add { a: &a, b: &b, c: None, out: &out }.run(&traced).unwrap();
        let mut values = vec![0u8; 4 << 20];
        traced.read(&out, &mut values).unwrap();
        let trace = traced.end().unwrap();
        Fill { out: &a, value: 1.0 }.run(&cuda).unwrap();
        assert_eq!(cuda.launch_clock().unwrap().queued(), 0);
        let calls: Vec<_> = trace.spans.iter().filter(|span| span.call.is_some()).collect();
        assert_eq!(calls.iter().map(|span| span.name).collect::<Vec<_>>(), ["fill", "fill", "add", "read"]);
        for call in calls {
            let work = trace.on_queues(call);
            let [(Queue::Compute, time)] = work[..] else { panic!("{call:?} is on {work:?}") };
            assert!(
                !time.length().is_zero() && time.begin >= call.time.begin && time.end <= trace.length,
                "{call:?} {time:?}"
            );
        }
        let ends = trace.launches.iter().map(|launch| launch.time.end);
        assert!(trace.launches.iter().skip(1).zip(ends).all(|(next, end)| next.time.begin >= end), "{trace:?}");
    }
}
