//! Grouped products on CUDA that are too large for the harness: every multiprocessor has several tiles, of the wider
//! kind where there is one, and the groups are more than a warp looks at once. Against the host, bit for bit.

use crate::differential::{Random, UNDER_TEST};
use dropless_core::host::{Host, HostOptions};
use dropless_core::ops::{GemmKind, GroupedGemm, Operand};
use dropless_core::{Backend, DType, NumericModel, Result, Tensor};

/// A product with bf16 factors, or with FP8 blocks.
#[derive(Clone, Copy, Debug)]
struct Product {
    kind: GemmKind,
    fp8: bool,
    gather: bool,
    accumulate: bool,
    n: usize,
    k: usize,
    /// Rows of a group are drawn below this, and every third group is empty.
    rows: usize,
    groups: usize,
}

impl Product {
    /// The result in bits. The operands depend on the product alone.
    fn run(&self, backend: &dyn Backend) -> Result<Vec<u32>> {
        let Product { kind, fp8, gather, accumulate, n, k, rows, groups } = *self;
        let mut random = Random(7);
        let block = if fp8 && kind == GemmKind::Wgrad { 128 } else { 1 };
        let mut offsets = vec![0u32];
        for group in 0..groups {
            let size = if group % 3 == 1 { 0 } else { 1 + random.below(rows) };
            offsets.push(offsets[group] + size.next_multiple_of(block) as u32);
        }
        let rows = offsets[groups] as usize;
        let (a, b, out) = match kind {
            GemmKind::Forward => (vec![rows, k], vec![groups, n, k], vec![rows, n]),
            GemmKind::Dgrad if fp8 => (vec![rows, n], vec![groups, k, n], vec![rows, k]),
            GemmKind::Dgrad => (vec![rows, n], vec![groups, n, k], vec![rows, k]),
            GemmKind::Wgrad if fp8 => (vec![n, rows], vec![k, rows], vec![groups, n, k]),
            GemmKind::Wgrad => (vec![rows, n], vec![rows, k], vec![groups, n, k]),
        };
        let mut tensor = |dtype: DType, shape: &[usize]| -> Result<Tensor> {
            let mut bytes = random.elements(dtype, shape.iter().product());
            if dtype == DType::E4m3 {
                // As many NaN as any bytes have would leave nothing else of a long chain.
                let nan = |&&mut code: &&mut u8| code & 0x7F == 0x7F;
                bytes.iter_mut().filter(nan).for_each(|code| *code ^= u8::from(random.below(100) > 0));
            }
            backend.upload(dtype, shape, &bytes)
        };
        let elements = if fp8 { DType::E4m3 } else { DType::Bf16 };
        let factors = [tensor(elements, &a)?, tensor(elements, &b)?];
        let scales = [&a, &b].map(|shape| {
            let mut shape = shape.clone();
            let last = shape.len() - 1;
            shape[last] = shape[last].div_ceil(128);
            if last == 2 {
                shape[1] = shape[1].div_ceil(128);
            }
            shape
        });
        let scales = [tensor(DType::F32, &scales[0])?, tensor(DType::F32, &scales[1])?];
        let out = tensor(DType::F32, &out)?;
        let index: Vec<u32> = (0..rows).map(|_| random.below(rows) as u32).collect();
        let index = backend.upload(DType::U32, &[rows], &index)?;
        let offsets = backend.upload(DType::U32, &[groups + 1], &offsets)?;
        let operand = |side: usize| match fp8 {
            true => Operand::Fp8Block { codes: &factors[side], scale_inv: &scales[side], gather: None },
            false => {
                let gathers = gather && (side == 0 || kind == GemmKind::Wgrad);
                Operand::Plain { values: &factors[side], gather: gathers.then_some(&index) }
            }
        };
        GroupedGemm { kind, a: operand(0), b: operand(1), offsets: &offsets, out: &out, accumulate }.run(backend)?;
        backend.download(&out)
    }

    fn check(&self) {
        let cuda = UNDER_TEST.iter().find(|candidate| candidate.name == "cuda").unwrap();
        if let Err(why) = cuda.device() {
            println!("skipped: {why}");
            return;
        }
        let numerics = NumericModel::Hopper;
        let host = Host::new(HostOptions { numerics, ..HostOptions::default() }).unwrap();
        let cuda = (cuda.open)(1, numerics).unwrap().pop().unwrap();
        let (want, got) = (self.run(&host).unwrap(), self.run(&*cuda).unwrap());
        let nan = |bits: u32| f32::from_bits(bits).is_nan();
        let wrong: Vec<_> = (0..want.len()).filter(|&i| want[i] != got[i] && !(nan(want[i]) && nan(got[i]))).collect();
        let first: Vec<_> =
            wrong.iter().take(4).map(|&i| format!("[{i}] {:08x} for {:08x}", got[i], want[i])).collect();
        assert!(wrong.is_empty(), "{self:?}: {} of {} differ: {first:?}", wrong.len(), want.len());
    }
}

/// By TMA, by 16-byte copies, and element by element.
fn check(kind: GemmKind, n: usize, k: usize) {
    let product = Product { kind, fp8: false, gather: false, accumulate: false, n, k, rows: 140, groups: 40 };
    product.check();
    Product { gather: true, accumulate: true, ..product }.check();
    Product { n: n - 3, k: k - 3, ..product }.check();
}

#[test]
fn forward_over_many_groups() {
    check(GemmKind::Forward, 1032, 72);
}

#[test]
fn gradient_of_the_input_over_many_groups() {
    check(GemmKind::Dgrad, 72, 1032);
}

#[test]
fn gradient_of_the_weight_over_many_groups() {
    check(GemmKind::Wgrad, 264, 520);
}

/// Groups of several rows of tiles, an odd number in some: pairs of blocks share columns, or do not.
#[test]
fn pairs_of_blocks_share_columns() {
    for (kind, n, k) in [(GemmKind::Forward, 1032, 72), (GemmKind::Dgrad, 72, 1032)] {
        Product { kind, fp8: false, gather: false, accumulate: false, n, k, rows: 900, groups: 9 }.check();
    }
}

#[test]
fn fp8_blocks_over_many_groups() {
    for kind in [GemmKind::Forward, GemmKind::Dgrad, GemmKind::Wgrad] {
        let (n, k) = if kind == GemmKind::Dgrad { (400, 272) } else { (272, 400) };
        let product = Product { kind, fp8: true, gather: false, accumulate: false, n, k, rows: 140, groups: 40 };
        product.check();
        Product { n: n - 3, k: k - 3, accumulate: true, ..product }.check();
    }
}
