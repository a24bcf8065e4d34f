//! Suspending collective timeouts while a rank is busy with work of its own.

use std::fmt::Debug;
use std::sync::Arc;

use crate::error::Result;

/// The collective timeouts of the ranks that wait for this one: a rank that waits in a collective fails after a time,
/// unless this rank has suspended the timeouts because it is busy with long work of its own, such as writing a file.
///
/// While they are suspended, the other ranks wait as long as this one's process responds. It starts no collective in
/// between, and the collectives it has queued complete before the timeouts are suspended, because nothing would detect
/// one that hangs. Where ranks are threads of one process nothing is suspended: each waits up to its own limit.
///
/// This is a handle, and clones refer to the same rank. The default one does nothing.
#[derive(Clone, Debug, Default)]
pub struct Timeouts(Vec<Arc<dyn Suspend>>);

/// What a backend implements for [`Timeouts`].
pub trait Suspend: Debug + Send + Sync {
    /// Waits for the collectives that are queued, and tells the other ranks that this one is busy.
    ///
    /// # Errors
    /// [`crate::Error::Collective`] when the ranks cannot go on together; a failure of the work waited for.
    fn suspend(&self) -> Result<()>;

    /// Tells the other ranks that this one is no longer busy.
    ///
    /// # Errors
    /// [`crate::Error::Collective`] when the ranks cannot go on together.
    fn resume(&self) -> Result<()>;
}

impl Timeouts {
    /// The handle to those of one backend.
    pub fn new(backend: Arc<dyn Suspend>) -> Timeouts {
        Timeouts(vec![backend])
    }

    /// Those of two backends that are one rank together.
    pub fn and(&self, other: &Timeouts) -> Timeouts {
        Timeouts(self.0.iter().chain(&other.0).cloned().collect())
    }

    /// This rank is busy from now on.
    ///
    /// # Errors
    /// As [`Suspend::suspend`]; what was suspended before it is resumed.
    pub fn suspend(&self) -> Result<()> {
        for (i, one) in self.0.iter().enumerate() {
            if let Err(error) = one.suspend() {
                // The error that led here is the one to report.
                let _ = Timeouts(self.0[..i].to_vec()).resume();
                return Err(error);
            }
        }
        Ok(())
    }

    /// It is not any more.
    ///
    /// # Errors
    /// As [`Suspend::resume`], the first of them; all are resumed even so.
    pub fn resume(&self) -> Result<()> {
        let resumed: Vec<Result<()>> = self.0.iter().map(|one| one.resume()).collect();
        resumed.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::error::Error;

    #[derive(Debug, Default)]
    struct Switch {
        suspended: AtomicBool,
        fails: bool,
    }

    impl Switch {
        fn set(&self, suspended: bool) -> Result<()> {
            if self.fails {
                return Err(Error::Collective { rank: 0, op: "suspend", what: "the others are gone".into() });
            }
            assert_ne!(self.suspended.swap(suspended, Ordering::Relaxed), suspended);
            Ok(())
        }
    }

    impl Suspend for Switch {
        fn suspend(&self) -> Result<()> {
            self.set(true)
        }

        fn resume(&self) -> Result<()> {
            self.set(false)
        }
    }

    fn switches(fails: [bool; 3]) -> ([Arc<Switch>; 3], Timeouts) {
        let switches = fails.map(|fails| Arc::new(Switch { fails, ..Switch::default() }));
        let of = |i: usize| Timeouts::new(switches[i].clone());
        let together = Timeouts::default().and(&of(0)).and(&of(1)).and(&of(2));
        (switches, together)
    }

    fn suspended(switches: &[Arc<Switch>; 3]) -> [bool; 3] {
        switches.each_ref().map(|switch| switch.suspended.load(Ordering::Relaxed))
    }

    #[test]
    fn backends_that_are_one_rank_are_busy_together() -> Result<()> {
        let (all, together) = switches([false; 3]);
        together.suspend()?;
        assert_eq!(suspended(&all), [true; 3]);
        together.clone().resume()?;
        assert_eq!(suspended(&all), [false; 3]);
        Timeouts::default().suspend()
    }

    #[test]
    fn a_failure_leaves_nothing_suspended() {
        let (all, together) = switches([false, true, false]);
        assert!(together.suspend().is_err());
        assert_eq!(suspended(&all), [false; 3]);
        let (all, together) = switches([false; 3]);
        together.suspend().unwrap();
        let (_, broken) = switches([true; 3]);
        assert!(broken.and(&together).resume().is_err());
        assert_eq!(suspended(&all), [false; 3], "what comes after a failure is resumed, too");
    }
}
