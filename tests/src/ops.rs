//! A place for each op: its problems, given to every backend by [`crate::differential`], and the tests of what must hold of
//! it.

pub(crate) mod all_to_all;
pub(crate) mod attention;
pub(crate) mod group_quantize;
pub(crate) mod grouped_gemm;
pub(crate) mod map;
pub(crate) mod offload;
pub(crate) mod route;

use crate::differential::Problem;

/// Every problem.
pub fn problems() -> Vec<Problem> {
    let of_ops: [&[Problem]; 7] = [
        &grouped_gemm::PROBLEMS,
        &group_quantize::PROBLEMS,
        &route::PROBLEMS,
        &attention::PROBLEMS,
        &map::problems(),
        &all_to_all::PROBLEMS,
        &offload::PROBLEMS,
    ];
    of_ops.concat()
}
