//! Memory of callers that the device is not done with. A tensor in such memory can go while work with it is queued; what
//! keeps the memory alive stays here until events say that the work is done. Nobody waits for them: they are looked at
//! whenever another such tensor comes or goes, and when somebody waits for the device anyway.

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use dropless_core::Result;
use parking_lot::Mutex;

use crate::device::Gpu;
use crate::driver::Event;
use crate::pool::KeepAlive;

const OP: &str = "import";

/// What is kept, in the order in which the tensors went.
#[derive(Debug)]
pub(crate) struct Loans {
    kept: Mutex<VecDeque<Loan>>,
    gpu: Arc<Gpu>,
}

#[derive(Debug)]
struct Loan {
    /// None when the device failed: then it is kept until the backend goes.
    fences: Option<Vec<Event>>,
    /// For its `Drop`.
    _keep_alive: KeepAlive,
}

impl Loan {
    fn is_done(&self) -> bool {
        self.fences.as_ref().is_some_and(|fences| fences.iter().all(|fence| fence.passed(OP).unwrap_or(false)))
    }

    /// Waits for the device.
    fn end(self) {
        // Of a device that has failed nothing more is to come.
        for fence in self.fences.iter().flatten() {
            let _ = fence.synchronize(OP);
        }
    }
}

impl Loans {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Arc<Loans> {
        Arc::new(Loans { kept: Mutex::default(), gpu: gpu.clone() })
    }

    /// Keeps a caller's memory alive until the device has passed all fences. Without the backend nobody would look for
    /// that, so it is waited for here.
    pub(crate) fn take(loans: &Weak<Loans>, fences: Result<Vec<Event>>, keep_alive: KeepAlive) {
        let loan = Loan { fences: fences.ok(), _keep_alive: keep_alive };
        match loans.upgrade() {
            Some(loans) => {
                loans.kept.lock().push_back(loan);
                loans.settle();
            }
            None => loan.end(),
        }
    }

    /// Lets go of what the device is done with, in order, so that a look costs the same however much is kept.
    pub(crate) fn settle(&self) {
        loop {
            // What a caller does when its memory comes back may lead here again: the lock is not held then.
            let done = {
                let mut kept = self.kept.lock();
                if kept.front().is_some_and(Loan::is_done) { kept.pop_front() } else { None }
            };
            if done.is_none() {
                return;
            }
        }
    }
}

impl Drop for Loans {
    fn drop(&mut self) {
        let _ = self.gpu.bind(OP);
        std::mem::take(self.kept.get_mut()).into_iter().for_each(Loan::end);
    }
}
