//! Faults that users of other stacks met: the tests bear the ids of `tests/data/cases.jsonl`.

use dropless_core::ops::{GemmKind, GroupedGemm, Operand};
use dropless_core::{Backend, DType, NumericModel};

use super::problem::{Data, FORMATS, Format, GUARD, KINDS, Problem, Random, assert_same, host, levels, sizes_for};

const NAN: u32 = 0x7FC0_7FC0;
const LARGE: u32 = 0x7F00_7F00;

/// Small integers, whose products and sums are exact under every model.
fn integers(problem: &mut Problem, seed: u64) {
    for side in 0..2 {
        problem.set(side, |row, col| integer(seed, side, row, col) as f32);
    }
}

fn integer(seed: u64, side: usize, row: usize, col: usize) -> i64 {
    Random(seed ^ (side as u64) << 60 ^ (row as u64) << 30 ^ col as u64).below(5) as i64 - 2
}

/// The product of such integers, in integers.
fn integer_product(problem: &Problem, seed: u64) -> Vec<f32> {
    let Problem { kind, n, k, .. } = *problem;
    let a = |row, col| integer(seed, 0, row, col);
    let b = |row, col| integer(seed, 1, row, col);
    let mut out = vec![f32::from_bits(GUARD); problem.out_shape().iter().product()];
    for g in 0..problem.groups() {
        let group = problem.group(g);
        let mut put = |at: usize, sum: i64| out[at] = sum as f32;
        match kind {
            GemmKind::Forward => group.for_each(|i| {
                (0..n).for_each(|j| put(i * n + j, (0..k).map(|t| a(i, t) * b(g * n + j, t)).sum()));
            }),
            GemmKind::Dgrad => group.for_each(|i| {
                (0..k).for_each(|j| put(i * k + j, (0..n).map(|t| a(i, t) * b(g * n + t, j)).sum()));
            }),
            GemmKind::Wgrad => (0..n).for_each(|i| {
                let rows = || group.clone();
                (0..k).for_each(|j| put((g * n + i) * k + j, rows().map(|t| a(t, i) * b(t, j)).sum()));
            }),
        }
    }
    out
}

/// Runs at every level of vector instructions under Hopper's model.
fn everywhere(problem: &Problem, before: u32, check: impl Fn(&[f32])) {
    for simd in levels() {
        check(&problem.run(&host(NumericModel::Hopper, simd), before).unwrap());
    }
}

#[test]
fn b001_idle_experts_get_zero_weight_gradients() {
    for format in FORMATS {
        for sizes in [&[3, 0, 2, 0][..], &[5, 0, 80, 14, 0, 3]] {
            for out in [DType::F32, DType::Bf16] {
                let sizes = sizes_for(GemmKind::Wgrad, format, sizes);
                let mut problem = Problem::new(GemmKind::Wgrad, format, &sizes, 8, 8, 0);
                problem.out = out;
                integers(&mut problem, 1);
                let want = integer_product(&problem, 1);
                for before in [NAN, LARGE] {
                    everywhere(&problem, before, |got| {
                        for (got, want) in got.iter().zip(&want) {
                            assert_eq!(got.to_bits(), want.to_bits(), "{problem}");
                        }
                    });
                }
            }
        }
    }
}

#[test]
fn b002_an_empty_group_takes_no_neighbouring_rows() {
    for sizes in [&[8, 0, 8, 0][..], &[17, 0, 1, 0, 0, 14], &[0, 0, 32]] {
        let mut problem = Problem::new(GemmKind::Wgrad, Format::Bf16, sizes, 4, 8, 0);
        problem.set(0, |_, _| 1.0);
        problem.set(1, |row, _| (row + 1) as f32);
        everywhere(&problem, NAN, |got| {
            for g in 0..sizes.len() {
                let sum: usize = problem.group(g).map(|row| row + 1).sum();
                assert!(got[g * 32..(g + 1) * 32].iter().all(|&x| x == sum as f32), "{problem}: group {g}");
            }
        });
    }
}

#[test]
fn b003_the_last_expert_may_be_empty() {
    for sizes in [&[4, 4, 0][..], &[0, 0, 8], &[0]] {
        for kind in KINDS {
            let mut problem = Problem::new(kind, Format::Bf16, sizes, 16, 16, 0);
            integers(&mut problem, 2);
            let want = integer_product(&problem, 2);
            everywhere(&problem, NAN, |got| assert_eq!(got, want, "{problem}"));
        }
    }
    // Views of the experts' parts: the empty one starts where the buffer ends.
    let host = host(NumericModel::Hopper, levels().next().unwrap());
    let out = (&host as &dyn Backend).upload(DType::F32, &[8, 16], &[0.0f32; 128]).unwrap();
    assert_eq!(out.slice(8, 8).unwrap().shape(), [0, 16]);
    assert!((&host as &dyn Backend).download::<f32>(&out.slice(8, 8).unwrap()).unwrap().is_empty());
}

#[test]
fn b006_consecutive_empty_groups_shift_no_rows() {
    let mut problem = Problem::new(GemmKind::Forward, Format::Bf16, &[0, 0, 7, 0, 0, 0, 9, 0], 4, 4, 0);
    problem.set(0, |_, _| 1.0);
    problem.set(1, |row, col| if row % 4 == col { (row / 4 + 1) as f32 } else { 0.0 });
    everywhere(&problem, NAN, |got| {
        assert!(got[..28].iter().all(|&x| x == 3.0));
        assert!(got[28..].iter().all(|&x| x == 7.0));
        assert_eq!(got.len(), 64);
    });
}

#[test]
fn b012_no_tokens_at_all() {
    for format in FORMATS {
        for kind in KINDS {
            let mut problem = Problem::new(kind, format, &[0, 0, 0], 32, 32, 0);
            everywhere(&problem, NAN, |got| {
                assert_eq!(got.len(), if kind == GemmKind::Wgrad { 3 * 32 * 32 } else { 0 });
                assert!(got.iter().all(|x| x.to_bits() == 0), "{problem}");
            });
            problem.accumulate = true;
            everywhere(&problem, 2.0f32.to_bits(), |got| assert!(got.iter().all(|&x| x == 2.0), "{problem}"));
        }
    }
}

#[test]
fn b030_group_sizes_need_not_be_multiples_of_the_block() {
    let sizes = [44, 20, 0, 33, 1];
    for format in [Format::Mxfp8, Format::Fp8Block] {
        for kind in [GemmKind::Forward, GemmKind::Dgrad] {
            Problem::new(kind, format, &sizes, 64, 64, 3).check();
        }
        // The columns that a weight gradient takes are padded by the quantization; other offsets count as the block below.
        let mut problem = Problem::new(GemmKind::Wgrad, format, &sizes_for(GemmKind::Wgrad, format, &sizes), 64, 64, 3);
        problem.check();
        let padded = problem.expected(NumericModel::Hopper, 0);
        problem.offsets.iter_mut().skip(1).for_each(|offset| *offset += 5);
        everywhere(&problem, 0, |got| assert_same(got, &padded, || problem.to_string()));
    }
}

#[test]
fn b033_any_number_of_valid_rows() {
    for most in [1, 8, 16, 32, 63, 64, 65] {
        for kind in [GemmKind::Forward, GemmKind::Dgrad] {
            let mut problem = Problem::new(kind, Format::Bf16, &[1, most, most / 2], 48, 48, 0);
            integers(&mut problem, 4);
            let mut want = integer_product(&problem, 4);
            problem.add_rows(32);
            want.resize(want.len() + 32 * 48, f32::from_bits(GUARD));
            everywhere(&problem, GUARD, |got| {
                assert!(got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits()), "{problem}");
            });
        }
    }
}

#[test]
fn b036_a_single_row() {
    for (sizes, n) in [(&[1][..], 256), (&[1], 512), (&[3], 256), (&[1, 0, 1], 256)] {
        let mut problem = Problem::new(GemmKind::Forward, Format::Bf16, sizes, n, 256, 0);
        problem.set(0, |_, _| 1.0);
        problem.set(1, |_, _| 1.0);
        everywhere(&problem, NAN, |got| assert!(got.iter().all(|&x| x == 256.0), "{problem}"));
    }
}

#[test]
fn b120_poisoned_rows_past_the_end_reach_nothing() {
    for kind in KINDS {
        let exact = Problem::new(kind, Format::Bf16, &[3, 0, 5], 24, 40, 5);
        let mut poisoned = exact.clone();
        poisoned.add_rows(8);
        for simd in levels() {
            let host = host(NumericModel::Hopper, simd);
            let want = exact.run(&host, NAN).unwrap();
            for _ in 0..2 {
                let got = poisoned.run(&host, NAN).unwrap();
                super::problem::assert_same(&got[..want.len()], &want, || poisoned.to_string());
            }
        }
    }
}

#[test]
fn b12d_accumulation_happens_once() {
    let mut problem = Problem::new(GemmKind::Wgrad, Format::Bf16, &[9, 0, 23], 16, 40, 0);
    integers(&mut problem, 6);
    let want: Vec<f32> = integer_product(&problem, 6).iter().map(|x| 1.0 + x).collect();
    problem.accumulate = true;
    for simd in levels() {
        let host = host(NumericModel::Hopper, simd);
        for _ in 0..2 {
            assert_eq!(problem.run(&host, 1.0f32.to_bits()).unwrap(), want);
        }
    }
}

#[test]
fn b12e_no_size_of_matrix_is_special() {
    // Around the width of a tile of registers, and one shape beyond every cache block.
    let mut shapes: Vec<_> = [32, 64, 65, 223].into_iter().flat_map(|n| [32, 65, 223].map(|k| (n, k))).collect();
    shapes.push((258, 130));
    for (n, k) in shapes {
        for kind in KINDS {
            for format in [Format::F32, Format::Bf16] {
                let mut problem = Problem::new(kind, format, &[1, 31, 32, 33, 129], n, k, 0);
                integers(&mut problem, 7);
                let want = integer_product(&problem, 7);
                for simd in levels().skip(1).chain(levels().take(usize::from(n < 65))) {
                    let got = problem.run(&host(NumericModel::Hopper, simd), NAN).unwrap();
                    assert!(got == want, "{simd:?} {problem}");
                }
            }
        }
    }
}

#[test]
fn b136_weight_gradients_take_scales_along_the_tokens() {
    for format in [Format::Mxfp8, Format::Fp8Block] {
        let mut problem = Problem::new(GemmKind::Wgrad, format, &[256], 128, 128, 0);
        // Every token of a channel is 2^(channel % 4), tokens 128.. 64 times that.
        let block = if format == Format::Mxfp8 { 32 } else { 128 };
        let exponent = |channel: usize, part: usize| (channel % 4) as i32 + if part * block >= 128 { 6 } else { 0 };
        for side in 0..2 {
            problem.set(side, |_, _| 1.0);
            match &mut problem.data[side] {
                Data::Mxfp8(_, scales) => {
                    scales.iter_mut().enumerate().for_each(|(i, s)| *s = (127 + exponent(i % 128, i / 128)) as u8);
                }
                Data::Fp8Block(_, scales) => {
                    scales.iter_mut().enumerate().for_each(|(i, s)| *s = 2f32.powi(exponent(i % 128, i / 128)));
                }
                _ => unreachable!("quantized formats only"),
            }
        }
        let correct = |got: &[f32]| {
            got.iter().enumerate().all(|(at, &got)| {
                let (i, j) = (at / 128, at % 128);
                got == 2f32.powi((i % 4 + j % 4) as i32) * (128.0 + 128.0 * 4096.0)
            })
        };
        everywhere(&problem, NAN, |got| assert!(correct(got), "{problem}"));
        // The mutant: the first tokens' scales for all tokens.
        match &mut problem.data[0] {
            Data::Mxfp8(_, scales) => scales.copy_within(..4 * 128, 4 * 128),
            Data::Fp8Block(_, scales) => scales.copy_within(..128, 128),
            _ => unreachable!("quantized formats only"),
        }
        everywhere(&problem, NAN, |got| assert!(!correct(got), "{problem}"));
    }
}

#[test]
fn b230_offsets_count_within_the_rows_and_ascend() {
    for (kind, format) in KINDS.into_iter().flat_map(|kind| [(kind, Format::Bf16), (kind, Format::F32)]) {
        let good = Problem::new(kind, format, &[5, 3], 8, 8, 0);
        let u = u32::MAX;
        for (offsets, counted) in [
            ([0, 5, 3], [0, 3, 3]),
            ([0, 5, 9], [0, 5, 8]),
            ([1, 5, 8], [0, 5, 8]),
            // -1 as a device would see it.
            ([0, u, 8], [0, 8, 8]),
            ([u, u, u], [0, 8, 8]),
        ] {
            let problem = |offsets: [u32; 3]| Problem { offsets: offsets.to_vec(), ..good.clone() };
            let want = problem(counted).expected(NumericModel::Hopper, GUARD);
            everywhere(&problem(offsets), GUARD, |got| assert_same(got, &want, || format!("{kind:?} {offsets:?}")));
        }
    }
}

#[test]
fn b230_a_gathered_row_that_is_not_there_is_zero() {
    for (kind, format) in KINDS.into_iter().flat_map(|kind| [(kind, Format::Bf16), (kind, Format::F32)]) {
        let mut wild = Problem::new(kind, format, &[5, 3], 8, 8, 0);
        wild.gather[0] = Some(vec![0, 1, 8, 3, 4, u32::MAX, 6, 7]);
        let mut zero = wild.clone();
        let columns = if kind == GemmKind::Forward { wild.k } else { wild.n };
        match &mut zero.data[0] {
            Data::F32(values) => values.extend(vec![0.0; columns]),
            Data::Bf16(codes) => codes.extend(vec![0; columns]),
            _ => unreachable!("plain formats only"),
        }
        zero.gather[0] = Some(vec![0, 1, 8, 3, 4, 8, 6, 7]);
        let want = zero.expected(NumericModel::Hopper, GUARD);
        everywhere(&wild, GUARD, |got| assert_same(got, &want, || wild.to_string()));
    }
}

#[test]
fn b230_scales_of_another_shape_are_named() {
    let host = host(NumericModel::Hopper, levels().last().unwrap());
    let backend: &dyn Backend = &host;
    let codes = backend.upload(DType::E4m3, &[2, 8, 64], &[0u8; 1024]).unwrap();
    let rows = backend.upload(DType::E4m3, &[8, 64], &[0u8; 512]).unwrap();
    let scales = backend.upload(DType::Ue8m0, &[2, 8, 2], &[0u8; 32]).unwrap();
    let wrong = backend.upload(DType::Ue8m0, &[8, 64], &[0u8; 512]).unwrap();
    let offsets = backend.upload(DType::U32, &[3], &[0u32, 5, 8]).unwrap();
    let out = backend.upload(DType::F32, &[8, 8], &[0.0f32; 64]).unwrap();
    let (a, b) = (
        Operand::Mxfp8 { codes: &rows, scales: &wrong, gather: None },
        Operand::Mxfp8 { codes: &codes, scales: &scales, gather: None },
    );
    let kind = GemmKind::Forward;
    let op = GroupedGemm { kind, a, b, offsets: &offsets, out: &out, accumulate: false };
    let error = op.run(backend).unwrap_err().to_string();
    assert!(error.contains("scales") && error.contains("[8, 2]"), "{error}");

    // The host is as good as before.
    Problem::new(GemmKind::Forward, Format::Bf16, &[5, 3], 8, 8, 0).run(&host, 0).unwrap();
}
