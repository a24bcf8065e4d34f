//! Every layout and every level of vector instructions against the specification.

use dropless_core::host::Simd;
use dropless_core::ops::BlockFormat;
use proptest::prelude::*;

use super::problem::{FP8, FP8_F32, MXFP8, MXFP8_FLOOR, NVFP4, Problem, Rows, host, hosts, quantize};
use crate::specification::Specification;

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
    // Rows to gather from, some of which are not there.
    let gather = prop::option::of(1usize..50);
    (format, any::<bool>(), rows, columns, prop::collection::vec(value(), 997), gather).prop_map(
        |(format, bf16, (rows, count), k, pool, gather)| {
            let sources = gather.filter(|_| matches!(rows, Rows::Ragged(_)));
            let x = (0..sources.unwrap_or(count) * k).map(|i| pool[i % pool.len()]).collect();
            let index = |sources: usize| (0..count).map(|i| (i * 7919 % (sources + 3)) as u32).collect();
            Problem { format, bf16, x, k, rows, gather: sources.map(index) }
        },
    )
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Every layout and every vector level gives the bytes of the specification, and writes nothing else.
    #[test]
    fn layouts_and_levels_agree_with_the_specification(p in problem()) {
        let want = quantize(&Specification::new(host(Some(Simd::Plain))), &p).expect("the problem is valid");
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
