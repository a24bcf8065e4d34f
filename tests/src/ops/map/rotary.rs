//! Rotary embedding and the assembly of latent attention.

use dropless_core::ops::{Mla, MlaGrad, MlaShape, Pairs, Rotary};
use dropless_core::{DType, Tensor};

use crate::differential::{Maker, Problem};

pub(super) const PROBLEMS: &[Problem] = &[Problem::new("rotary", rotary), Problem::new("mla", mla)];

const PAIRS: [Pairs; 2] = [Pairs::Neighbours, Pairs::Halves];

/// Positions and tables for `tokens` tokens and `pairs` pairs.
fn tables(m: &mut Maker<'_>, tokens: usize, pairs: usize) -> [Tensor; 3] {
    let mut positions: Vec<u32> = (0..tokens).map(|_| m.random.below(11) as u32).collect();
    m.stray(&mut positions, 11);
    [m.integers(&[tokens], &positions), m.tensor(DType::F32, &[11, pairs]), m.tensor(DType::F32, &[11, pairs])]
}

fn rotary(m: &mut Maker<'_>) {
    let (tokens, heads, half, dtype) = (m.extent(20), m.extent(5), m.extent(40), m.float());
    let [positions, cos, sin] = tables(m, tokens, half);
    let shape = [tokens, heads * 2 * half];
    let (x, out) = (m.tensor(dtype, &shape), m.output("out", dtype, &shape));
    let (inverse, pairs) = (m.flag(), m.one_of(&PAIRS));
    m.run(Rotary { x: &x, positions: &positions, cos: &cos, sin: &sin, pairs, inverse, out: &out }, Rotary::run);
}

fn mla(m: &mut Maker<'_>) {
    let (tokens, heads, nope, pairs, v) = (m.extent(20), m.extent(5), m.below(40), m.extent(20), m.extent(30));
    let (rope, dtype) = (2 * pairs, m.float());
    let [positions, cos, sin] = tables(m, tokens, pairs);
    let shape = MlaShape { heads, nope, rope, v, pairs: m.one_of(&PAIRS) };
    let queries = [tokens, heads * (nope + rope)];
    let q_in = m.tensor(dtype, &queries);
    let [q, k] = ["q", "k"].map(|name| m.output(name, dtype, &queries));
    let kv = m.tensor(dtype, &[tokens, heads * (nope + v)]);
    let (k_rope, value) = (m.tensor(dtype, &[tokens, rope]), m.output("v", dtype, &[tokens, heads * v]));
    m.run(
        Mla {
            q_in: &q_in,
            kv: &kv,
            k_rope: &k_rope,
            positions: &positions,
            cos: &cos,
            sin: &sin,
            q: &q,
            k: &k,
            v: &value,
            shape,
        },
        Mla::run,
    );
    let [d_q_in, d_kv] = [("d_q_in", &q_in), ("d_kv", &kv)].map(|(name, of)| m.output(name, dtype, of.shape()));
    let d_k_rope = m.output("d_k_rope", dtype, &[tokens, rope]);
    m.run(
        MlaGrad {
            d_q: &q,
            d_k: &k,
            d_v: &value,
            positions: &positions,
            cos: &cos,
            sin: &sin,
            d_q_in: &d_q_in,
            d_kv: &d_kv,
            d_k_rope: &d_k_rope,
            shape,
        },
        MlaGrad::run,
    );
}

#[cfg(test)]
mod tests {
    use dropless_core::ops::{Mla, MlaGrad, MlaShape, Pairs, Rotary};
    use dropless_core::{Backend, DType};

    use super::super::harness::*;
    use super::PAIRS;

    const POSITIONS: usize = 20;

    /// Cosines and sines of `pairs` angles for each position.
    fn tables(pairs: usize) -> [Vec<f32>; 2] {
        let angle = |i: usize| (i / pairs) as f64 / 100f64.powf((i % pairs) as f64 / pairs as f64);
        let table = |f: fn(f64) -> f64| (0..POSITIONS * pairs).map(|i| f(angle(i)) as f32).collect();
        [table(f64::cos), table(f64::sin)]
    }

    /// The pair (a, b) rotated by the angle of `position` and `pair`, each with the size of its terms.
    fn rotated([cos, sin]: &[Vec<f32>; 2], at: usize, a: f32, b: f32, inverse: bool) -> [(f64, f64); 2] {
        let (a, b, c) = (f64::from(a), f64::from(b), f64::from(cos[at]));
        let s = f64::from(sin[at]) * if inverse { -1.0 } else { 1.0 };
        let bound = |x: f64, y: f64| (x.abs() + y.abs()) * 2.0 * U;
        [(a * c - b * s, bound(a * c, b * s)), (b * c + a * s, bound(b * c, a * s))]
    }

    /// The columns of pair i of `count`.
    fn columns(pairs: Pairs, i: usize, count: usize) -> [usize; 2] {
        match pairs {
            Pairs::Neighbours => [2 * i, 2 * i + 1],
            Pairs::Halves => [i, i + count],
        }
    }

    #[test]
    fn rotary_turns_the_pairs_of_every_head_and_back() {
        for (dtype, pairs) in FLOATS.into_iter().flat_map(|dtype| PAIRS.map(|pairs| (dtype, pairs))) {
            for (tokens, heads, dim) in [(1, 1, 2), (70, 3, 10), (33, 2, 64)] {
                let half = dim / 2;
                let table = tables(half);
                let mut random = Random(dim as u64);
                let x = random.floats(dtype, tokens * heads * dim, 1.0);
                let positions = random.indices(tokens, POSITIONS);
                for inverse in [false, true] {
                    let got = everywhere(|b| {
                        let out = guarded(b, dtype, &[tokens, heads * dim]);
                        Rotary {
                            x: &floats(b, dtype, &[tokens, heads * dim], &x),
                            positions: &integers(b, &[tokens], &positions),
                            cos: &floats(b, DType::F32, &[POSITIONS, half], &table[0]),
                            sin: &floats(b, DType::F32, &[POSITIONS, half], &table[1]),
                            pairs,
                            inverse,
                            out: &out,
                        }
                        .run(b)
                        .unwrap();
                        vec![read(b, &out)]
                    });
                    let mut want = vec![(0.0, 0.0); x.len()];
                    for pair in 0..x.len() / 2 {
                        let (head, i) = (pair / half, pair % half);
                        let [a, b] = columns(pairs, i, half).map(|column| head * dim + column);
                        let angle = positions[head / heads] as usize * half + i;
                        [want[a], want[b]] = rotated(&table, angle, x[a], x[b], inverse);
                    }
                    close(dtype, &got[0], &want);
                }
            }
        }
    }

    fn shape(pairs: Pairs) -> MlaShape {
        MlaShape { heads: 3, nope: 5, rope: 4, v: 7, pairs }
    }

    /// Columns of q, kv, k_rope and v.
    const COLUMNS: [usize; 4] = [3 * (5 + 4), 3 * (5 + 7), 4, 3 * 7];

    /// q, k and v.
    fn mla(dtype: DType, pairs: Pairs, positions: &[u32], inputs: [&[f32]; 3]) -> [Vec<f32>; 3] {
        let (tokens, table) = (positions.len(), tables(2));
        everywhere(|b| {
            let [q, k, v] = [0, 0, 3].map(|i: usize| guarded(b, dtype, &[tokens, COLUMNS[i]]));
            let matrix = |i: usize| floats(b, dtype, &[tokens, COLUMNS[i]], inputs[i]);
            Mla {
                q_in: &matrix(0),
                kv: &matrix(1),
                k_rope: &matrix(2),
                positions: &integers(b, &[tokens], positions),
                cos: &floats(b, DType::F32, &[POSITIONS, 2], &table[0]),
                sin: &floats(b, DType::F32, &[POSITIONS, 2], &table[1]),
                q: &q,
                k: &k,
                v: &v,
                shape: shape(pairs),
            }
            .run(b)
            .unwrap();
            vec![read(b, &q), read(b, &k), read(b, &v)]
        })
        .try_into()
        .unwrap()
    }

    /// d_q_in, d_kv and d_k_rope.
    fn mla_grad(dtype: DType, pairs: Pairs, positions: &[u32], grads: [&[f32]; 3]) -> [Vec<f32>; 3] {
        let (tokens, table) = (positions.len(), tables(2));
        everywhere(|b| {
            let [d_q_in, d_kv, d_k_rope] = [0, 1, 2].map(|i: usize| guarded(b, dtype, &[tokens, COLUMNS[i]]));
            let matrix = |i: usize, column: usize| floats(b, dtype, &[tokens, COLUMNS[column]], grads[i]);
            MlaGrad {
                d_q: &matrix(0, 0),
                d_k: &matrix(1, 0),
                d_v: &matrix(2, 3),
                positions: &integers(b, &[tokens], positions),
                cos: &floats(b, DType::F32, &[POSITIONS, 2], &table[0]),
                sin: &floats(b, DType::F32, &[POSITIONS, 2], &table[1]),
                d_q_in: &d_q_in,
                d_kv: &d_kv,
                d_k_rope: &d_k_rope,
                shape: shape(pairs),
            }
            .run(b)
            .unwrap();
            vec![read(b, &d_q_in), read(b, &d_kv), read(b, &d_k_rope)]
        })
        .try_into()
        .unwrap()
    }

    #[test]
    fn mla_rotates_pairs_and_repeats_the_shared_key() {
        let (tokens, table) = (70, tables(2));
        for (dtype, pairs) in FLOATS.into_iter().flat_map(|dtype| PAIRS.map(|pairs| (dtype, pairs))) {
            let MlaShape { heads, nope, rope, v, .. } = shape(pairs);
            let mut random = Random(9);
            let [q_in, kv, k_rope] = [0, 1, 2].map(|i: usize| random.floats(dtype, tokens * COLUMNS[i], 1.0));
            let positions = random.indices(tokens, POSITIONS);
            let got = mla(dtype, pairs, &positions, [&q_in, &kv, &k_rope]);
            let (mut q, mut k, mut values) = (Vec::new(), Vec::new(), Vec::new());
            for head in 0..tokens * heads {
                let t = head / heads;
                let rotary = |x: &[f32]| -> Vec<(f64, f64)> {
                    let mut out = vec![(0.0, 0.0); rope];
                    for i in 0..rope / 2 {
                        let [a, b] = columns(pairs, i, rope / 2);
                        [out[a], out[b]] = rotated(&table, positions[t] as usize * 2 + i, x[a], x[b], false);
                    }
                    out
                };
                let copied = |x: &[f32]| x.iter().map(|&x| (f64::from(x), 0.0)).collect::<Vec<_>>();
                let query = &q_in[head * (nope + rope)..(head + 1) * (nope + rope)];
                let key_value = &kv[head * (nope + v)..(head + 1) * (nope + v)];
                q.extend(copied(&query[..nope]));
                q.extend(rotary(&query[nope..]));
                k.extend(copied(&key_value[..nope]));
                k.extend(rotary(&k_rope[t * rope..(t + 1) * rope]));
                values.extend(copied(&key_value[nope..]));
            }
            for (got, want) in got.iter().zip([q, k, values]) {
                close(dtype, got, &want);
            }
        }
    }

    /// Mla is linear, so its gradient is its transpose: <Mla(x), g> = <x, MlaGrad(g)> for every x and g.
    #[test]
    fn mla_grad_is_the_transpose_of_mla() {
        let positions = [13u32];
        for (dtype, pairs) in FLOATS.into_iter().flat_map(|dtype| PAIRS.map(|pairs| (dtype, pairs))) {
            let grads = [0, 0, 3].map(|i: usize| Random(70 + i as u64).floats(dtype, COLUMNS[i], 1.0));
            let got = mla_grad(dtype, pairs, &positions, [&grads[0], &grads[1], &grads[2]]);
            for (input, got) in got.iter().enumerate() {
                let want: Vec<(f64, f64)> = (0..COLUMNS[input])
                    .map(|column| {
                        let mut x = [0, 1, 2].map(|i: usize| vec![0.0f32; COLUMNS[i]]);
                        x[input][column] = 1.0;
                        let y = mla(DType::F32, pairs, &positions, [&x[0], &x[1], &x[2]]);
                        let terms =
                            y.iter().flatten().zip(grads.iter().flatten()).map(|(&y, &g)| f64::from(y) * f64::from(g));
                        let (sum, size) = terms.fold((0.0, 0.0), |(s, m), x: f64| (s + x, m + x.abs()));
                        // At most one addition for each head, the products and sum of the rotation, and the rounding of y.
                        (sum, size * (3.0 + 4.0) * U)
                    })
                    .collect();
                close(dtype, got, &want);
            }
        }
    }

    #[test]
    fn a_position_past_the_tables_rotates_nothing() {
        for host in hosts() {
            let b = &host as &dyn Backend;
            let x = [1.0, 2.0, 3.0, 4.0, -0.0, f32::INFINITY, 7.0, 8.0];
            let (x_in, out) = (floats(b, DType::F32, &[2, 4], &x), guarded(b, DType::F32, &[2, 4]));
            Rotary {
                x: &x_in,
                positions: &integers(b, &[2], &[0, 20]),
                cos: &floats(b, DType::F32, &[POSITIONS, 1], &[0.0; POSITIONS]),
                sin: &floats(b, DType::F32, &[POSITIONS, 1], &[1.0; POSITIONS]),
                pairs: Pairs::Halves,
                inverse: false,
                out: &out,
            }
            .run(b)
            .unwrap();
            let got = read(b, &out);
            assert_eq!(got[..4], [-2.0, 1.0, -4.0, 3.0], "a quarter turn");
            assert_eq!(
                got[4..].iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                x[4..].iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            );
        }
    }
}
