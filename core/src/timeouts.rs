//! Suspending collective timeouts while a rank is busy by itself.

use std::fmt::Debug;
use std::sync::Arc;

use crate::error::Result;

/// The collective timeouts that a rank holds up: who waits for it in a collective fails after a time, unless it has
/// suspended them because it is busy with something long by itself, such as writing a file.
///
/// While a rank has them suspended, the others wait for it for as long as its process answers. It begins no collective in
/// between, and those that it has queued end before they are suspended, since nobody would miss one that does not. Where
/// the ranks are threads of one process nothing is suspended: each waits up to its own limit, however busy another is.
///
/// It is a handle, and clones mean the same rank. The default one does nothing.
#[derive(Clone, Debug, Default)]
pub struct Timeouts(Vec<Arc<dyn Suspend>>);

/// What a backend does for [`Timeouts`].
pub trait Suspend: Debug + Send + Sync {
    /// Waits for the collectives that are queued, and tells the other ranks that this one is busy.
    ///
    /// # Errors
    /// [`crate::Error::Collective`] when the ranks cannot go on together; a failure of the work waited for.
    fn suspend(&self) -> Result<()>;

    /// Tells them that it is not any more.
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
