//! Sums of rows along the binary tree of NUMERICS.md, "Sums": first planned from the leaves that are there, then run over
//! whole rows. `numerics::reduce::tree` is the same sum of one element.

use crate::host::memory::Floats;

/// One step on a stack of rows.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Pushes the row that starts at this element.
    Push(usize),
    /// Adds the row that starts at this element to the top.
    Add(usize),
    /// Pops the top and adds it to the next.
    Merge,
}

/// The additions of one tree, in postfix order.
#[derive(Debug, Default)]
pub(super) struct Tree {
    leaves: Vec<(usize, usize)>,
    steps: Vec<Step>,
}

impl Tree {
    /// Plans the tree over `lo..hi` with `leaves`: the id of each, and the first element of its row. Rows of the same leaf
    /// are added in the order they come in.
    pub(super) fn plan(&mut self, lo: usize, hi: usize, leaves: impl Iterator<Item = (usize, usize)>) {
        self.leaves.clear();
        self.leaves.extend(leaves);
        self.leaves.sort_by_key(|leaf| leaf.0);
        self.steps.clear();
        plan(lo, hi, &self.leaves, &mut self.steps);
    }
}

/// Appends the steps that push the sum of `leaves`, which lie in `lo..hi`; none for no leaf.
fn plan(lo: usize, hi: usize, leaves: &[(usize, usize)], steps: &mut Vec<Step>) {
    match leaves {
        [] => {}
        [(_, row)] => steps.push(Step::Push(*row)),
        [(_, row), again @ ..] if hi - lo == 1 => {
            steps.push(Step::Push(*row));
            steps.extend(again.iter().map(|(_, row)| Step::Add(*row)));
        }
        _ => {
            let mid = lo + (hi - lo) / 2;
            let (left, right) = leaves.split_at(leaves.partition_point(|leaf| leaf.0 < mid));
            plan(lo, mid, left, steps);
            match right {
                [(_, row)] if !left.is_empty() => steps.push(Step::Add(*row)),
                _ => {
                    plan(mid, hi, right, steps);
                    if !left.is_empty() && !right.is_empty() {
                        steps.push(Step::Merge);
                    }
                }
            }
        }
    }
}

/// Runs the plan over `len` elements from `from` on of every row; +0 for a tree without leaves. `stack` is scratch.
#[inline(always)]
pub(super) fn sum_along<'a>(
    tree: &Tree,
    x: Floats<'_>,
    from: usize,
    len: usize,
    stack: &'a mut Vec<f32>,
) -> &'a mut [f32] {
    let mut top = 0;
    for step in &tree.steps {
        match *step {
            Step::Push(row) => {
                if stack.len() < (top + 1) * len {
                    stack.resize((top + 1) * len, 0.0);
                }
                x.load(row + from, &mut stack[top * len..(top + 1) * len]);
                top += 1;
            }
            Step::Add(row) => x.add_to(row + from, &mut stack[(top - 1) * len..top * len]),
            Step::Merge => {
                top -= 1;
                let (lower, upper) = stack.split_at_mut(top * len);
                Floats::F32(&upper[..len]).add_to(0, &mut lower[(top - 1) * len..]);
            }
        }
    }
    if top == 0 {
        stack.clear();
        stack.resize(len, 0.0);
    }
    &mut stack[..len]
}
