//! Every kernel compiles, for every architecture, without a GPU.

use std::sync::atomic::{AtomicUsize, Ordering};

use dropless_tests::require::Need;

use super::ALL;
use crate::jit::Jit;
use crate::kernel::{Kernel, SM90, Variant};

/// Calls `test` for each architecture that kernels are written for, or says why it does not: the compiler's library is
/// missing, and `DROPLESS_REQUIRE` does not name nvrtc.
pub(crate) fn for_each_architecture(test: impl Fn(&'static str)) {
    if Need::Nvrtc.or_skip(Jit::with_cache("sm_90a", None)).is_some() {
        ["sm_90a", "sm_100a"].into_iter().for_each(test);
    }
}

/// The kernel with each tensor's first type, its last type, and with the optional tensors left out.
fn variants(kernel: &'static Kernel, constants: &[u32]) -> Vec<Variant> {
    let types = |choose: fn(&crate::kernel::Binding) -> Option<dropless_core::DType>| Variant {
        kernel,
        types: kernel.tensors.iter().map(choose).collect(),
        constants: constants.to_vec(),
    };
    let mut variants = vec![
        types(|tensor| tensor.types.first().copied()),
        types(|tensor| tensor.types.last().copied()),
        types(|tensor| tensor.types.first().copied().filter(|_| !tensor.optional)),
    ];
    variants.dedup();
    variants
}

/// Matrix products: their accumulators take most of a thread's registers, and their speed depends on it.
fn registers_matter(kernel: &Kernel, architecture: &str) -> bool {
    // Attention has only a portable path on later chips.
    kernel.name.ends_with("grouped_gemm") || (kernel.files.contains(&SM90) && architecture == "sm_90a")
}

#[test]
fn every_kernel_says_that_it_has_begun() {
    for (kernel, _) in ALL {
        let own = kernel.files.last().expect("a file of its own");
        assert!(own.contains("Given given) {\n    begin(given);\n"), "{}", kernel.name);
    }
}

#[test]
fn every_kernel_compiles_without_a_warning_and_products_without_a_spill() {
    for_each_architecture(|architecture| {
        let jit = Jit::with_cache(architecture, None).unwrap();
        let all: Vec<Variant> = ALL
            .iter()
            .flat_map(|(kernel, constants)| constants.iter().flat_map(|constants| variants(kernel, constants)))
            .collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(variant) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                let kernel = variant.kernel;
                assert_eq!(variant.constants.len(), kernel.constants.len(), "{}", kernel.name);
                let compiled = jit.compile(kernel.name, &variant.source()).unwrap();
                assert!(!compiled.log.contains("warning"), "{}: {}", kernel.name, compiled.log);
                let spills = !compiled.log.contains(", 0 bytes spill stores, 0 bytes spill loads");
                // Among others that tensor-core instructions wait for one another.
                let slow = spills || compiled.log.contains("Potential Performance Loss");
                assert!(!(slow && registers_matter(kernel, architecture)), "{}: {}", kernel.name, compiled.log);
            }
        };
        std::thread::scope(|scope| {
            let threads = std::thread::available_parallelism().map_or(1, usize::from);
            (0..threads).for_each(|_| drop(scope.spawn(work)));
        });
    });
}
