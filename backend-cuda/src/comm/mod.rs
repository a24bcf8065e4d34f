//! Several processes with one device each.
//!
//! [`World`] says which process this is, `control` connects the processes, and the [`Comm`] of a device has a
//! [`Channel`] for each group of ranks: through CUDA peer-to-peer memory where all their devices support it, otherwise
//! through NCCL. `watchdog` ends all ranks when one fails.

mod board;
mod control;
#[cfg(target_os = "linux")]
mod descriptors;
mod nccl;
#[cfg(target_os = "linux")]
mod shared_memory;
mod watchdog;
#[cfg(target_os = "linux")]
mod windows;

use std::sync::{Arc, Weak};
use std::time::Duration;

use dropless_core::timeouts::Suspend;
use dropless_core::{Caps, Error, Group, Result, Tensor, World};
use serde::{Deserialize, Serialize};

use crate::device::Gpu;
use crate::driver;
pub(crate) use board::{Board, HEADER, NAMES, VALUES};
use board::{FAULT_CAPACITY, FAULT_OVERFLOW, FAULT_ROW_BYTES, FAULT_ROWS, Fault};
use control::Control;
pub use nccl::avoid_multicast;
pub(crate) use nccl::{Communicator, Transfer};
use watchdog::{Watchdog, Watched};
#[cfg(target_os = "linux")]
pub(crate) use windows::Windows;

const OP: &str = "all_to_all";
const BOOTSTRAP: &str = "bootstrap";

/// How rows are exchanged between the processes of a group. The bytes are the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Transport {
    /// CUDA peer-to-peer memory where all devices of the group support it, otherwise NCCL.
    #[default]
    Auto,
    /// NCCL.
    Nccl,
    /// CUDA peer-to-peer memory.
    Peer,
}

/// A rank's connections to the others.
#[derive(Debug)]
pub(crate) struct Comm {
    gpu: Arc<Gpu>,
    rank: usize,
    /// None for a single rank. Goes before the channels, which it watches.
    ties: Option<Ties>,
    /// In the order of [`Group::ALL`].
    channels: [Arc<Channel>; 3],
}

#[derive(Debug)]
struct Ties {
    watchdog: Watchdog,
    control: Arc<Control>,
}

/// A rank's connections to the members of a group.
#[derive(Debug)]
pub(crate) struct Channel {
    group: Group,
    members: Vec<usize>,
    /// This rank among the members.
    pub(crate) place: usize,
    pub(crate) path: Path,
    pub(crate) board: Board,
    /// The words on the device that order its kernels.
    pub(crate) state: Tensor,
}

/// How a group exchanges rows.
#[derive(Debug)]
pub(crate) enum Path {
    /// This rank is its only member.
    Alone,
    Nccl(Communicator),
    #[cfg(target_os = "linux")]
    Peer(Windows),
}

/// What every rank tells all others at the start.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Facts {
    /// What the processes of one machine, and no others, have in common.
    machine: String,
    device: driver::Uuid,
    transport: Transport,
    expert_ranks: usize,
    timeout: Duration,
    nccl: bool,
}

impl Facts {
    /// Why this rank cannot work with one that has other facts.
    fn contradiction(&self, rank: usize, theirs: &Facts, other: usize) -> Option<String> {
        if theirs.transport != self.transport {
            let (a, b) = (theirs.transport, self.transport);
            return Some(format!("rank {other} exchanges by {a:?}, rank {rank} by {b:?}"));
        }
        if theirs.expert_ranks != self.expert_ranks {
            let (a, b) = (theirs.expert_ranks, self.expert_ranks);
            return Some(format!("rank {other} shares experts among {a} ranks, rank {rank} among {b}"));
        }
        if theirs.timeout != self.timeout {
            let (a, b) = (theirs.timeout, self.timeout);
            return Some(format!("rank {other} waits for {a:?}, rank {rank} for {b:?}"));
        }
        let same = (&theirs.machine, theirs.device) == (&self.machine, self.device);
        same.then(|| format!("ranks {other} and {rank} use the same device (is LOCAL_RANK right?)"))
    }
}

impl Comm {
    /// Connects the ranks of a job; waits for all of them.
    ///
    /// # Errors
    /// [`Error::Collective`] when they do not come together, or do not belong together.
    pub(crate) fn open(
        gpu: &Arc<Gpu>,
        caps: &Caps,
        world: Option<&World>,
        transport: Transport,
        timeout: Duration,
    ) -> Result<Comm> {
        let connect = |world| -> Result<Ties> {
            let control = Arc::new(Control::connect(world, timeout)?);
            let watchdog = Watchdog::new(caps.rank, control.clone(), timeout).map_err(|error| {
                let what = format!("no watch over the other ranks: {error}");
                Error::Collective { rank: caps.rank, op: BOOTSTRAP, what }
            })?;
            Ok(Ties { watchdog, control })
        };
        let ties = world.filter(|world| world.ranks > 1).map(connect).transpose()?;
        let channels = Comm::channels(gpu, caps, ties.as_ref(), transport, timeout).inspect_err(|error| {
            // The others would only learn that this rank is gone.
            ties.iter().for_each(|ties| ties.control.report(error));
        })?;
        Ok(Comm { gpu: gpu.clone(), rank: caps.rank, ties, channels })
    }

    fn channels(
        gpu: &Arc<Gpu>,
        caps: &Caps,
        ties: Option<&Ties>,
        transport: Transport,
        timeout: Duration,
    ) -> Result<[Arc<Channel>; 3]> {
        let find = |ties: &Ties| Links::find(gpu, caps, &ties.control, transport, timeout);
        let connected = ties.map(|ties| Ok((ties, find(ties)?))).transpose()?;
        let mut channels: Vec<Arc<Channel>> = Vec::new();
        for group in Group::ALL {
            let members: Vec<usize> = caps.members(group).collect();
            // Groups of the same ranks share what connects them.
            if let Some(same) = channels.iter().find(|channel| channel.members == members).cloned() {
                channels.push(same);
                continue;
            }
            let place = caps.place(group);
            let path = match &connected {
                Some((ties, links)) if members.len() > 1 => links.path(gpu, &ties.control, &members, place, timeout)?,
                _ => Path::Alone,
            };
            let (board, state) = (Board::new(gpu)?, board::new_state(gpu)?);
            let channel = Arc::new(Channel { group, members, place, path, board, state });
            if let Some((ties, _)) = &connected {
                ties.watchdog.add(channel.clone());
            }
            channels.push(channel);
        }
        Ok(channels.try_into().expect("a channel for each group"))
    }

    pub(crate) fn channel(&self, group: Group) -> &Arc<Channel> {
        &self.channels[group as usize]
    }

    /// Suspends the timeouts of the ranks while this one is busy. It knows only whether this still lives: a caller that
    /// keeps it must not keep the other ranks from learning that this one is gone.
    pub(crate) fn busy(self: &Arc<Comm>) -> Busy {
        Busy(Arc::downgrade(self))
    }

    /// Waits for every queue of the device.
    ///
    /// # Errors
    /// As [`check`](Comm::check), since a collective that failed is the reason of whatever else did; a failure of the work.
    pub(crate) fn wait(&self, op: &'static str) -> Result<()> {
        let waited = self.gpu.bind(op).and_then(|()| self.gpu.synchronize(op));
        self.check(op)?;
        self.gpu.blame(waited)
    }

    /// Whether the exchanges so far went well, as far as is known without waiting.
    ///
    /// # Errors
    /// [`Error::Collective`] when one did not, or when the ranks cannot go on together.
    pub(crate) fn check(&self, op: &'static str) -> Result<()> {
        if let Some(ties) = &self.ties {
            ties.watchdog.check(op)?;
        }
        // The watchdog looks from time to time; what is there now must not be missed.
        match self.channels.iter().find_map(|channel| channel.board.fault().map(|fault| channel.describe(fault))) {
            None => Ok(()),
            Some(what) => {
                // The others learn the reason before this rank, which has it now, goes away.
                if let Some(ties) = &self.ties {
                    ties.control.report(&what);
                }
                Err(Error::Collective { rank: self.rank, op, what })
            }
        }
    }
}

/// See [`Comm::busy`].
#[derive(Debug)]
pub(crate) struct Busy(Weak<Comm>);

impl Busy {
    fn set(&self, op: &'static str, busy: bool) -> Result<()> {
        let Some(comm) = self.0.upgrade() else { return Ok(()) };
        if busy {
            comm.wait(op)?;
        }
        if let Some(ties) = &comm.ties {
            ties.control.set_busy(busy);
        }
        comm.check(op)
    }
}

impl Suspend for Busy {
    fn suspend(&self) -> Result<()> {
        self.set("suspend", true)
    }

    fn resume(&self) -> Result<()> {
        self.set("resume", false)
    }
}

impl Drop for Comm {
    /// Takes leave of the other ranks, unless they have failed: then what is under way is broken off, since memory and
    /// connections that it uses go away next.
    fn drop(&mut self) {
        let Some(ties) = &self.ties else { return };
        let well = || self.check(OP).is_ok();
        // The watchdog ends this wait if the other ranks do not.
        let waited = || self.gpu.bind(OP).and_then(|()| self.gpu.synchronize(OP)).is_ok();
        if well() && waited() && well() {
            ties.control.leave(self.channels.each_ref().map(|channel| channel.board.progress().1));
        } else {
            self.channels.iter().for_each(|channel| channel.break_off());
        }
    }
}

/// Which ways there are between the ranks, as all of them know it.
struct Links {
    transport: Transport,
    nccl: Vec<bool>,
    /// Whether a rank can map the memory of another: one row for each rank.
    reaches: Vec<Vec<bool>>,
}

impl Links {
    fn find(gpu: &Gpu, caps: &Caps, control: &Control, transport: Transport, timeout: Duration) -> Result<Links> {
        gpu.bind(BOOTSTRAP)?;
        let rank = caps.rank;
        let everyone: Vec<usize> = (0..caps.ranks).collect();
        let device = driver::uuid(gpu.context().device)?;
        let (machine, nccl, expert_ranks) = (machine(), nccl::present(), caps.expert_ranks);
        let facts = Facts { machine, device, transport, expert_ranks, timeout, nccl };
        let all: Vec<Facts> = share(control, &everyone, &facts, timeout)?;
        let mut others = all.iter().enumerate().filter(|(other, _)| *other != rank);
        if let Some(what) = others.find_map(|(other, theirs)| facts.contradiction(rank, theirs, other)) {
            return Err(Error::Collective { rank, op: BOOTSTRAP, what });
        }
        let reach = |theirs: &Facts| -> Result<bool> {
            let near = cfg!(target_os = "linux") && theirs.machine == facts.machine;
            Ok(near && (theirs.device == device || driver::reaches(gpu.context(), &theirs.device)?))
        };
        let row = all.iter().map(reach).collect::<Result<Vec<_>>>()?;
        let reaches: Vec<Vec<bool>> = share(control, &everyone, &row, timeout)?;
        if let Some(other) = reaches.iter().position(|row| row.len() != caps.ranks) {
            let what = format!("rank {other} knows of {} ranks, expected {}", reaches[other].len(), caps.ranks);
            return Err(Error::Collective { rank, op: BOOTSTRAP, what });
        }
        Ok(Links { transport, nccl: all.iter().map(|facts| facts.nccl).collect(), reaches })
    }

    /// Connects the members of a group, all of which come to the same choice.
    fn path(
        &self,
        gpu: &Arc<Gpu>,
        control: &Control,
        members: &[usize],
        place: usize,
        timeout: Duration,
    ) -> Result<Path> {
        let failed = |what| Error::Collective { rank: members[place], op: BOOTSTRAP, what };
        let pairs = || members.iter().flat_map(|&a| members.iter().map(move |&b| (a, b)));
        let apart = pairs().find(|&(a, b)| !self.reaches[a][b]);
        #[cfg(target_os = "linux")]
        if self.transport != Transport::Nccl && apart.is_none() && members.len() <= Windows::MEMBERS {
            return Ok(Path::Peer(Windows::open(gpu, control, members, place, timeout)?));
        }
        if let (Transport::Peer, Some((a, b))) = (self.transport, apart) {
            return Err(failed(format!("rank {a} cannot map the memory of rank {b}; use NCCL")));
        }
        if let Some(&without) = members.iter().find(|&&rank| !self.nccl[rank]) {
            return Err(failed(format!("no NCCL (libnccl.so.2) on the machine of rank {without}")));
        }
        gpu.bind(BOOTSTRAP)?;
        let id = if place == 0 { nccl::new_id()? } else { Vec::new() };
        let ids = control.gather(BOOTSTRAP, members, id, timeout)?;
        Ok(Path::Nccl(Communicator::connect(&ids[0], members.len(), place)?))
    }
}

/// Tells every rank a value, and returns those of all.
fn share<T: Serialize + for<'a> Deserialize<'a>>(
    control: &Control,
    members: &[usize],
    value: &T,
    timeout: Duration,
) -> Result<Vec<T>> {
    let bytes = serde_json::to_vec(value).expect("plain data");
    let all = control.gather(BOOTSTRAP, members, bytes, timeout)?;
    let parse = |bytes: &Vec<u8>| serde_json::from_slice(bytes);
    all.iter().map(parse).collect::<std::result::Result<_, _>>().map_err(|error| Error::Collective {
        rank: control.rank(),
        op: BOOTSTRAP,
        what: format!("a rank brings what no rank brings: {error}"),
    })
}

/// What the processes of one machine that can open sockets to each other, and no others, have in common.
fn machine() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let network = std::fs::read_link("/proc/self/ns/net");
    match (boot, network) {
        (Ok(boot), Ok(network)) => format!("{} {}", boot.trim(), network.display()),
        // Unknown machines are not taken for one.
        _ => format!("process {}", std::process::id()),
    }
}

impl Channel {
    pub(crate) fn members(&self) -> usize {
        self.members.len()
    }

    /// A fault in words.
    fn describe(&self, fault: Fault) -> String {
        let Fault { code, place, found, expected } = fault;
        let (them, me) = (self.members.get(place).copied().unwrap_or(place), self.members[self.place]);
        match code {
            FAULT_ROWS => format!("rank {them} sends {found} rows to rank {me}, which expects {expected}"),
            FAULT_CAPACITY => format!("rank {them} has a capacity of {found} rows, but rank {me} one of {expected}"),
            FAULT_ROW_BYTES => format!("rank {them} has rows of {found} bytes, but rank {me} of {expected}"),
            FAULT_OVERFLOW => format!("rank {them} sends {found} rows to rank {me}, but a segment holds {expected}"),
            _ => format!("rank {them}: fault {code}"),
        }
    }
}

impl Watched for Channel {
    fn name(&self) -> String {
        format!("the group {:?} (ranks {:?})", self.group, self.members)
    }

    fn index(&self) -> usize {
        self.group as usize
    }

    fn members(&self) -> &[usize] {
        &self.members
    }

    fn progress(&self) -> (u32, u32) {
        self.board.progress()
    }

    fn fault(&self) -> Option<String> {
        let background = || match &self.path {
            Path::Nccl(communicator) => communicator.background_failure(),
            _ => None,
        };
        self.board.fault().map(|fault| self.describe(fault)).or_else(background)
    }

    fn break_off(&self) {
        self.board.stop();
        if let Path::Nccl(communicator) = &self.path {
            communicator.abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_do_not_belong_together_say_why() {
        let facts = |device: u8, transport, expert_ranks, seconds| {
            let (machine, device, timeout) = ("here".into(), [device; 16], Duration::from_secs(seconds));
            Facts { machine, device, transport, expert_ranks, timeout, nccl: true }
        };
        let mine = facts(0, Transport::Auto, 2, 60);
        let theirs = |theirs: Facts| mine.contradiction(0, &theirs, 3);
        assert_eq!(theirs(facts(1, Transport::Auto, 2, 60)), None);
        assert_eq!(theirs(Facts { machine: "there".into(), ..facts(0, Transport::Auto, 2, 60) }), None);
        for (other, why) in [
            (facts(1, Transport::Nccl, 2, 60), "rank 3 exchanges by Nccl, rank 0 by Auto"),
            (facts(1, Transport::Auto, 4, 60), "rank 3 shares experts among 4 ranks, rank 0 among 2"),
            (facts(1, Transport::Auto, 2, 9), "rank 3 waits for 9s, rank 0 for 60s"),
            (facts(0, Transport::Auto, 2, 60), "ranks 3 and 0 use the same device (is LOCAL_RANK right?)"),
        ] {
            assert_eq!(theirs(other).unwrap(), why);
        }
    }
}
