//! Backends that wrap other backends: to count, to compare, or to fill in missing ops. They nest to any depth.
//!
//! Such a backend does one thing before or after an op and passes it on. Where it keeps something of its own with each
//! tensor, its tensors' storage is a type that holds that and the tensors of the backends inside; views of the outer
//! tensor stand for the same views of the inner ones ([`Tensor::view_of`](crate::Tensor::view_of)), over which
//! [`Checked::over`](crate::Checked::over) puts an op. Nothing about it shows to the backends inside, so each of them
//! may be around others itself.
//!
//! A wrapping backend treats every op the same way: it implements the methods for ops by [`each_op!`](crate::each_op)
//! with one generic function. [`crate::lockstep`] and [`crate::fallback`] are examples.

/// Implements the named methods of [`Backend`](crate::Backend) for ops by calling a function of the type,
/// `fn run<'a, T: Op<'a>>(&self, op: &Checked<T>) -> Result<()>`.
///
/// ```text
/// impl Backend for Around {
///     dropless_core::each_op!(run: grouped_gemm, group_quantize, all_to_all, offload, route, attention, map);
///     ...
/// }
/// ```
#[macro_export]
macro_rules! each_op {
    ($run:ident: $($method:ident),+ $(,)?) => { $($crate::each_op!(@$method $run);)+ };
    (@grouped_gemm $run:ident) => { $crate::each_op!(@method grouped_gemm, GroupedGemm, $run); };
    (@group_quantize $run:ident) => { $crate::each_op!(@method group_quantize, GroupQuantize, $run); };
    (@all_to_all $run:ident) => { $crate::each_op!(@method all_to_all, AllToAll, $run); };
    (@offload $run:ident) => { $crate::each_op!(@method offload, Offload, $run); };
    (@route $run:ident) => { $crate::each_op!(@method route, Route, $run); };
    (@attention $run:ident) => { $crate::each_op!(@method attention, Attention, $run); };
    (@map $run:ident) => { $crate::each_op!(@method map, Map, $run); };
    (@method $method:ident, $op:ident, $run:ident) => {
        fn $method(&self, op: &$crate::Checked<$crate::ops::$op<'_>>) -> $crate::Result<()> {
            self.$run(op)
        }
    };
}

use crate::backend::Caps;
use crate::error::{Result, ensure};

/// Fails unless two backends can be the same rank: in the same place among the ranks, with the same arithmetic.
pub(crate) fn same_rank(op: &'static str, field: &'static str, one: &Caps, other: &Caps) -> Result<()> {
    let rank = |caps: &Caps| (caps.numerics, caps.rank, caps.ranks, caps.expert_ranks);
    let describe = |caps: &Caps| {
        let (numerics, rank, ranks, expert_ranks) = rank(caps);
        format!("{numerics:?} on rank {rank} of {ranks} in groups of {expert_ranks}")
    };
    ensure(rank(one) == rank(other), op, field, || describe(one), || describe(other))
}
