//! The row-wise ops, family by family: the problems of each op, and what holds of it on the host, against independent f64
//! arithmetic with an error bound for each element, and bit for bit across thread counts and vector widths. NUMERICS.md,
//! "Row-wise ops".

mod elementwise;
#[cfg(test)]
mod empty;
#[cfg(test)]
mod harness;
mod loss;
mod norm;
mod optimizer;
mod reduce;
mod rotary;
mod rows;
mod swiglu;

use crate::differential::Problem;

/// Those of every family.
pub(crate) fn problems() -> Vec<Problem> {
    let families = [
        elementwise::PROBLEMS,
        loss::PROBLEMS,
        norm::PROBLEMS,
        optimizer::PROBLEMS,
        reduce::PROBLEMS,
        rotary::PROBLEMS,
        rows::PROBLEMS,
        swiglu::PROBLEMS,
    ];
    families.concat()
}
