//! `train --trace`: one step as a file that Perfetto and chrome://tracing show ([`chrome`]), and as a table ([`table`]).

mod chrome;
mod table;

use std::path::Path;

use dropless_core::backend::{Caps, Queue};
use dropless_core::files;
use dropless_core::trace::{Measured, Trace};

use crate::error::Result;

/// A step that was traced, on the first rank.
#[derive(Debug)]
pub(crate) struct TracedStep<'a> {
    /// Its number.
    pub(crate) step: u64,
    /// Where it ran.
    pub(crate) caps: &'a Caps,
    /// What was seen.
    pub(crate) trace: Trace,
}

/// Every queue, with its name.
const QUEUES: [(Queue, &str); 3] = [(Queue::Compute, "compute"), (Queue::Comm, "comm"), (Queue::Offload, "offload")];

impl TracedStep<'_> {
    /// Writes the file.
    ///
    /// # Errors
    /// Those of the file.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        Ok(files::replace(path, chrome::json(self).to_string().as_bytes())?)
    }

    /// The lines of the table.
    pub(crate) fn table(&self) -> Vec<String> {
        table::lines(self)
    }

    fn measured(&self) -> &'static str {
        match self.trace.measured {
            Measured::Launches => "device time, by events before and after each launch, which take about 1 us of it",
            Measured::Calls => "time of the calls on the host, each of which was waited for",
        }
    }
}
