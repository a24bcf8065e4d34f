//! The row-wise ops on the host: against independent f64 arithmetic with an error bound for each element, and bit for
//! bit across thread counts and vector widths. NUMERICS.md, "Row-wise ops".

mod elementwise;
mod harness;
mod loss;
mod norm;
mod swiglu;
