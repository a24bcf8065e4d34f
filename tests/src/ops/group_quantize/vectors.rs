//! Vectors that numpy and ml_dtypes made.

use std::collections::BTreeSet;
use std::path::Path;

use dropless_core::numerics::bf16;
use safetensors::SafeTensors;

use super::problem::{FP8, MXFP8, NVFP4, Output, Problem, Rows, hosts, quantize};

#[test]
fn recorded_vectors_are_reproduced() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/formats.safetensors");
    let file = std::fs::read(path).unwrap();
    let vectors = SafeTensors::deserialize(&file).unwrap();
    for host in hosts() {
        let mut left: BTreeSet<&str> = vectors.names().into_iter().collect();
        for set in ["small", "tiny", "wide"] {
            let x = vectors.tensor(&format!("{set}.x_bf16")).unwrap();
            left.remove(format!("{set}.x_bf16").as_str());
            let values =
                x.data().chunks_exact(2).map(|c| bf16::to_f32(bytemuck::pod_read_unaligned(c))).collect::<Vec<_>>();
            let (n, k) = (x.shape()[0], x.shape()[1]);
            let run = |format, square| {
                let rows = if square { Rows::Stacked { groups: 1, square } } else { Rows::Ragged(vec![n]) };
                quantize(&host, &Problem { format, bf16: true, x: values.clone(), k, rows, gather: None }).unwrap()
            };
            let mut check = |key: &str, got: &[u8]| {
                let key = format!("{set}.{key}");
                // The set `wide` was recorded for MXFP8 only.
                let Ok(want) = vectors.tensor(&key) else { return assert_eq!(set, "wide", "{key} is missing") };
                let differ = got.iter().zip(want.data()).filter(|(a, b)| a != b).count();
                assert_eq!(got.len(), want.data().len(), "{key}");
                assert_eq!(differ, 0, "{key}: {differ} of {} bytes differ under {:?}", got.len(), host.simd());
                left.remove(key.as_str());
            };

            let Output { row_codes, row_scales, column_codes, column_scales, .. } = run(MXFP8, false);
            check("mxfp8.row.q", &row_codes);
            check("mxfp8.row.scale", &row_scales);
            check("mxfp8.col.q", &column_codes[..n * k]);
            check("mxfp8.col.scale", &column_scales[..n / 32 * k]);

            let Output { row_codes, row_scales, .. } = run(FP8, false);
            check("fp8_1xB.q", &row_codes);
            check("fp8_1xB.scale_inv", &row_scales);
            let Output { row_codes, row_scales, .. } = run(FP8, true);
            check("fp8_BxB.q", &row_codes);
            check("fp8_BxB.scale_inv", &row_scales);

            let Output { row_codes, row_scales, amax, .. } = run(NVFP4, false);
            let unpacked: Vec<u8> = row_codes.iter().flat_map(|byte| [byte & 15, byte >> 4]).collect();
            check("nvfp4.q", &unpacked);
            check("nvfp4.scale", &row_scales);
            check("nvfp4.amax", bytemuck::cast_slice(&amax));
        }
        assert!(left.is_empty(), "not compared: {left:?}");
    }
}
