//! See `dropless_core::ops::AllToAll`. What the host does not know, how many rows count, decides on the device: through
//! mapped memory exactly those travel; through NCCL whole chunks do, and those rows are then copied to their place.

use std::sync::Arc;

use dropless_core::ops::AllToAll;
use dropless_core::{DType, Error, Queue, Result, Tensor};

use crate::BACKEND;
#[cfg(target_os = "linux")]
use crate::comm::Windows;
use crate::comm::{Channel, Comm, Communicator, HEADER, NAMES, Path, Transfer, VALUES};
use crate::device::{Gpu, word};
use crate::kernel::{Binding, Kernel, Launch, PRELUDE, U32, params};

const OP: &str = "all_to_all";
const ANY: &[DType] = &[DType::F32, DType::Bf16, DType::E4m3, DType::Ue8m0, DType::E2m1x2, DType::U32];
const SHARED: &str = include_str!("../../../kernels/all_to_all.cuh");
const PEER: &str = include_str!("../../../kernels/all_to_all_peer.cuh");

params!(
    /// An exchange through NCCL. A row has `row_bytes` bytes.
    Whole { members, place, capacity, row_bytes, gathers }
);

params!(
    /// A round of an exchange through mapped memory.
    Round { members, place, capacity, row_bytes, gathers, slots_at, slot_bytes, round, last }
);

/// Tells the receivers what they get.
pub(crate) static ANNOUNCE: Kernel = Kernel {
    name: "all_to_all_announce",
    files: &[PRELUDE, SHARED, include_str!("../../../kernels/all_to_all_announce.cu")],
    params: Whole::FIELDS,
    tensors: &[
        Binding::read("counts", U32).optional(),
        Binding::write("headers", U32),
        Binding::write("received", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
    maps: 0,
    constants: NAMES,
};

/// Copies what NCCL brought.
pub(crate) static UNPACK: Kernel = Kernel {
    name: "all_to_all_unpack",
    files: &[PRELUDE, SHARED, include_str!("../../../kernels/all_to_all_unpack.cu")],
    params: Whole::FIELDS,
    tensors: &[
        Binding::read("send", ANY),
        Binding::read("staging", ANY).optional(),
        Binding::write("recv", ANY),
        Binding::read("counts", U32).optional(),
        Binding::read("headers", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
    maps: 0,
    constants: NAMES,
};

/// Lays rows out for the other members.
pub(crate) static POST: Kernel = Kernel {
    name: "all_to_all_post",
    files: &[PRELUDE, SHARED, PEER, include_str!("../../../kernels/all_to_all_post.cu")],
    params: Round::FIELDS,
    tensors: &[
        Binding::read("send", ANY),
        Binding::read("counts", U32).optional(),
        Binding::read("windows", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
    maps: 0,
    constants: NAMES,
};

/// Takes the other members' rows.
pub(crate) static PULL: Kernel = Kernel {
    name: "all_to_all_pull",
    files: &[PRELUDE, SHARED, PEER, include_str!("../../../kernels/all_to_all_pull.cu")],
    params: Round::FIELDS,
    tensors: &[
        Binding::read("send", ANY),
        Binding::write("recv", ANY),
        Binding::read("counts", U32).optional(),
        Binding::read("windows", U32),
        Binding::in_place("state", U32),
        Binding::in_place("board", U32),
    ],
    maps: 0,
    constants: NAMES,
};

const THREADS: u32 = 512;
/// What a block copies at least, where there is that much.
const BLOCK_BYTES: u64 = 64 << 10;
/// Blocks that draw on NVLink: each has 32 KiB on their way, and these saturate it. They take multiprocessors from what
/// runs beside.
const FAR_BLOCKS: u64 = 64;

/// Blocks for copies of `bytes` from or to each member, a multiple of the members.
fn blocks(bytes: u64, members: usize, most: u64) -> u64 {
    let members = members as u64;
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
    let params = Whole {
        members: word(members),
        place: word(place),
        capacity: word(op.recv.shape()[1]),
        row_bytes: row_bytes(op)?,
        gathers: op.gathers().into(),
    };
    let [headers, received] =
        [gpu.alloc(DType::U32, &[members, HEADER as usize])?, gpu.alloc(DType::U32, &[members, HEADER as usize])?];
    gpu.launch_on(
        Queue::Comm,
        Launch {
            kernel: &ANNOUNCE,
            tensors: &[
                op.counts.map(|counts| counts.send),
                Some(&headers),
                Some(&received),
                Some(&channel.state),
                Some(channel.board.tensor()),
            ],
            constants: VALUES,
            params: params.words(),
            maps: &[],
            blocks: 1,
            threads: 128,
            shared: 0,
        },
    )?;
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
        nccl.run(OP, gpu, &transfers)?;
    }
    let chunk = (op.recv.bytes() / members) as u64;
    gpu.launch_on(
        Queue::Comm,
        Launch {
            kernel: &UNPACK,
            tensors: &[
                Some(op.send),
                staging.as_ref(),
                Some(op.recv),
                op.counts.map(|counts| counts.recv),
                Some(&received),
                Some(&channel.state),
                Some(channel.board.tensor()),
            ],
            constants: VALUES,
            params: params.words(),
            maps: &[],
            blocks: blocks(chunk, members, gpu.multiprocessors.into()),
            threads: THREADS,
            shared: 0,
        },
    )
}

#[cfg(target_os = "linux")]
fn through_memory(gpu: &Arc<Gpu>, channel: &Channel, windows: &Windows, op: &AllToAll<'_>) -> Result<()> {
    let members = channel.members();
    let (slots_at, slot_bytes) = Windows::slots(if op.gathers() { 1 } else { members });
    let chunk = (op.recv.bytes() / members) as u64;
    let rounds = u32::try_from(chunk.div_ceil(slot_bytes.into())).expect("a chunk fits the memory");
    let blocks = blocks(chunk.min(slot_bytes.into()), members, FAR_BLOCKS);
    let (send, recv, table) = (Some(op.send), Some(op.recv), Some(windows.table()));
    let (send_counts, recv_counts) = (op.counts.map(|counts| counts.send), op.counts.map(|counts| counts.recv));
    let (state, board) = (Some(&channel.state), Some(channel.board.tensor()));
    for round in 0..rounds {
        let params = Round {
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
            let (constants, params, threads) = (VALUES, params.words(), THREADS);
            gpu.launch_on(
                Queue::Comm,
                Launch { kernel, tensors, constants, params, maps: &[], blocks, threads, shared: 0 },
            )
        };
        launch(&POST, &[send, send_counts, table, state, board])?;
        launch(&PULL, &[send, recv, recv_counts, table, state, board])?;
    }
    Ok(())
}
