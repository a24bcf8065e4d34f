//! Dispatch of tokens to the ranks of their experts, and combine. NUMERICS.md, "Mixture-of-Experts layer".
//!
//! A token that chose several experts of one rank is sent to that rank once. On the way back each rank has already added
//! its experts' results along its part of the tree over all experts, so one f32 row for each token and rank returns. With
//! one rank and one chunk nothing is copied: the grouped products gather the rows themselves.

use crate::nn::Tokens;
use dropless_core::Result;
use dropless_core::ops::{AllToAll, Combine, Counts, Fill, GatherRows, Layout, Plan, Route, Window};
use dropless_core::{Backend, Group};
use dropless_core::{DType, Memory, Tensor};

/// How a chunk of tokens moves; made from the choice of experts, without reading anything on the host.
pub(super) struct Dispatch<'a> {
    backend: &'a dyn Backend,
    experts: usize,
    local: usize,
    window: Option<Window>,
}

/// Where every token of a chunk went and where its slots are.
#[derive(Debug)]
pub(super) struct Placement {
    sent: Option<Sent>,
    /// Global expert ids of the received rows, u32 `[chunks, capacity, k]`.
    ids: Tensor,
    /// Slots of each received row, as ids.
    row_slots: Tensor,
    /// Offsets of the local experts, u32 `[local + 1]`.
    pub(super) offsets: Tensor,
    /// Received row of each slot, u32 `[slots]`.
    pub(super) slot_rows: Tensor,
    /// Weight of each slot, f32 `[slots]`.
    pub(super) slot_weights: Tensor,
}

/// The sender's side.
#[derive(Debug)]
struct Sent {
    rows: Tensor,
    positions: Tensor,
    send_counts: Tensor,
    recv_counts: Tensor,
}

impl Placement {
    /// Whether rows travel (or are copied), rather than being gathered in place.
    pub(super) fn travels(&self) -> bool {
        self.sent.is_some()
    }
}

impl<'a> Dispatch<'a> {
    pub(super) fn new(backend: &'a dyn Backend, experts: usize, local: usize, window: Option<Window>) -> Self {
        Dispatch { backend, experts, local, window }
    }

    pub(super) fn backend(&self) -> &'a dyn Backend {
        self.backend
    }

    fn alloc(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.backend.alloc(dtype, shape, Memory::Device)
    }

    /// Ranks that share the experts.
    fn members(&self) -> usize {
        self.backend.caps().size(Group::Experts)
    }

    fn exchange(&self, send: &Tensor, recv: &Tensor, counts: Option<Counts<'_>>) -> Result<()> {
        AllToAll { group: Group::Experts, send, recv, counts }.run_in_order(self.backend)
    }

    /// Plans the chunk: ids u32 `[tokens, k]`, weights f32 `[tokens, k]`.
    pub(super) fn place(&self, tokens: &Tokens, ids: &Tensor, weights: &Tensor) -> Result<Placement> {
        let (t, k, ranks) = (tokens.count(), ids.cols(), self.members());
        if ranks == 1 && self.window.is_none() {
            let count = tokens.whole().slice(1, 2)?;
            return self.layout(None, ids.reshape(&[1, t, k])?, &weights.reshape(&[1, t, k])?, &count);
        }
        let capacity = self.window.map_or(tokens.capacity(), |w| tokens.capacity() / w.period * (w.to - w.from));
        let sent = Sent {
            rows: self.alloc(DType::U32, &[ranks, capacity])?,
            positions: self.alloc(DType::U32, &[t, ranks])?,
            send_counts: self.alloc(DType::U32, &[ranks, 1])?,
            recv_counts: self.alloc(DType::U32, &[ranks, 1])?,
        };
        Route::Plan(Plan {
            ids,
            experts: self.experts,
            window: self.window,
            rows: &sent.rows,
            counts: &sent.send_counts,
            positions: &sent.positions,
        })
        .run(self.backend)?;
        self.exchange(&sent.send_counts, &sent.recv_counts, None)?;
        let ids = self.send(&sent, ids)?.reshape(&[ranks, capacity, k])?;
        let weights = self.send(&sent, weights)?.reshape(&[ranks, capacity, k])?;
        let counts = sent.recv_counts.clone();
        self.layout(Some(sent), ids, &weights, &counts)
    }

    fn layout(&self, sent: Option<Sent>, ids: Tensor, weights: &Tensor, counts: &Tensor) -> Result<Placement> {
        let [chunks, capacity, k] = [0, 1, 2].map(|d| ids.shape()[d]);
        let slots = chunks * capacity * k.min(self.local);
        let placement = Placement {
            sent,
            row_slots: self.alloc(DType::U32, ids.shape())?,
            ids,
            offsets: self.alloc(DType::U32, &[self.local + 1])?,
            slot_rows: self.alloc(DType::U32, &[slots])?,
            slot_weights: self.alloc(DType::F32, &[slots])?,
        };
        Route::Layout(Layout {
            ids: &placement.ids,
            counts,
            weights,
            first_expert: self.first_expert(),
            offsets: &placement.offsets,
            slot_rows: &placement.slot_rows,
            slot_weights: &placement.slot_weights,
            row_slots: &placement.row_slots,
        })
        .run(self.backend)?;
        Ok(placement)
    }

    fn first_expert(&self) -> usize {
        self.backend.caps().place(Group::Experts) * self.local
    }

    /// Sends the planned rows of x `[tokens, cols]`; received rows as `[ranks * capacity, cols]`.
    fn send(&self, sent: &Sent, x: &Tensor) -> Result<Tensor> {
        let (ranks, capacity, cols) = (self.members(), sent.rows.cols(), x.cols());
        let shape = [ranks, capacity, cols];
        let (send, recv) = (self.alloc(x.dtype(), &shape)?, self.alloc(x.dtype(), &shape)?);
        GatherRows { x, index: &sent.rows, out: &send }.run(self.backend)?;
        let counts = Counts { send: &sent.send_counts, recv: &sent.recv_counts };
        self.exchange(&send, &recv, Some(counts))?;
        recv.reshape(&[ranks * capacity, cols])
    }

    /// Sends rows `[ranks * capacity, cols]` back to where they came from.
    fn send_back(&self, sent: &Sent, rows: &Tensor) -> Result<Tensor> {
        let (ranks, capacity, cols) = (self.members(), sent.rows.cols(), rows.cols());
        let back = self.alloc(rows.dtype(), &[ranks, capacity, cols])?;
        let counts = Counts { send: &sent.recv_counts, recv: &sent.send_counts };
        let send = rows.reshape(&[ranks, capacity, cols])?;
        self.exchange(&send, &back, Some(counts))?;
        back.reshape(&[ranks * capacity, cols])
    }

    /// The rows of x `[tokens, cols]` that this rank's experts need, as the slots' `slot_rows` index them.
    pub(super) fn rows(&self, placement: &Placement, x: &Tensor) -> Result<Tensor> {
        match &placement.sent {
            None => Ok(x.clone()),
            Some(sent) => self.send(sent, x),
        }
    }

    /// Adds the slots' results `y` `[slots, h]` of each token along the tree over all experts, then the terms of `add`,
    /// and rounds once into `out` `[tokens, h]`. Tokens of other chunks are left alone.
    pub(super) fn combine(
        &self,
        placement: &Placement,
        y: &Tensor,
        add: [Option<&Tensor>; 2],
        out: &Tensor,
    ) -> Result<()> {
        let rows = placement.ids.rows();
        let first = self.first_expert();
        let Some(sent) = &placement.sent else {
            return Combine {
                x: y,
                slots: &placement.row_slots,
                ids: Some(&placement.ids),
                leaves: (0, self.experts),
                window: None,
                add,
                out,
            }
            .run(self.backend);
        };
        let part = self.alloc(DType::F32, &[rows, y.cols()])?;
        Combine {
            x: y,
            slots: &placement.row_slots,
            ids: Some(&placement.ids),
            leaves: (first, first + self.local),
            window: None,
            add: [None, None],
            out: &part,
        }
        .run(self.backend)?;
        Combine {
            x: &self.send_back(sent, &part)?,
            slots: &sent.positions,
            ids: None,
            leaves: (0, self.members()),
            window: self.window,
            add,
            out,
        }
        .run(self.backend)
    }

    /// Writes the gradient of each slot's weight, f32 `[slots]`, to its choice in `out` `[tokens, k]`. `out` holds -0
    /// where nothing was written before.
    pub(super) fn return_weights(&self, placement: &Placement, d_weight: &Tensor, out: &Tensor) -> Result<()> {
        let column = d_weight.reshape(&[d_weight.len(), 1])?;
        let Some(sent) = &placement.sent else {
            return GatherRows { x: &column, index: &placement.row_slots, out: &out.reshape(&[out.len(), 1])? }
                .run(self.backend);
        };
        // A choice lives on exactly one rank; the others return -0, the neutral element of addition.
        let (rows, k) = (placement.ids.rows(), placement.ids.cols());
        let part = self.alloc(DType::F32, &[rows * k, 1])?;
        Fill { out: &part, value: -0.0 }.run(self.backend)?;
        GatherRows { x: &column, index: &placement.row_slots, out: &part }.run(self.backend)?;
        Combine {
            x: &self.send_back(sent, &part.reshape(&[rows, k])?)?,
            slots: &sent.positions,
            ids: None,
            leaves: (0, self.members()),
            window: self.window,
            add: [None, None],
            out,
        }
        .run(self.backend)
    }
}
