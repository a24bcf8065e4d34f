//! The ranks that this process drives: one thread for each, all running the same function.

use std::thread;

use dropless_core::{Backend, Error as CoreError};

use crate::error::{Error, Result};

/// Whether the first rank is among these. It alone prints, and writes what a run has once.
pub fn lead(ranks: &[Box<dyn Backend>]) -> bool {
    ranks.iter().any(|rank| rank.caps().rank == 0)
}

/// Runs `work` on these ranks and returns what the first one made of it; None where it lives in another process.
///
/// When a rank fails, its backend goes away and the others' collectives fail; what is reported is the first failure that
/// is not such a consequence.
///
/// # Errors
/// That failure.
pub fn run<T: Send>(
    ranks: Vec<Box<dyn Backend>>,
    work: impl Fn(&dyn Backend) -> Result<T> + Sync,
) -> Result<Option<T>> {
    let leads = lead(&ranks);
    let results: Vec<Result<T>> = std::thread::scope(|scope| {
        let work = &work;
        let mut threads = Vec::new();
        let mut refused = None;
        for rank in ranks {
            let name = format!("rank {}", rank.caps().rank);
            match thread::Builder::new().name(name.clone()).spawn_scoped(scope, move || work(&*rank)) {
                Ok(thread) => threads.push(thread),
                Err(error) => {
                    refused = Some(Err(Error::thread(name)(error)));
                    // The ranks without a thread go away, and so the others do not wait for them.
                    break;
                }
            }
        }
        let joined = threads.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        joined.chain(refused).collect()
    });
    let consequence = |e: &Error| matches!(e.core(), Some(CoreError::Collective { .. }));
    let mut failures = Vec::new();
    let mut done = Vec::new();
    for result in results {
        match result {
            Ok(value) => done.push(value),
            Err(error) => failures.push(error),
        }
    }
    if failures.is_empty() {
        return Ok(done.into_iter().next().filter(|_| leads));
    }
    let root = failures.iter().position(|e| !consequence(e)).unwrap_or(0);
    Err(failures.swap_remove(root))
}
