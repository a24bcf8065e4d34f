//! The ops: one file each beside the kernel of the same name, and the table of all kernels.

#[cfg(test)]
mod kernels_test;

#[cfg(test)]
pub(crate) use kernels_test::for_each_architecture;

/// Every kernel of the backend, with constants to compile it under.
#[cfg(test)]
pub(crate) static ALL: &[(&crate::kernel::Kernel, &[&[u32]])] = &[];
