//! ex2 and rcp of a card against the host's, for every bit pattern.

use dropless_core::numerics::special::{ex2, rcp};
use dropless_core::{DType, Memory};
use dropless_tests::require::Need;

use crate::device::Gpu;
use crate::kernel::{Binding, Kernel, Launch, PRELUDE, U32, scalars};
use crate::memory;

scalars!(
    /// `first`: the pattern of the first thread; `reciprocal`: of which function.
    struct Patterns { first, reciprocal }
);

static FUNCTION: Kernel<Patterns> = Kernel::new(
    "function",
    &[
        PRELUDE,
        "extern \"C\" __global__ void function(const __grid_constant__ Given given) {
            begin(given);
            const u32 i = blockIdx.x * blockDim.x + threadIdx.x;
            const float x = __uint_as_float(given.scalars.first + i);
            given.out[i] = __float_as_uint(given.scalars.reciprocal ? f32_rcp(x) : f32_ex2(x));
        }",
    ],
    &[Binding::write("out", U32)],
);

#[test]
fn every_result_is_the_hosts() {
    const COUNT: usize = 1 << 26;
    const THREADS: u32 = 256;
    let Some(gpu) = Need::Cuda.or_skip(Gpu::open(0, false, None)) else { return };
    let out = memory::alloc(&gpu, DType::U32, &[COUNT], Memory::Device).unwrap();
    let mut found = vec![0u32; COUNT];
    for (reciprocal, host) in [(0, ex2 as fn(f32) -> f32), (1, rcp)] {
        for first in (0..=u32::MAX).step_by(COUNT) {
            let scalars = Patterns { first, reciprocal };
            gpu.launch(Launch::new(&FUNCTION, scalars, &[Some(&out)], COUNT / THREADS as usize, THREADS)).unwrap();
            memory::read("read", &gpu, &out, bytemuck::cast_slice_mut(&mut found)).unwrap();
            let wrong = |part: usize, found: &[u32]| {
                let pattern = |i: usize| first + u32::try_from(part + i).unwrap();
                let differs = |&(i, &bits): &(usize, &u32)| host(f32::from_bits(pattern(i))).to_bits() != bits;
                found.iter().enumerate().find(differs).map(|(i, bits)| (pattern(i), *bits))
            };
            let parts = COUNT / 16;
            let bad = std::thread::scope(|scope| {
                let work: Vec<_> = found
                    .chunks(parts)
                    .enumerate()
                    .map(|(i, found)| scope.spawn(move || wrong(i * parts, found)))
                    .collect();
                work.into_iter().find_map(|thread| thread.join().unwrap())
            });
            if let Some((pattern, bits)) = bad {
                let expected = host(f32::from_bits(pattern)).to_bits();
                panic!("function {reciprocal} of {pattern:08x}: {bits:08x}, not {expected:08x}");
            }
        }
    }
}
