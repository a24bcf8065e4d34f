//! The row-wise ops on the host: against independent f64 arithmetic with an error bound for each element, and bit for
//! bit across thread counts and vector widths. NUMERICS.md, "Row-wise ops".

#![expect(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "tests may panic, and their numbers are small"
)]

mod elementwise;
mod empty;
mod harness;
mod loss;
mod norm;
mod optimizer;
mod reduce;
mod rotary;
mod rows;
mod swiglu;
