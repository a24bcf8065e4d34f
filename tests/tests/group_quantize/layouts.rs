//! Every layout against loops over single blocks.

use std::ops::Range;

use dropless_core::numerics::blocks::{Format, Fp8Block, Mxfp8, Nvfp4};
use dropless_core::numerics::{bf16, e4m3};
use dropless_core::ops::{BlockFormat, GroupQuantize};
use proptest::prelude::*;

use super::problem::{FILL, FP8, FP8_F32, MXFP8, MXFP8_FLOOR, NVFP4, Output, Problem, Rows, hosts, quantize};

/// The specification, one block at a time: gathers the block's values, takes scale and codes from
/// `numerics::blocks`, and puts them where the op's documentation says.
fn expected(p: &Problem) -> Output {
    let x: Vec<f32> = p.x.iter().map(|&v| if p.bf16 { bf16::round(v) } else { v }).collect();
    match p.format {
        BlockFormat::Mxfp8 { floor } => expected_with(p, &x, &Mxfp8 { floor }, false),
        BlockFormat::Fp8Block { f32_scale } => expected_with(p, &x, &Fp8Block { f32_scale }, true),
        BlockFormat::Nvfp4 { stochastic } => {
            let rows = match &p.rows {
                Rows::Ragged(sizes) => sizes.iter().sum::<usize>(),
                Rows::Stacked { .. } => x.len() / p.k,
            };
            let amax = x[..rows * p.k].iter().copied().fold(0.0, larger);
            Output { amax: vec![amax], ..expected_with(p, &x, &Nvfp4::new(amax, stochastic), false) }
        }
    }
}

fn expected_with<F: Format>(p: &Problem, x: &[f32], format: &F, fp8: bool) -> Output {
    let (k, block) = (p.k, F::BLOCK);
    let rows = x.len() / k;
    let across = k.div_ceil(block);
    let e4m3 = F::PER_BYTE == 1;
    let (groups, square) = match &p.rows {
        Rows::Ragged(sizes) => (sizes.clone(), false),
        Rows::Stacked { groups, square } => (vec![rows / groups; *groups], *square),
    };
    let ragged = matches!(p.rows, Rows::Ragged(_));
    let n = rows / groups.len();
    // The amax over rows and columns, and the square around a place in matrix g.
    let amax = |r: Range<usize>, c: Range<usize>| {
        r.flat_map(|r| c.clone().map(move |c| (r, c))).map(|(r, c)| x[r * k + c]).fold(0.0f32, larger)
    };
    let around = |g: usize, r: usize, c: usize| {
        let (r, c) = (r / block * block, c / block * block);
        amax(g * n + r..g * n + n.min(r + block), c..k.min(c + block))
    };
    let scale_bytes = |scale: F::Scale| bytemuck::bytes_of(&scale).to_vec();
    let width = size_of::<F::Scale>();

    let mut out = Output {
        row_codes: vec![FILL; rows * k / F::PER_BYTE],
        row_scales: vec![FILL; if fp8 && square { groups.len() * n.div_ceil(block) } else { rows } * across * width],
        column_codes: vec![],
        column_scales: vec![],
        offsets: vec![],
        amax: vec![],
    };
    let put = |to: &mut Vec<u8>, at: usize, scale: F::Scale| {
        to[at * width..(at + 1) * width].copy_from_slice(&scale_bytes(scale));
    };
    let total: usize = groups.iter().sum();
    for r in 0..total {
        for b in 0..across {
            let cols = b * block..k.min((b + 1) * block);
            let value = if square { around(r / n, r % n, cols.start) } else { amax(r..r + 1, cols.clone()) };
            let (scale, factor) = format.scale(value);
            let at =
                if fp8 && square { (r / n * n.div_ceil(block) + r % n / block) * across + b } else { r * across + b };
            put(&mut out.row_scales, at, scale);
            let bytes = (r * k + cols.start) / F::PER_BYTE..(r * k + cols.end) / F::PER_BYTE;
            let place = (r * across + b) as u64;
            format.encode(&x[r * k + cols.start..r * k + cols.end], factor, place, &mut out.row_codes[bytes]);
        }
    }
    if !e4m3 || (fp8 && !ragged && !square) {
        return out;
    }
    // Rows of the column-wise result: of one matrix, or of all groups when ragged.
    let padded = if ragged { GroupQuantize::padded_rows(p.format, rows, groups.len()) } else { n };
    let matrices = if ragged { 1 } else { groups.len() };
    out.column_codes = vec![FILL; matrices * padded * k];
    let scales = if fp8 && square { across } else { k };
    out.column_scales = vec![FILL; matrices * padded.div_ceil(block) * scales * width];
    let (mut from, mut to) = (0, 0);
    for (g, &size) in groups.iter().enumerate() {
        let matrix = if ragged { 0 } else { g };
        if ragged {
            out.offsets.push(u32::try_from(to).expect("small"));
        }
        for start in (0..size).step_by(block) {
            let real = start..size.min(start + block);
            let end = if ragged { start + block } else { real.end };
            for c in 0..k {
                let value =
                    if square { around(g, start, c) } else { amax(from + real.start..from + real.end, c..c + 1) };
                let (scale, factor) = format.scale(value);
                let down = padded.div_ceil(block);
                let row = (to + start) / block;
                let at = match (fp8, square) {
                    (true, true) => (matrix * across + c / block) * down + row,
                    (true, false) => (matrix * k + c) * down + row,
                    (false, _) => (matrix * down + row) * k + c,
                };
                put(&mut out.column_scales, at, scale);
                for r in start..end {
                    let code = if r < size { e4m3::from_f32(x[(from + r) * k + c] * factor) } else { 0 };
                    let at = if fp8 { (matrix * k + c) * padded + to + r } else { (matrix * padded + to + r) * k + c };
                    out.column_codes[at] = code;
                }
            }
        }
        from += size;
        if ragged {
            to += size.next_multiple_of(block);
        }
    }
    if ragged {
        out.offsets.push(u32::try_from(to).expect("small"));
    }
    out
}

/// The larger of `amax` and |x|; NaN does not count.
fn larger(amax: f32, x: f32) -> f32 {
    if x.abs() > amax { x.abs() } else { amax }
}

/// Values at the edges of the formats more often than not.
fn value() -> impl Strategy<Value = f32> {
    let powers = (-149i32..=127, any::<bool>()).prop_map(|(e, negative)| {
        let x = libm::exp2f(e as f32);
        if negative { -x } else { x }
    });
    prop_oneof![
        8 => -4.0f32..4.0,
        3 => powers,
        2 => prop_oneof![Just(0.0f32), Just(-0.0), Just(448.0), Just(6.0), Just(1e-40)],
        1 => any::<u32>().prop_map(f32::from_bits),
    ]
}

fn problem() -> impl Strategy<Value = Problem> {
    let stochastic = BlockFormat::Nvfp4 { stochastic: Some((0x0123_4567_89AB_CDEF, 7)) };
    let format = prop::sample::select(vec![MXFP8, MXFP8_FLOOR, FP8, FP8_F32, NVFP4, stochastic]);
    // Ragged: sizes around a block, and rows that belong to no group.
    let size = prop_oneof![Just(0usize), Just(1), 2usize..70, Just(128), Just(129)];
    let ragged = (prop::collection::vec(size, 1..5), 0usize..3).prop_map(|(sizes, beyond)| {
        let rows = sizes.iter().sum::<usize>() + beyond;
        (Rows::Ragged(sizes), rows)
    });
    let stacked = (1usize..4, 1usize..6, any::<bool>())
        .prop_map(|(groups, n, square)| (Rows::Stacked { groups, square }, groups * n * 32));
    let rows = prop_oneof![ragged, stacked];
    let columns = prop::sample::select(vec![32usize, 64, 128, 160, 288]);
    (format, any::<bool>(), rows, columns, prop::collection::vec(value(), 997)).prop_map(
        |(format, bf16, (rows, count), k, pool)| {
            let x = (0..count * k).map(|i| pool[i % pool.len()]).collect();
            Problem { format, bf16, x, k, rows }
        },
    )
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Every layout and every vector level gives the bytes of single blocks, and writes nothing else.
    #[test]
    fn layouts_and_levels_agree_with_single_blocks(p in problem()) {
        let want = expected(&p);
        for host in hosts() {
            let got = quantize(&host, &p).expect("the problem is valid");
            prop_assert_eq!((&got.offsets, bits(&got.amax)), (&want.offsets, bits(&want.amax)));
            for (name, got, want) in [
                ("row codes", &got.row_codes, &want.row_codes),
                ("row scales", &got.row_scales, &want.row_scales),
                ("column codes", &got.column_codes, &want.column_codes),
                ("column scales", &got.column_scales, &want.column_scales),
            ] {
                let differ: Vec<_> = (0..want.len()).filter(|&i| got[i] != want[i]).collect();
                prop_assert!(got.len() == want.len() && differ.is_empty(),
                    "{:?}: {} of {} bytes of the {} differ, the first at {:?}",
                    host.simd(), differ.len(), want.len(), name, differ.first());
            }
        }
    }
}
