//! The counting sort of received rows by expert. NUMERICS.md, "Routing".

use super::{Arg, DType, NONE, OP, Values, distinct, index, indexable, number, op};
use crate::backend::Backend;
use crate::error::Result;
use crate::tensor::Tensor;

/// The received rows sorted by local expert; within an expert in the order of the rows (that is, of global tokens).
///
/// # Shape
/// ids: u32 `[segments, capacity, k]`; counts: u32 `[segments]` (rows that count in each segment); weights: f32 as ids;
/// offsets: u32 `[local experts + 1]`; slot_rows: u32 `[slots]`, the row `segment * capacity + i` of each slot, then
/// [`NONE`]; slot_weights: f32 `[slots]`; row_slots: u32 as ids, the slot of each (row, choice), or [`NONE`] for a choice
/// that lives elsewhere and for rows past the count.
///
/// # Numerics
/// Integers, and copies of weights. `slots` is at least `segments * capacity * min(k, local experts)`: no choice is without
/// one, unless a row names an expert twice. Then the offsets end at `slots`, and what is beyond has no slot. A count
/// beyond the capacity stands for the capacity.
#[derive(Clone, Copy, Debug)]
pub struct Layout<'a> {
    /// The chosen experts of each row, as global ids.
    pub ids: &'a Tensor,
    /// Rows of each segment.
    pub counts: &'a Tensor,
    /// Their weights.
    pub weights: &'a Tensor,
    /// The first expert of this rank.
    pub first_expert: usize,
    /// Written.
    pub offsets: &'a Tensor,
    /// Written.
    pub slot_rows: &'a Tensor,
    /// Written up to `offsets[local experts]`.
    pub slot_weights: &'a Tensor,
    /// Written.
    pub row_slots: &'a Tensor,
}

op!(Layout: read(ids, counts, weights), write(offsets, slot_rows, slot_weights, row_slots), value(first_expert));

impl<'a> Layout<'a> {
    pub(super) fn check(&self) -> Result<()> {
        let shape = self.ids.shape();
        number(OP, "ids", shape.len() == 3, "[segments, capacity, k]", format_args!("{:?}", self.ids))?;
        let [segments, capacity, k] = [shape[0], shape[1], shape[2]];
        Arg::new(OP, "ids", self.ids).dtype(&[DType::U32])?;
        number(OP, "ids", k > 0, "at least one choice for each row", k)?;
        indexable("ids", self.ids)?;
        Arg::new(OP, "counts", self.counts).dtype(&[DType::U32])?.len(segments, "one for each segment")?;
        Arg::new(OP, "weights", self.weights).dtype(&[DType::F32])?.shape(shape, "as ids")?;
        let local = self.offsets.len().saturating_sub(1);
        number(OP, "offsets", local > 0, "at least 2 entries (local experts + 1)", self.offsets.len())?;
        Arg::new(OP, "offsets", self.offsets).dtype(&[DType::U32])?;
        let worst = segments * capacity * k.min(local);
        number(
            OP,
            "slot_rows",
            self.slot_rows.len() >= worst,
            &format!("at least {worst} slots (every choice of every row)"),
            self.slot_rows.len(),
        )?;
        Arg::new(OP, "slot_rows", self.slot_rows).dtype(&[DType::U32])?;
        Arg::new(OP, "slot_weights", self.slot_weights)
            .dtype(&[DType::F32])?
            .len(self.slot_rows.len(), "one for each slot")?;
        Arg::new(OP, "row_slots", self.row_slots).dtype(&[DType::U32])?.shape(shape, "as ids")?;
        let outputs = [self.offsets, self.slot_rows, self.slot_weights, self.row_slots];
        for (i, out) in outputs.iter().enumerate() {
            let mut others = outputs[i + 1..].to_vec();
            others.extend([self.ids, self.counts, self.weights]);
            distinct(OP, "output", out, &others)?;
        }
        Ok(())
    }

    /// The choices that live on this rank as (index into ids, local expert), in the order of the rows.
    fn local_choices<'b>(
        &self,
        ids: &'b [u32],
        counts: &'b [u32],
    ) -> impl Iterator<Item = (usize, usize)> + use<'a, 'b> {
        let (first, local) = (self.first_expert, self.offsets.len() - 1);
        let [_, capacity, k] = [0, 1, 2].map(|d| self.ids.shape()[d]);
        counts.iter().enumerate().flat_map(move |(segment, &count)| {
            let start = segment * capacity * k;
            (start..start + capacity.min(count as usize) * k).filter_map(move |choice| {
                let expert = (ids[choice] as usize).wrapping_sub(first);
                (expert < local).then_some((choice, expert))
            })
        })
    }

    /// The specification.
    pub(in crate::ops) fn spec(&self, memory: &dyn Backend) -> Result<()> {
        let (ids, counts) = (Values::read(memory, self.ids)?, Values::read(memory, self.counts)?);
        let (weights, mut slot_weights) =
            (Values::read(memory, self.weights)?, Values::read(memory, self.slot_weights)?);
        let [mut offsets, mut slot_rows, mut row_slots] = [
            Values::read(memory, self.offsets)?,
            Values::read(memory, self.slot_rows)?,
            Values::read(memory, self.row_slots)?,
        ];
        let (mut all_offsets, mut all_rows, mut all_slots) = (offsets.words(), slot_rows.words(), row_slots.words());
        self.sort(&ids.words(), &counts.words(), &mut all_offsets, &mut all_rows, &mut all_slots);
        for (choice, &slot) in all_slots.iter().enumerate().filter(|&(_, &slot)| slot != NONE) {
            slot_weights.set_float(slot as usize, weights.float(choice));
        }
        offsets.set_words(&all_offsets);
        slot_rows.set_words(&all_rows);
        row_slots.set_words(&all_slots);
        [offsets, slot_rows, slot_weights, row_slots].iter().try_for_each(|values| values.write(memory))
    }

    /// Its work, in memory, but for the weights.
    pub(crate) fn sort(
        &self,
        ids: &[u32],
        counts: &[u32],
        offsets: &mut [u32],
        slot_rows: &mut [u32],
        row_slots: &mut [u32],
    ) {
        let k = self.ids.cols();
        offsets.fill(0);
        for (_, expert) in self.local_choices(ids, counts) {
            offsets[expert + 1] += 1;
        }
        for expert in 1..offsets.len() {
            offsets[expert] += offsets[expert - 1];
        }
        let slots = slot_rows.len();
        offsets.iter_mut().filter(|offset| **offset as usize > slots).for_each(|offset| *offset = index(slots));
        slot_rows.fill(NONE);
        row_slots.fill(NONE);
        let mut next = offsets.to_vec();
        for (choice, expert) in self.local_choices(ids, counts) {
            let slot = next[expert];
            next[expert] += 1;
            if let Some(row) = slot_rows.get_mut(slot as usize) {
                *row = index(choice / k);
                row_slots[choice] = slot;
            }
        }
    }
}
