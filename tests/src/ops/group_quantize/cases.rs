//! Faults that users of other stacks met, by their ids in `data/cases.jsonl`.

use dropless_core::numerics::blocks::{Format, Mxfp8};
use dropless_core::numerics::{bf16, dequantize, e4m3, ue8m0};
use dropless_core::ops::BlockFormat;

use super::problem::{FP8, FP8_F32, MXFP8, MXFP8_FLOOR, NVFP4, Output, Problem, Rows, host, quantize};

/// One group of rows, in f32.
fn ragged(format: BlockFormat, k: usize, x: Vec<f32>) -> Output {
    let rows = Rows::Ragged(vec![x.len() / k]);
    quantize(&host(None), &Problem { format, bf16: false, x, k, rows, gather: None }).expect("valid")
}

/// Stacked matrices, in f32.
fn stacked(format: BlockFormat, groups: usize, square: bool, k: usize, x: Vec<f32>) -> Output {
    quantize(&host(None), &Problem { format, bf16: false, x, k, rows: Rows::Stacked { groups, square }, gather: None })
        .expect("valid")
}

/// `head`, then zeros, `len` values in all.
fn padded(head: &[f32], len: usize) -> Vec<f32> {
    let mut x = head.to_vec();
    x.resize(len, 0.0);
    x
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(bytemuck::pod_read_unaligned).collect()
}

/// The row-wise values of a single matrix of `k` columns.
fn row_values(format: BlockFormat, k: usize, out: &Output) -> Vec<f32> {
    match format {
        BlockFormat::Mxfp8 { .. } => {
            dequantize::mxfp8(&out.row_codes, &out.row_scales, [out.row_codes.len() / k, k], [1, 32])
        }
        BlockFormat::Fp8Block { .. } => {
            let scales = floats(&out.row_scales);
            dequantize::fp8_block(&out.row_codes, &scales, [out.row_codes.len() / k, k], [1, 128])
        }
        BlockFormat::Nvfp4 { .. } => dequantize::nvfp4(&out.row_codes, &out.row_scales, out.amax[0]),
    }
}

const FORMATS: [BlockFormat; 5] = [MXFP8, MXFP8_FLOOR, FP8, FP8_F32, NVFP4];

/// The scales of FP8 blocks along the columns, those of a column side by side, as its codes are.
fn of_columns(out: &Output, k: usize) -> Vec<f32> {
    let (scales, blocks) = (floats(&out.column_scales), out.column_scales.len() / 4 / k);
    (0..k * blocks).map(|i| scales[i % blocks * k + i / blocks]).collect()
}

#[test]
fn b030_groups_need_not_be_multiples_of_the_block() {
    let sizes = [44usize, 20, 0, 33, 1];
    let k = 64;
    let rows: usize = sizes.iter().sum();
    // Each group on its own power of two, so that a block across two groups would show.
    let group = |row: usize| (0..).find(|&g| row < sizes[..=g].iter().sum()).unwrap();
    let x: Vec<f32> = (0..rows * k).map(|i| (1.0 + (i % 7) as f32) * libm::exp2f(20.0 * group(i / k) as f32)).collect();
    for (format, offsets) in [(MXFP8, [0, 64, 96, 96, 160, 192]), (FP8, [0, 128, 256, 256, 384, 512])] {
        let p = Problem { format, bf16: false, x: x.clone(), k, rows: Rows::Ragged(sizes.to_vec()), gather: None };
        let out = quantize(&host(None), &p).unwrap();
        assert_eq!(out.offsets, offsets);
        let fp8 = matches!(format, BlockFormat::Fp8Block { .. });
        let capacity = out.column_codes.len() / k;
        let values = if fp8 {
            dequantize::fp8_block(&out.column_codes, &of_columns(&out, k), [k, capacity], [1, 128])
        } else {
            dequantize::mxfp8(&out.column_codes, &out.column_scales, [capacity, k], [32, 1])
        };
        let value = |row: usize, col: usize| if fp8 { values[col * capacity + row] } else { values[row * k + col] };
        let mut from = 0;
        for (g, &size) in sizes.iter().enumerate() {
            for row in 0..(offsets[g + 1] - offsets[g]) as usize {
                for col in 0..k {
                    let want = if row < size { x[(from + row) * k + col] } else { 0.0 };
                    assert_eq!(value(offsets[g] as usize + row, col), want, "{format:?} {g} {row} {col}");
                }
            }
            from += size;
        }
    }
    let out = ragged(NVFP4, k, x[..44 * k].to_vec());
    assert_eq!(out.row_codes.len(), 44 * k / 2, "row-wise blocks need no padding");
}

#[test]
fn b040_zero_blocks_decode_to_zero() {
    let out = stacked(FP8, 1, true, 256, padded(&[1.0], 256 * 256));
    assert_eq!(floats(&out.row_scales), [1.0 / 256.0, 1.0, 1.0, 1.0], "zero blocks have scale 1");
    let values = dequantize::fp8_block(&out.row_codes, &floats(&out.row_scales), [256, 256], [128, 128]);
    assert_eq!(values, padded(&[1.0], 256 * 256));
    for format in FORMATS {
        let out = ragged(format, 128, vec![0.0; 256]);
        assert!(out.row_codes.iter().all(|&code| code == 0));
        assert_eq!(row_values(format, 128, &out), vec![0.0; 256]);
        let zero_scale = if matches!(format, BlockFormat::Fp8Block { .. }) {
            1f32.to_le_bytes().repeat(2)
        } else {
            vec![0; 256 / format.block()]
        };
        assert_eq!(out.row_scales, zero_scale);
    }
}

#[test]
fn b041_tiny_amax_keeps_scales_and_codes_finite() {
    let out = ragged(MXFP8, 32, padded(&[f32::MIN_POSITIVE], 32));
    assert_eq!((out.row_scales[0], out.row_codes[0]), (0, 0x40));
    assert_eq!(row_values(MXFP8, 32, &out), padded(&[f32::MIN_POSITIVE], 32));
    let tiny = [5.7e-35, -5.7e-35, 1e-38, -1e-38, 1e-40, -1e-40, f32::from_bits(1)];
    for format in FORMATS {
        for x in tiny {
            let out = ragged(format, 128, padded(&[x], 128));
            let values = row_values(format, 128, &out);
            assert!(values[0].is_finite() && values[0].abs() <= 2.0 * x.abs(), "{format:?} {x:e}: {}", values[0]);
            assert_eq!(values[0].is_sign_negative(), x.is_sign_negative());
            assert!(values[1..].iter().all(|&v| v == 0.0));
        }
    }
}

#[test]
fn b042_infinity_saturates() {
    let out = ragged(MXFP8, 32, padded(&[f32::INFINITY, f32::NEG_INFINITY, 1.0], 32));
    assert_eq!(out.row_scales, [0xFE]);
    assert_eq!(out.row_codes[..4], [0x7E, 0xFE, 0x00, 0x00]);
}

#[test]
fn b044_nvfp4_block_scales_stay_finite() {
    // (a) A zero block beside a small amax.
    let mut x = vec![0.0; 32];
    x[..16].fill(0.001);
    let out = ragged(NVFP4, 32, x);
    assert_eq!(out.row_scales, [0x7E, 0x00]);
    assert_eq!(row_values(NVFP4, 32, &out)[16..], [0.0; 16]);
    // (b) A block so far below the amax that its scale rounds to zero is lost, as a whole.
    let mut x = vec![0.0; 32];
    x[0] = 2688.0;
    x[16..].fill(0.005);
    let out = ragged(NVFP4, 32, x);
    assert_eq!(out.row_scales, [0x7E, 0x00]);
    assert_eq!(out.row_codes[8..], [0; 8]);
    assert_eq!(row_values(NVFP4, 32, &out)[..17], padded(&[2688.0], 17));
}

#[test]
fn b045_a_ramp_comes_back() {
    let ramp: Vec<f32> = (0..64).map(|i| (i + 1) as f32 / 16.0).collect();
    for format in [NVFP4, MXFP8] {
        let codes = [0.0, 20.0, -20.0].map(|exponent| {
            let scale = libm::exp2f(exponent);
            let x: Vec<f32> = ramp.iter().map(|v| v * scale).collect();
            let out = ragged(format, 64, x.clone());
            let values = row_values(format, 64, &out);
            for (i, (&got, &want)) in values.iter().zip(&x).enumerate() {
                let bound = match format {
                    NVFP4 => 0.25 * x[i / 16 * 16 + 15],
                    _ => want / 16.0,
                };
                assert!((got - want).abs() <= bound && got != 0.0, "{format:?} x[{i}] = {want}: {got}");
            }
            out.row_codes
        });
        assert!(codes[0] == codes[1] && codes[0] == codes[2]);
    }
}

#[test]
fn b051_floor_looks_at_the_f32_exponent() {
    for (amax, byte) in [(f32::from_bits(0x3FFF_DF3B), 119), (1.9961, 119), (2.0, 120)] {
        assert_eq!(ragged(MXFP8_FLOOR, 32, padded(&[amax], 32)).row_scales, [byte], "{amax}");
    }
    let p = Problem {
        format: MXFP8_FLOOR,
        bf16: true,
        x: padded(&[2.0], 32),
        k: 32,
        rows: Rows::Ragged(vec![1]),
        gather: None,
    };
    assert_eq!(quantize(&host(None), &p).unwrap().row_scales, [120]);
}

#[test]
fn b052_floor_clips_and_rounding_up_does_not() {
    let x = padded(&[957.0], 32);
    let floor = ragged(MXFP8_FLOOR, 32, x.clone());
    assert_eq!((floor.row_scales[0], floor.row_codes[0]), (128, 0x7E));
    assert_eq!(row_values(MXFP8_FLOOR, 32, &floor)[0], 896.0);
    let up = ragged(MXFP8, 32, x);
    assert_eq!((up.row_scales[0], e4m3::to_f32(up.row_codes[0])), (129, 240.0));
    assert_eq!(row_values(MXFP8, 32, &up)[0], 960.0);
    // Every bf16 amax: the smallest scale whose range holds it.
    for code in 1..0x7F80u16 {
        let amax = bf16::to_f32(code);
        let scale = Mxfp8 { floor: false }.scale(amax).0;
        let holds = |scale: u8| f64::from(ue8m0::to_f32(scale)) * 448.0 >= f64::from(amax);
        assert!(holds(scale) && (scale == 0 || !holds(scale - 1)), "{amax:e}: {scale}");
    }
}

#[test]
fn b061_blocks_do_not_span_stacked_matrices() {
    let (n, k) = (192, 128);
    let x: Vec<f32> = (0..2 * n * k).map(|i| if i < n * k { 1.0 } else { 1000.0 }).collect();
    let out = stacked(FP8, 2, true, k, x);
    let scales = floats(&out.row_scales);
    assert_eq!(scales.len(), 2 * 2, "two blocks a matrix, the second one partial");
    assert_eq!(scales[..2], [1.0 / 256.0; 2]);
    let values = dequantize::fp8_block(&out.row_codes, &scales, [n, k], [128, 128]);
    assert!(values[..n * k].iter().all(|&v| v == 1.0));
    assert!(values[n * k..].iter().all(|&v| (v - 1000.0).abs() <= 1000.0 / 16.0));
}

#[test]
fn b135_the_transposed_tile_holds_the_same_bytes() {
    // The largest value is 416, so that the scale is 1.
    let codes: Vec<u8> = (0..128 * 128).map(|i| u8::try_from((i / 128 * 7 + i % 128 * 13) % 0x7E).unwrap()).collect();
    let out = stacked(FP8, 1, true, 128, codes.iter().map(|&code| e4m3::to_f32(code)).collect());
    assert_eq!(floats(&out.row_scales), [1.0]);
    assert_eq!(out.row_codes, codes);
    let turned: Vec<u8> = (0..128 * 128).map(|i| codes[i % 128 * 128 + i / 128]).collect();
    assert_eq!(out.column_codes, turned);
    assert_eq!(out.column_scales, out.row_scales);
}

#[test]
fn b136_columns_have_scales_of_their_own() {
    let (rows, k) = (256, 128);
    let value = |row: usize, col: usize| libm::exp2f(if row < 128 { 0.0 } else { 6.0 } + col as f32 - 64.0);
    let x: Vec<f32> = (0..rows * k).map(|i| value(i / k, i % k)).collect();
    let out = ragged(MXFP8, k, x.clone());
    assert_eq!(dequantize::mxfp8(&out.column_codes[..rows * k], &out.column_scales, [rows, k], [32, 1]), x);
    assert_ne!(row_values(MXFP8, k, &out), x, "along the columns the small channels vanish");

    let out = ragged(FP8, k, x.clone());
    let capacity = out.column_codes.len() / k;
    let values = dequantize::fp8_block(&out.column_codes, &of_columns(&out, k), [k, capacity], [1, 128]);
    assert!((0..rows * k).all(|i| values[i % k * capacity + i / k] == x[i]));
    assert_ne!(row_values(FP8, k, &out), x);
}

/// 15 copies of `x` in each block with a scale of 1, through the whole op.
fn stochastic(x: f32, blocks: usize, key: u64, stream: u32) -> Vec<f32> {
    let mut values = vec![x; blocks * 16];
    values.iter_mut().step_by(16).for_each(|v| *v = 6.0);
    // The tensor's scale is 1.
    values.extend(padded(&[2688.0], 16));
    let format = BlockFormat::Nvfp4 { stochastic: Some((key, stream)) };
    let out = ragged(format, 16, values);
    assert!(out.row_scales[..blocks].iter().all(|&s| s == 0x38));
    let values = row_values(format, 16, &out);
    values[..blocks * 16].iter().enumerate().filter(|(i, _)| i % 16 != 0).map(|(_, &v)| v).collect()
}

#[test]
fn b171_stochastic_rounding_is_fair_and_keyed() {
    for x in [0.25f32, 1.25] {
        let values = stochastic(x, 6667, 0x5EED, 0);
        let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / values.len() as f64;
        assert!((mean - f64::from(x)).abs() < 0.005, "{x}: {mean}");
        assert_eq!(values, stochastic(x, 6667, 0x5EED, 0), "the same key and stream");
        assert_ne!(values, stochastic(x, 6667, 0x5EED, 1), "another tensor");
        assert_ne!(values, stochastic(x, 6667, 0x5EEE, 0), "another step");
        assert_ne!(values, stochastic(x, 6667, 0x5EED | 1 << 32, 0), "the key's upper word");
    }
    let values = stochastic(0.25, 200, 0, 0);
    assert_ne!(values[..1500], values[1500..], "blocks draw their own bits, under key 0 too");
}

#[test]
fn b213_widths_that_blocks_do_not_divide_are_named() {
    let run = |format, k: usize| {
        let p = Problem { format, bf16: false, x: vec![1.0; 2 * k], k, rows: Rows::Ragged(vec![2]), gather: None };
        quantize(&host(None), &p).map_err(|e| e.to_string())
    };
    let error = run(MXFP8, 1536 / 32).unwrap_err();
    assert!(error.contains("48") && error.contains("32"), "{error}");
    // FP8 blocks may be partial: 1536 / 8 = 192 has two of them.
    assert_eq!(run(FP8, 1536 / 8).unwrap().row_scales.len(), 2 * 2 * 4);
}

#[test]
fn b221_stochastic_rounding_is_never_a_no_op() {
    let format = BlockFormat::Nvfp4 { stochastic: Some((1, 0)) };
    let values = row_values(format, 64, &ragged(format, 64, vec![0.3; 4096]));
    let mean = values.iter().sum::<f32>() / 4096.0;
    assert!((mean - 0.3).abs() < 0.01, "{mean}");
}

#[test]
fn offsets_past_the_rows_count_as_all_rows() {
    let x: Vec<f32> = (0..64 * 32u16).map(f32::from).collect();
    let problem = |sizes: &[usize]| Problem {
        format: MXFP8,
        bf16: false,
        x: x.clone(),
        k: 32,
        rows: Rows::Ragged(sizes.to_vec()),
        gather: None,
    };
    let (beyond, within) = [&[40, 60], &[40, 24]].map(|sizes| quantize(&host(None), &problem(sizes)).unwrap()).into();
    assert_eq!(beyond.row_codes, within.row_codes);
    assert_eq!((beyond.column_codes, beyond.column_scales), (within.column_codes, within.column_scales));
}
