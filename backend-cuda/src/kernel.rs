//! From a kernel's file to a launch: the declarations that cross from Rust to CUDA are written here, so that a struct or a
//! tensor is declared once.
//!
//! A kernel `name` lies in `kernels/name.cu` and has one parameter, `Given`: its tensor maps, one pointer for each tensor
//! (to the first element of the view, null if it is absent), its `Params`, and what [`crate::progress`] needs. A constant
//! `x_given` says whether the tensor x is there. The first thing a kernel does is `begin(given)`.

use std::fmt::Write;
use std::sync::Arc;

pub(crate) use dropless_core::params;
use dropless_core::{DType, Error, Queue, Result, Tensor};

use crate::BACKEND;
use crate::device::Gpu;
use crate::driver::TensorMap;
use crate::memory;

/// A tensor that a kernel works on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Binding {
    pub(crate) name: &'static str,
    /// Whether the kernel writes it.
    pub(crate) written: bool,
    /// Element types it is used with.
    pub(crate) types: &'static [DType],
    /// Whether it may be absent.
    pub(crate) optional: bool,
}

pub(crate) const FLOAT: &[DType] = &[DType::F32, DType::Bf16];
pub(crate) const BF16: &[DType] = &[DType::Bf16];
pub(crate) const F32: &[DType] = &[DType::F32];
pub(crate) const U32: &[DType] = &[DType::U32];

impl Binding {
    pub(crate) const fn read(name: &'static str, types: &'static [DType]) -> Binding {
        Binding { name, written: false, types, optional: false }
    }

    pub(crate) const fn write(name: &'static str, types: &'static [DType]) -> Binding {
        Binding { name, written: true, types, optional: false }
    }

    /// Read and written.
    pub(crate) const fn in_place(name: &'static str, types: &'static [DType]) -> Binding {
        Binding::write(name, types)
    }

    pub(crate) const fn optional(self) -> Binding {
        Binding { optional: true, ..self }
    }

    /// Whether a tensor of this type (or none) may stand here.
    fn accepts(&self, dtype: Option<DType>) -> bool {
        dtype.map_or(self.optional, |dtype| self.types.contains(&dtype))
    }
}

/// A kernel before its element types are known.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The entry point; also the file's name.
    pub(crate) name: &'static str,
    /// The texts it is compiled from, in order, its own last.
    pub(crate) files: &'static [&'static str],
    /// The fields of its parameters.
    pub(crate) params: &'static [&'static str],
    pub(crate) tensors: &'static [Binding],
    /// How many tensor maps it takes.
    pub(crate) maps: usize,
    /// The names of constants that a launch gives values.
    pub(crate) constants: &'static [&'static str],
}

/// The shared files.
pub(crate) const PRELUDE: &str = include_str!("../../kernels/prelude.cuh");
pub(crate) const BALANCE: &str = include_str!("../../kernels/balance.cuh");
pub(crate) const BLOCKS: &str = include_str!("../../kernels/blocks.cuh");
pub(crate) const CHOICES: &str = include_str!("../../kernels/choices.cuh");
pub(crate) const EXPERTS: &str = include_str!("../../kernels/experts.cuh");
pub(crate) const FP8_BLOCK_SCALES: &str = include_str!("../../kernels/fp8_block_scales.cuh");
pub(crate) const GROUPED_GEMM_OUT: &str = include_str!("../../kernels/grouped_gemm_out.cuh");
pub(crate) const PHILOX: &str = include_str!("../../kernels/philox.cuh");
pub(crate) const RANKS: &str = include_str!("../../kernels/ranks.cuh");
pub(crate) const RING: &str = include_str!("../../kernels/ring.cuh");
pub(crate) const ROTATE: &str = include_str!("../../kernels/rotate.cuh");
pub(crate) const RUNS: &str = include_str!("../../kernels/run.cuh");
pub(crate) const SCAN: &str = include_str!("../../kernels/scan.cuh");
pub(crate) const SIMT_GROUPED_GEMM: &str = include_str!("../../kernels/simt_grouped_gemm.cuh");
pub(crate) const SM90: &str = include_str!("../../kernels/sm90.cuh");
pub(crate) const SM90_GROUPED_GEMM: &str = include_str!("../../kernels/sm90_grouped_gemm.cuh");
pub(crate) const SM90_GROUPED_GEMM_OUT: &str = include_str!("../../kernels/sm90_grouped_gemm_out.cuh");
pub(crate) const TILES: &str = include_str!("../../kernels/tiles.cuh");
pub(crate) const TOKEN_SUM: &str = include_str!("../../kernels/token_sum.cuh");
pub(crate) const TREE: &str = include_str!("../../kernels/tree.cuh");
pub(crate) const VALID: &str = include_str!("../../kernels/valid.cuh");

/// A kernel with its element types and constants: what is compiled.
#[derive(Clone, Debug)]
pub(crate) struct Variant {
    pub(crate) kernel: &'static Kernel,
    pub(crate) types: Vec<Option<DType>>,
    pub(crate) constants: Vec<u32>,
}

impl PartialEq for Variant {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.kernel, other.kernel) && self.types == other.types && self.constants == other.constants
    }
}

impl Eq for Variant {}

impl std::hash::Hash for Variant {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.kernel.name.hash(state);
        self.types.hash(state);
        self.constants.hash(state);
    }
}

/// A type's name in CUDA.
const fn cuda_type(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "float",
        DType::Bf16 => "bf16",
        DType::E4m3 => "e4m3",
        DType::Ue8m0 => "ue8m0",
        DType::E2m1x2 => "unsigned char",
        DType::U32 => "unsigned",
    }
}

/// The types that pointers of `Given` need.
const TYPES: &str = "struct bf16 { unsigned short bits; };
struct e4m3 { unsigned char bits; };
struct ue8m0 { unsigned char bits; };
struct alignas(128) TensorMap { unsigned long long words[16]; };
";

impl Variant {
    /// The CUDA text.
    pub(crate) fn source(&self) -> String {
        let Kernel { tensors, constants, maps, .. } = self.kernel;
        let numbers: String = self.kernel.params.iter().map(|field| format!("    unsigned {field};\n")).collect();
        let mut text = format!("{TYPES}struct Params {{\n{numbers}}};\n");
        for (name, value) in constants.iter().zip(&self.constants) {
            let _ = writeln!(text, "constexpr unsigned {name} = {value}u;");
        }
        let mut fields = if *maps > 0 { format!("    TensorMap maps[{maps}];\n") } else { String::new() };
        for (binding, dtype) in tensors.iter().zip(&self.types) {
            let name = binding.name;
            let _ = writeln!(text, "constexpr bool {name}_given = {};", dtype.is_some());
            let element = cuda_type(dtype.unwrap_or(binding.types[0]));
            let constness = if binding.written { "" } else { "const " };
            let _ = writeln!(fields, "    {constness}{element}* {name};");
        }
        let _ = writeln!(
            text,
            "struct Given {{\n{fields}    unsigned* begun;\n    Params params;\n    unsigned launch;\n}};"
        );
        for file in self.kernel.files {
            text.push_str(file);
            text.push('\n');
        }
        text
    }
}

/// One run of a kernel.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) kernel: &'static Kernel,
    /// One for each tensor of the kernel.
    pub(crate) tensors: &'a [Option<&'a Tensor>],
    /// One for each constant of the kernel.
    pub(crate) constants: &'a [u32],
    pub(crate) params: Vec<u32>,
    pub(crate) maps: &'a [TensorMap],
    /// Thread blocks; 0: nothing to do.
    pub(crate) blocks: u64,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
}

/// Kernels take extents as u32.
fn fits(op: &'static str, field: &'static str, tensor: &Tensor) -> Result<()> {
    let (rows, columns) = (tensor.rows(), tensor.cols());
    if tensor.is_empty() || u32::try_from(rows.max(columns)).is_ok() {
        return Ok(());
    }
    let expected = "less than 2^32 rows, and as many columns".into();
    Err(Error::Argument { op, field, expected, found: format!("{tensor:?}") })
}

/// Static shared memory is part of this, which every kernel has without asking.
const SHARED_WITHOUT_ASKING: u32 = 48 << 10;

impl Gpu {
    /// Queues a run on the compute stream.
    pub(crate) fn launch(self: &Arc<Self>, launch: Launch<'_>) -> Result<()> {
        self.launch_on(Queue::Compute, launch)
    }

    /// Queues a run.
    pub(crate) fn launch_on(self: &Arc<Self>, queue: Queue, launch: Launch<'_>) -> Result<()> {
        let Launch { kernel, tensors, constants, mut params, maps, blocks, threads, shared } = launch;
        let op = kernel.name;
        let types: Vec<_> = tensors.iter().map(|tensor| tensor.map(Tensor::dtype)).collect();
        debug_assert!(
            kernel.tensors.len() == types.len() && kernel.tensors.iter().zip(&types).all(|(b, &t)| b.accepts(t)),
            "{op}: {types:?}"
        );
        debug_assert_eq!((kernel.constants.len(), kernel.maps), (constants.len(), maps.len()), "{op}");
        for (binding, tensor) in kernel.tensors.iter().zip(tensors) {
            tensor.map_or(Ok(()), |tensor| fits(op, binding.name, tensor))?;
        }
        let what = || format!("needs {blocks} thread blocks");
        let blocks = i32::try_from(blocks).map_err(|_| Error::Device { backend: BACKEND, op, what: what() })?;
        if blocks == 0 {
            return Ok(());
        }
        self.bind(op)?;
        let function = self.function(Variant { kernel, types, constants: constants.to_vec() })?;
        if shared > SHARED_WITHOUT_ASKING {
            function.allow_shared(op, shared)?;
        }
        let mut arguments: Vec<u64> = maps.concat();
        for tensor in tensors {
            let address = |tensor| memory::addresses(op, self, tensor, queue).map(|range| range.start);
            arguments.push(tensor.map_or(Ok(0), address)?);
        }
        let (begun, number) = self.progress.launch(op, queue);
        arguments.push(begun);
        params.push(number);
        let pair = |words: &[u32]| u64::from(words[0]) | u64::from(*words.get(1).unwrap_or(&0)) << 32;
        arguments.extend(params.chunks(2).map(pair));
        // The end of a struct is padded to its alignment.
        arguments.resize(arguments.len().next_multiple_of(size_of::<TensorMap>() / size_of::<u64>()), 0);
        // SAFETY: the arguments are the kernel's one parameter as `Variant::source` declares it; the tensors' memory is
        // kept until the stream is done with it.
        unsafe { function.launch(op, self.stream(queue), blocks.unsigned_abs(), threads, shared, &arguments) }?;
        self.launched(op, queue)
    }
}

#[cfg(test)]
mod tests {
    use dropless_core::Memory;

    use super::*;

    #[test]
    fn extents_are_words() {
        let of = |shape: &[usize]| Tensor::from_storage(Arc::new(()), shape, DType::Bf16, Memory::Device);
        let most = u32::MAX as usize;
        for shape in [&[][..], &[most], &[most, most], &[2, most / 2, 7], &[0, most + 1], &[most + 1, 2, 0]] {
            assert!(fits("op", "x", &of(shape)).is_ok(), "{shape:?}");
        }
        for shape in [&[most + 1][..], &[most + 1, 1], &[1, most + 1], &[1 << 16, 1 << 16, 1]] {
            assert!(fits("op", "x", &of(shape)).is_err(), "{shape:?}");
        }
        let error = fits("fill", "out", &of(&[1 << 32])).unwrap_err().to_string();
        assert_eq!(error, "fill: out is Bf16[4294967296], expected less than 2^32 rows, and as many columns");
    }
}
