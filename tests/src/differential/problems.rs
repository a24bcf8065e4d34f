//! The problems of each op.

mod attention;
mod group_quantize;
mod grouped_gemm;
mod map;
mod movement;
mod route;

use super::Problem;

/// Every problem.
pub fn all() -> Vec<Problem> {
    let of_ops: [&[Problem]; 6] = [
        &grouped_gemm::PROBLEMS,
        &group_quantize::PROBLEMS,
        &route::PROBLEMS,
        &attention::PROBLEMS,
        &map::PROBLEMS,
        &movement::PROBLEMS,
    ];
    of_ops.concat()
}
