//! See `dropless_core::ops::AllToAll`. What the host does not know, how many rows count, decides on the device: through
//! mapped memory exactly those travel; through NCCL whole segments do, and those rows are then copied to their place.

use std::sync::Arc;

use dropless_core::ops::AllToAll;
use dropless_core::{DType, Error, Queue, Result, Tensor};

use crate::BACKEND;
#[cfg(target_os = "linux")]
use crate::comm::Windows;
use crate::comm::{Channel, Comm, Communicator, HEADER, NAMES, Path, Transfer, VALUES};
use crate::device::Gpu;
use crate::kernel::{Binding, Kernel, Launch, PRELUDE, U32, scalars, word};

const OP: &str = "all_to_all";
const ANY: &[DType] = &[DType::F32, DType::Bf16, DType::E4m3, DType::Ue8m0, DType::E2m1x2, DType::U32];
const SHARED: &str = include_str!("../../../kernels/all_to_all.cuh");
const PEER: &str = include_str!("../../../kernels/all_to_all_peer.cuh");

scalars!(
    /// An exchange through NCCL. A row has `row_bytes` bytes.
    pub(crate) struct Whole { members, place, capacity, row_bytes, gathers }
);

scalars!(
    /// A round of an exchange through mapped memory.
    pub(crate) struct Round { members, place, capacity, row_bytes, gathers, slots_at, slot_bytes, round, last }
);

/// Tells the receivers what they get.
pub(crate) static ANNOUNCE: Kernel<Whole> = Kernel::new(
    "all_to_all_announce",
    &[PRELUDE, SHARED, include_str!("../../../kernels/all_to_all_announce.cu")],
    &[
        Binding::read("counts", U32).optional(),
        Binding::write("headers", U32),
        Binding::write("received", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
)
.constants(NAMES);

/// Copies what NCCL brought.
pub(crate) static UNPACK: Kernel<Whole> = Kernel::new(
    "all_to_all_unpack",
    &[PRELUDE, SHARED, include_str!("../../../kernels/all_to_all_unpack.cu")],
    &[
        Binding::read("send", ANY),
        Binding::read("staging", ANY).optional(),
        Binding::write("recv", ANY),
        Binding::read("counts", U32).optional(),
        Binding::read("headers", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
)
.constants(NAMES);

/// Lays rows out for the other members.
pub(crate) static POST: Kernel<Round> = Kernel::new(
    "all_to_all_post",
    &[PRELUDE, SHARED, PEER, include_str!("../../../kernels/all_to_all_post.cu")],
    &[
        Binding::read("send", ANY),
        Binding::read("counts", U32).optional(),
        Binding::read("windows", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
)
.constants(NAMES);

/// Takes the other members' rows.
pub(crate) static PULL: Kernel<Round> = Kernel::new(
    "all_to_all_pull",
    &[PRELUDE, SHARED, PEER, include_str!("../../../kernels/all_to_all_pull.cu")],
    &[
        Binding::read("send", ANY),
        Binding::write("recv", ANY),
        Binding::read("counts", U32).optional(),
        Binding::read("windows", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
)
.constants(NAMES);

const THREADS: u32 = 512;
/// What a block copies at least, where there is that much.
const BLOCK_BYTES: usize = 64 << 10;
/// Blocks that draw on NVLink: each has 32 KiB on their way, and these saturate it. They take multiprocessors from what
/// runs beside.
const FAR_BLOCKS: usize = 64;

/// Blocks for copies of `bytes` from or to each member, a multiple of the members.
fn blocks(bytes: usize, members: usize, most: usize) -> usize {
    bytes.div_ceil(BLOCK_BYTES).clamp(1, (most / members).max(1)) * members
}

/// The bytes of a row.
fn row_bytes(op: &AllToAll<'_>) -> Result<u32> {
    let bytes = op.recv.shape()[2..].iter().product::<usize>() * op.recv.dtype().size();
    let what = || format!("rows of {bytes} bytes; the kernels take less than 4 GiB");
    u32::try_from(bytes).map_err(|_| Error::Device { backend: BACKEND, op: OP, what: what() })
}

/// Queues an exchange.
pub(crate) fn run(gpu: &Arc<Gpu>, comm: &Comm, op: &AllToAll<'_>) -> Result<()> {
    comm.check(OP)?;
    if op.recv.bytes() == 0 {
        return Ok(());
    }
    let channel = comm.channel(op.group);
    // A recorded exchange goes through the connections and the mapped memory of its group whenever it runs.
    gpu.keep_recorded(|_| Some(channel.clone()));
    match &channel.path {
        Path::Alone if op.counts.is_none() => gpu.copy(OP, op.send, op.recv, Queue::Comm),
        Path::Alone => through_nccl(gpu, channel, None, op),
        Path::Nccl(communicator) => through_nccl(gpu, channel, Some(communicator), op),
        #[cfg(target_os = "linux")]
        Path::Peer(windows) => through_memory(gpu, channel, windows, op),
    }
}

fn through_nccl(gpu: &Arc<Gpu>, channel: &Channel, nccl: Option<&Communicator>, op: &AllToAll<'_>) -> Result<()> {
    let (members, place) = (channel.members(), channel.place);
    let scalars = Whole {
        members: word(members),
        place: word(place),
        capacity: word(op.recv.shape()[1]),
        row_bytes: row_bytes(op)?,
        gathers: op.gathers().into(),
    };
    let [headers, received] =
        [gpu.alloc(DType::U32, &[members, HEADER as usize])?, gpu.alloc(DType::U32, &[members, HEADER as usize])?];
    let (state, board) = (Some(&channel.state), Some(channel.board.tensor()));
    let tensors = [op.counts.map(|counts| counts.send), Some(&headers), Some(&received), state, board];
    let launch = Launch { constants: VALUES, ..Launch::new(&ANNOUNCE, scalars, &tensors, 1, 128) };
    gpu.launch_on(Queue::Comm, launch)?;
    let staging = match (nccl, op.counts) {
        (Some(_), Some(_)) => Some(gpu.alloc(op.recv.dtype(), op.recv.shape())?),
        _ => None,
    };
    if let Some(nccl) = nccl {
        let arriving = staging.as_ref().unwrap_or(op.recv);
        let mut transfers = Vec::new();
        for member in (0..members).filter(|&member| member != place) {
            transfers.push(Transfer::Send(member, headers.index(member)?));
            transfers.push(Transfer::Receive(member, received.index(member)?));
            if !op.gathers() {
                transfers.push(Transfer::Send(member, op.send.index(member)?));
                transfers.push(Transfer::Receive(member, arriving.index(member)?));
            }
        }
        if op.gathers() {
            transfers.push(Transfer::Gather(op.send.clone(), arriving.clone()));
        }
        gpu.timed("nccl", Queue::Comm, || nccl.run(OP, gpu, &transfers))?;
    }
    let recv_counts = op.counts.map(|counts| counts.recv);
    let tensors = [Some(op.send), staging.as_ref(), Some(op.recv), recv_counts, Some(&received), state, board];
    let blocks = blocks(op.recv.bytes() / members, members, gpu.multiprocessors as usize);
    let launch = Launch { constants: VALUES, ..Launch::new(&UNPACK, scalars, &tensors, blocks, THREADS) };
    gpu.launch_on(Queue::Comm, launch)
}

#[cfg(target_os = "linux")]
fn through_memory(gpu: &Arc<Gpu>, channel: &Channel, windows: &Windows, op: &AllToAll<'_>) -> Result<()> {
    let members = channel.members();
    let (slots_at, slot_bytes) = Windows::slots(if op.gathers() { 1 } else { members });
    let segment = op.recv.bytes() / members;
    let rounds = u32::try_from(segment.div_ceil(slot_bytes as usize)).expect("a segment fits the memory");
    let blocks = blocks(segment.min(slot_bytes as usize), members, FAR_BLOCKS);
    let (send, recv, table) = (Some(op.send), Some(op.recv), Some(windows.table()));
    let (send_counts, recv_counts) = (op.counts.map(|counts| counts.send), op.counts.map(|counts| counts.recv));
    let (state, board) = (Some(&channel.state), Some(channel.board.tensor()));
    for round in 0..rounds {
        let scalars = Round {
            members: word(members),
            place: word(channel.place),
            capacity: word(op.recv.shape()[1]),
            row_bytes: row_bytes(op)?,
            gathers: op.gathers().into(),
            slots_at,
            slot_bytes,
            round,
            last: (round + 1 == rounds).into(),
        };
        let launch = |kernel, tensors: &[Option<&Tensor>]| {
            let launch = Launch { constants: VALUES, ..Launch::new(kernel, scalars, tensors, blocks, THREADS) };
            gpu.launch_on(Queue::Comm, launch)
        };
        launch(&POST, &[send, send_counts, table, state, board])?;
        launch(&PULL, &[send, recv, recv_counts, table, state, board])?;
    }
    Ok(())
}
