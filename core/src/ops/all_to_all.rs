//! Exchange of rows between the ranks of a group.

use super::arguments::{op, queued, tensors};
use super::{Arg, Checked, DType, Values, distinct, number};
use crate::backend::{Backend, Caps, Group, Queue};
use crate::error::Result;
use crate::tensor::Tensor;

/// How many rows of each segment count. Both are u32 `[ranks of the group]` on the device and are never read on the host.
#[derive(Clone, Copy, Debug)]
pub struct Counts<'a> {
    /// Rows for each destination.
    pub send: &'a Tensor,
    /// Rows from each source.
    pub recv: &'a Tensor,
}

tensors!(Counts: tensor(send, recv));

/// Segment d of `send` goes to member d of the group, where it becomes segment (this rank's place) of `recv`. Every member
/// calls it in the same order with the same row capacity and row length. Runs on the comm queue.
///
/// # Shape
/// With n members, recv: `[n, capacity, ...]`. send: the same, or `[capacity, ...]` to send one segment to every member
/// (all-gather). With counts, rows from the count on are neither sent nor written.
///
/// # Numerics
/// None: bytes are moved.
///
/// # Errors
/// [`crate::Error::Argument`] for shapes; [`crate::Error::Collective`] when the ranks' shapes or counts differ, a rank
/// failed, or one did not arrive in time.
#[derive(Clone, Copy, Debug)]
pub struct AllToAll<'a> {
    /// The ranks that take part.
    pub group: Group,
    /// What this rank sends.
    pub send: &'a Tensor,
    /// What it receives.
    pub recv: &'a Tensor,
    /// Rows of each segment; all of them if absent.
    pub counts: Option<Counts<'a>>,
}

op!(AllToAll: read(send, counts), write(recv), value(group));

const OP: &str = "all_to_all";

queued!(AllToAll, named OP, by all_to_all);

impl AllToAll<'_> {
    /// True when one segment goes to every member.
    pub fn gathers(&self) -> bool {
        self.send.shape().len() + 1 == self.recv.shape().len()
    }

    /// Checks the arguments.
    ///
    /// # Errors
    /// See the type.
    pub fn check(self, caps: &Caps) -> Result<Checked<Self>> {
        let (recv, ranks) = (self.recv.shape(), caps.size(self.group));
        number(
            OP,
            "recv",
            recv.len() >= 2 && recv[0] == ranks,
            &format!("[{ranks}, capacity, ...] ({ranks} ranks)"),
            format_args!("{:?}", self.recv),
        )?;
        let expected = if self.gathers() { &recv[1..] } else { recv };
        Arg::new(OP, "send", self.send).dtype(&[self.recv.dtype()])?.shape(expected, "as recv")?;
        let mut others = vec![self.send];
        if let Some(counts) = self.counts {
            Arg::new(OP, "counts.send", counts.send).dtype(&[DType::U32])?.len(ranks, "one for each rank")?;
            Arg::new(OP, "counts.recv", counts.recv).dtype(&[DType::U32])?.len(ranks, "one for each rank")?;
            others.extend([counts.send, counts.recv]);
        }
        distinct(OP, "recv", self.recv, &others)?;
        Ok(Checked::new(self))
    }

    /// The specification: what every member of a group receives. Each is an op of this kind with the memory of its rank, in
    /// the order of the group; all of them agree in shape, and in how many rows go from one to another.
    ///
    /// # Errors
    /// Those of [`Backend::read`] and [`Backend::write`].
    pub fn exchange(members: &[(Checked<AllToAll<'_>>, &dyn Backend)]) -> Result<()> {
        for (to, (receiver, its_memory)) in members.iter().enumerate() {
            let mut recv = Values::read(*its_memory, receiver.recv)?;
            let chunk = receiver.recv.bytes() / members.len();
            let row = chunk / receiver.recv.shape()[1].max(1);
            for (from, (sender, memory)) in members.iter().enumerate() {
                let send = Values::read(*memory, sender.send)?;
                let bytes = match sender.counts {
                    Some(counts) => Values::read(*memory, counts.send)?.word(to) as usize * row,
                    None => chunk,
                };
                let start = if sender.gathers() { 0 } else { to * chunk };
                recv.bytes_mut()[from * chunk..from * chunk + bytes]
                    .copy_from_slice(&send.bytes()[start..start + bytes]);
            }
            recv.write(*its_memory)?;
        }
        Ok(())
    }

    /// One member's part of [`exchange`](AllToAll::exchange), which only the ranks together can play.
    pub(in crate::ops) fn spec(op: &Checked<Self>, memory: &dyn Backend) -> Result<()> {
        memory.all_to_all(op)
    }

    /// As [`run`](AllToAll::run), after the compute queue's work so far and before its later work.
    ///
    /// # Errors
    /// See the type.
    pub fn run_in_order(self, backend: &dyn Backend) -> Result<()> {
        backend.wait_for(Queue::Comm, &backend.record(Queue::Compute)?)?;
        self.run(backend)?;
        backend.wait_for(Queue::Compute, &backend.record(Queue::Comm)?)
    }

    /// Checks and queues.
    ///
    /// # Errors
    /// See the type.
    pub fn run(self, backend: &dyn Backend) -> Result<()> {
        let _span = tracing::trace_span!(OP, send = ?self.send).entered();
        backend.all_to_all(&self.check(backend.caps())?)
    }
}
