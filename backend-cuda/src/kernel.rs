//! From a kernel's file to a launch: the declarations that cross from Rust to CUDA are written here, so that a struct or a
//! tensor is declared once.
//!
//! A kernel `name` lies in `kernels/name.cu` and has one parameter, `Given`: its tensor maps, one pointer for each tensor
//! (to the first element of the view, null if it is absent), its `Scalars`, and what [`crate::progress`] needs. A constant
//! `x_given` says whether the tensor x is there. The first thing a kernel does is `begin(given)`.

use std::fmt::Write;
use std::sync::Arc;

use cudarc::driver::sys;
pub(crate) use dropless_core::launch::{BF16, Binding, F32, FLOAT, Kernel, Scalars, U32, Variant, word};
pub(crate) use dropless_core::scalars;
use dropless_core::{DType, Error, Queue, Result, Tensor};

use crate::BACKEND;
use crate::device::Gpu;
use crate::driver::{self, Function, TensorMap, TensorMapShape};
use crate::memory;

/// The shared files.
pub(crate) const PRELUDE: &str = include_str!("../../kernels/prelude.cuh");
pub(crate) const BALANCE: &str = include_str!("../../kernels/balance.cuh");
pub(crate) const BLOCKS: &str = include_str!("../../kernels/blocks.cuh");
pub(crate) const CHOICES: &str = include_str!("../../kernels/choices.cuh");
pub(crate) const EXPERTS: &str = include_str!("../../kernels/experts.cuh");
pub(crate) const FP8_BLOCK_SCALES: &str = include_str!("../../kernels/fp8_block_scales.cuh");
pub(crate) const GROUP_ENDS: &str = include_str!("../../kernels/group_ends.cuh");
pub(crate) const GROUPED_GEMM_OUT: &str = include_str!("../../kernels/grouped_gemm_out.cuh");
pub(crate) const PHILOX: &str = include_str!("../../kernels/philox.cuh");
pub(crate) const RANKS: &str = include_str!("../../kernels/ranks.cuh");
pub(crate) const RING: &str = include_str!("../../kernels/ring.cuh");
pub(crate) const ROTATE: &str = include_str!("../../kernels/rotate.cuh");
pub(crate) const RUNS: &str = include_str!("../../kernels/run.cuh");
pub(crate) const SCAN: &str = include_str!("../../kernels/scan.cuh");
pub(crate) const CHAIN: &str = include_str!("../../kernels/chain.cuh");
pub(crate) const SIMT_GROUPED_GEMM: &str = include_str!("../../kernels/simt_grouped_gemm.cuh");
pub(crate) const SM90: &str = include_str!("../../kernels/sm90.cuh");
pub(crate) const SM90_GROUPED_GEMM: &str = include_str!("../../kernels/sm90_grouped_gemm.cuh");
pub(crate) const SM90_GROUPED_GEMM_OUT: &str = include_str!("../../kernels/sm90_grouped_gemm_out.cuh");
pub(crate) const TILES: &str = include_str!("../../kernels/tiles.cuh");
pub(crate) const TOKEN_SUM: &str = include_str!("../../kernels/token_sum.cuh");
pub(crate) const TREE: &str = include_str!("../../kernels/tree.cuh");
pub(crate) const VALID: &str = include_str!("../../kernels/valid.cuh");

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

/// The CUDA text of a variant.
pub(crate) fn source(variant: &Variant) -> String {
    let program = variant.program;
    let numbers: String = program.scalars.iter().map(|field| format!("    unsigned {field};\n")).collect();
    let mut text = format!("{TYPES}struct Scalars {{\n{numbers}}};\n");
    for (name, value) in variant.constants() {
        let _ = writeln!(text, "constexpr unsigned {name} = {value}u;");
    }
    let maps = program.maps;
    let mut fields = if maps > 0 { format!("    TensorMap maps[{maps}];\n") } else { String::new() };
    for (binding, dtype) in variant.tensors() {
        let name = binding.name;
        let _ = writeln!(text, "constexpr bool {name}_given = {};", dtype.is_some());
        let element = cuda_type(dtype.unwrap_or(binding.types[0]));
        let constness = if binding.access.reads_only() { "const " } else { "" };
        let _ = writeln!(fields, "    {constness}{element}* {name};");
    }
    let _ = writeln!(
        text,
        "struct Given {{\n{fields}    unsigned* begun;\n    Scalars scalars;\n    unsigned launch;\n}};"
    );
    for file in program.files {
        text.push_str(file);
        text.push('\n');
    }
    text
}

/// One run of a kernel.
#[derive(Debug)]
pub(crate) struct Launch<'a, S: Scalars> {
    pub(crate) kernel: &'static Kernel<S>,
    pub(crate) scalars: S,
    /// One for each tensor of the kernel.
    pub(crate) tensors: &'a [Option<&'a Tensor>],
    /// One for each constant of the kernel.
    pub(crate) constants: &'a [u32],
    /// One for each tensor map of the kernel.
    pub(crate) maps: &'a [TensorMap],
    /// Thread blocks; 0: nothing to do.
    pub(crate) blocks: usize,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared: u32,
}

impl<'a, S: Scalars> Launch<'a, S> {
    /// Without constants, tensor maps and dynamic shared memory.
    pub(crate) fn new(
        kernel: &'static Kernel<S>,
        scalars: S,
        tensors: &'a [Option<&'a Tensor>],
        blocks: usize,
        threads: u32,
    ) -> Launch<'a, S> {
        Launch { kernel, scalars, tensors, constants: &[], maps: &[], blocks, threads, shared: 0 }
    }
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
    ///
    /// # Panics
    /// As [`launch_on`](Gpu::launch_on).
    pub(crate) fn launch<S: Scalars>(self: &Arc<Self>, launch: Launch<'_, S>) -> Result<()> {
        self.launch_on(Queue::Compute, launch)
    }

    /// Queues a run.
    ///
    /// # Panics
    /// When the kernel declares other tensors, constants or tensor maps.
    pub(crate) fn launch_on<S: Scalars>(self: &Arc<Self>, queue: Queue, launch: Launch<'_, S>) -> Result<()> {
        let Launch { kernel, scalars, tensors, constants, maps, blocks, threads, shared } = launch;
        let program = &kernel.program;
        let op = program.name;
        let variant = Variant::of(program, tensors, constants);
        assert_eq!(maps.len(), program.maps, "{op}: tensor maps");
        for (binding, tensor) in program.tensors.iter().zip(tensors) {
            tensor.map_or(Ok(()), |tensor| fits(op, binding.name, tensor))?;
        }
        let what = || format!("needs {blocks} thread blocks");
        let blocks = i32::try_from(blocks).map_err(|_| Error::Device { backend: BACKEND, op, what: what() })?;
        if blocks == 0 {
            return Ok(());
        }
        self.bind(op)?;
        let function = self.function(&variant)?;
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
        let mut words = scalars.words();
        words.push(number);
        let pair = |words: &[u32]| u64::from(words[0]) | u64::from(*words.get(1).unwrap_or(&0)) << 32;
        arguments.extend(words.chunks(2).map(pair));
        // The end of a struct is padded to its alignment.
        arguments.resize(arguments.len().next_multiple_of(size_of::<TensorMap>() / size_of::<u64>()), 0);
        // SAFETY: the arguments are the kernel's one parameter as `source` declares it, since there are as many maps, tensors
        // and scalars as the program says: the first two were counted above, and the scalars are of the kernel's own type. A
        // pointer is null only where the variant's text says so, and else shows a tensor of the type in that text, whose
        // memory is kept until the stream is done with it.
        self.timed(op, queue, || unsafe {
            function.launch(op, self.stream(queue), blocks.unsigned_abs(), threads, shared, &arguments)
        })?;
        self.launched(op, queue)
    }

    /// The compiled kernel of a variant; compiled at its first use.
    fn function(&self, variant: &Variant) -> Result<Arc<Function>> {
        if let Some(function) = self.functions.read().get(variant) {
            return Ok(function.clone());
        }
        let name = variant.program.name;
        let cubin = self.jit.cubin(name, &source(variant))?;
        // SAFETY: `Jit` compiled it, in this process or in an earlier one of this user, as it has made sure.
        let function = Arc::new(unsafe { Function::load(name, &cubin) }?);
        Ok(self.functions.write().entry(*variant).or_insert(function).clone())
    }

    /// Describes a tensor to the TMA, as an array of `extents` read in boxes of `tile`, the fastest dimension
    /// first; a box's rows have 128 bytes and come into shared memory with the swizzle of that width.
    pub(crate) fn tensor_map<const RANK: usize>(
        self: &Arc<Self>,
        op: &'static str,
        tensor: &Tensor,
        extents: [usize; RANK],
        tile: [usize; RANK],
    ) -> Result<TensorMap> {
        use sys::CUtensorMapDataType as Type;
        let element = match tensor.dtype() {
            DType::F32 => Type::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            DType::Bf16 => Type::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::U32 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT32,
            DType::E4m3 | DType::Ue8m0 | DType::E2m1x2 => Type::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        };
        let shape = TensorMapShape {
            element,
            element_bytes: tensor.dtype().size() as u64,
            extents,
            tile,
            swizzle: sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        self.bind(op)?;
        driver::tensor_map(op, memory::addresses(op, self, tensor, Queue::Compute)?.start, &shape)
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
