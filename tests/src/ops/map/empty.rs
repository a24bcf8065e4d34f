//! Every op on tensors without rows.

use dropless_core::ops::*;
use dropless_core::{Backend, DType, Tensor};

use super::harness::*;

#[test]
fn b252_every_op_accepts_tensors_without_rows() {
    for host in hosts() {
        let b = &host as &dyn Backend;
        let float = |shape: &[usize]| guarded(b, DType::F32, shape);
        let rows = |cols: usize| float(&[0, cols]);
        let none = || integers(b, &[0], &[]);
        let (one, x) = (float(&[1]), rows(16));
        let shape = MlaShape { heads: 2, nope: 4, rope: 2, v: 4, pairs: Pairs::Neighbours };
        let (cos, sin) = (float(&[3, 1]), float(&[3, 1]));
        let untouched = |t: &Tensor| assert!(read(b, t).iter().all(|&x| x == GUARD));
        let run = |op: Map<'_>| op.run(b).unwrap_or_else(|error| panic!("{}: {error}", op.name()));

        run(Fill { out: &rows(16), value: 1.0 }.into());
        run(Cast { x: &x, out: &guarded(b, DType::Bf16, &[0, 16]) }.into());
        run(Add { a: &x, b: &rows(16), c: Some(&rows(16)), out: &rows(16) }.into());
        run(CopyColumns { x: &x, x_column: 1, out: &rows(4), out_column: 0, width: 4 }.into());
        run(GatherRows { x: &x, index: &none(), out: &rows(16) }.into());
        run(GatherRows { x: &x, index: &none(), out: &guarded(b, DType::Bf16, &[0, 16]) }.into());
        run(RmsNorm { x: &x, weight: &float(&[16]), eps: 1e-6, out: &rows(16), rstd: &float(&[0]) }.into());
        let d_weight = float(&[1, 16]);
        run(RmsNormGrad {
            dy: &rows(16),
            x: &x,
            weight: &float(&[16]),
            rstd: &float(&[0]),
            residual: Some(&rows(16)),
            dx: &rows(16),
            d_weight: &d_weight,
        }
        .into());
        untouched(&d_weight);
        let (weight, limit) = (float(&[0]), integers(b, &[1], &[0]));
        run(Swiglu { gate_up: &x, weight: Some(&weight), limit: Some(&limit), out: &rows(8) }.into());
        run(SwigluGrad {
            gate_up: &x,
            weight: Some(&weight),
            limit: Some(&limit),
            d_out: &rows(8),
            d_gate_up: &rows(16),
            d_weight: Some(&float(&[0])),
        }
        .into());
        run(Mla {
            q_in: &rows(12),
            kv: &rows(16),
            k_rope: &rows(2),
            positions: &none(),
            cos: &cos,
            sin: &sin,
            q: &rows(12),
            k: &rows(12),
            v: &rows(8),
            shape,
        }
        .into());
        run(MlaGrad {
            d_q: &rows(12),
            d_k: &rows(12),
            d_v: &rows(8),
            positions: &none(),
            cos: &cos,
            sin: &sin,
            d_q_in: &rows(12),
            d_kv: &rows(16),
            d_k_rope: &rows(2),
            shape,
        }
        .into());
        let (pairs, inverse) = (Pairs::Halves, false);
        run(Rotary { x: &x, positions: &none(), cos: &cos, sin: &sin, pairs, inverse, out: &rows(16) }.into());
        let (slots, leaves) = (integers(b, &[0, 2], &[]), (0, 4));
        run(Combine {
            x: &x,
            slots: &slots,
            ids: Some(&integers(b, &[0, 2], &[])),
            leaves,
            window: None,
            add: [Some(&rows(16)), None],
            out: &rows(16),
        }
        .into());
        let gradient = rows(16);
        run(CrossEntropy { logits: &x, targets: &none(), scale: &one, loss: &float(&[0]), d_logits: Some(&gradient) }
            .into());
        run(SumSquares { x: &x, out: &float(&[0]) }.into());
        run(TreeSum { parts: &float(&[2, 0]), out: &float(&[0]) }.into());
        let table = float(&[1, 3, 16]);
        run(EmbeddingGrad { dy: &x, ids: &none(), d_table: &table }.into());
        untouched(&table);
        run(AdamW {
            grad: &float(&[0]),
            clip: &float(&[2]),
            step: &float(&[3]),
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: 0.0,
            param: &float(&[0]),
            m: &float(&[0]),
            v: &float(&[0]),
            param_bf16: Some(&guarded(b, DType::Bf16, &[0])),
        }
        .into());
        run(BiasUpdate { counts: &integers(b, &[1, 0], &[]), rate: 1.0, bias: &float(&[0]) }.into());

        // Sums of nothing are +0.
        let sums = float(&[2, 16]);
        run(SumRows { x: &x, out: &sums }.into());
        assert!(read(b, &sums).iter().all(|x| x.to_bits() == 0));
        let squares = float(&[2]);
        run(SumSquares { x: &float(&[2, 0]), out: &squares }.into());
        assert!(read(b, &squares).iter().all(|x| x.to_bits() == 0));
        let clip = float(&[2]);
        run(ClipScale { squares: &float(&[0]), max_norm: 1.0, out: &clip }.into());
        assert_eq!(read(b, &clip), [0.0, 1.0]);
    }
}
