//! Every kernel compiles, for every architecture, without a GPU.

use std::sync::atomic::{AtomicUsize, Ordering};

use dropless_tests::require::Need;

use super::all;
use crate::jit::Jit;
use crate::kernel::{SM90, source};
use dropless_core::DType;
use dropless_core::launch::{Binding, Program, Variant};

/// Calls `test` for each architecture that kernels are written for, or says why it does not: the compiler's library is
/// missing, and `DROPLESS_REQUIRE` does not name nvrtc.
pub(crate) fn for_each_architecture(test: impl Fn(&'static str)) {
    if Need::Nvrtc.or_skip(Jit::with_cache("sm_90a", None)).is_some() {
        ["sm_90a", "sm_100a"].into_iter().for_each(test);
    }
}

/// The kernel with each tensor's first type, its last type, and with the optional tensors left out.
fn variants(program: &'static Program, constants: &[u32]) -> Vec<Variant> {
    let types =
        |choose: fn(&Binding) -> Option<DType>| Variant::new(program, program.tensors.iter().map(choose), constants);
    let mut variants = vec![
        types(|tensor| tensor.types.first().copied()),
        types(|tensor| tensor.types.last().copied()),
        types(|tensor| tensor.types.first().copied().filter(|_| !tensor.optional)),
    ];
    variants.dedup();
    variants
}

/// Matrix products: their accumulators take most of a thread's registers, and their speed depends on it.
fn registers_matter(kernel: &Program, architecture: &str) -> bool {
    // Attention has only a portable path on later chips.
    kernel.name.ends_with("grouped_gemm") || (kernel.files.contains(&SM90) && architecture == "sm_90a")
}

/// A file that no kernel is compiled from, or a kernel that does not end with the file of its name.
#[test]
fn every_file_belongs_to_a_kernel_that_is_compiled_here() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels");
    let read = |path: &std::path::Path| std::fs::read_to_string(path).unwrap();
    for file in std::fs::read_dir(folder).unwrap() {
        let path = file.unwrap().path();
        let used = all().iter().any(|(kernel, _)| kernel.files.contains(&&*read(&path)));
        assert!(used, "no kernel is compiled from {}", path.display());
    }
    for (kernel, _) in all() {
        let own = std::path::Path::new(folder).join(kernel.name).with_extension("cu");
        assert_eq!(kernel.files.last(), Some(&&*read(&own)), "{}: its own file comes last", kernel.name);
    }
}

#[test]
fn every_kernel_says_that_it_has_begun() {
    for (kernel, _) in all() {
        let own = kernel.files.last().expect("a file of its own");
        assert!(own.contains("Given given) {\n    begin(given);\n"), "{}", kernel.name);
    }
}

#[test]
fn every_kernel_compiles_without_a_warning_and_products_without_a_spill() {
    for_each_architecture(|architecture| {
        let jit = Jit::with_cache(architecture, None).unwrap();
        let all: Vec<Variant> = all()
            .iter()
            .flat_map(|(kernel, constants)| constants.iter().flat_map(|constants| variants(kernel, constants)))
            .collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(variant) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
                let kernel = variant.program;
                let compiled = jit.compile(kernel.name, &source(variant)).unwrap();
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
