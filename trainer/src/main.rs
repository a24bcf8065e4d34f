//! The program `dropless`.
fn main() {}
