//! Block quantization: recorded vectors, every layout against loops over single blocks, and the cases.

mod cases;
mod layouts;
mod problem;
mod vectors;
