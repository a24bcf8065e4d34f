// The gradients of SwiGLU: NUMERICS.md, "Row-wise ops". A workgroup has 16 rows, four lanes each, which are those of a
// quad sum.

const BLOCK: u32 = 256u;

var<workgroup> sums: array<u32, 64>;

// The quad's sum of the lanes' values, by all lanes.
fn quad(lane: u32, value: u32) -> u32 {
    workgroupBarrier();
    sums[lane] = value;
    workgroupBarrier();
    let first = lane & ~3u;
    return f32_add(f32_add(sums[first], sums[first + 1u]), f32_add(sums[first + 2u], sums[first + 3u]));
}

struct Gradients {
    gate: u32,
    up: u32,
    // A term of the weight's gradient.
    term: u32,
}

fn gradients(row: u32, column: u32) -> Gradients {
    let p = given.scalars;
    let gate = row * 2u * p.width + column;
    let g = gate_up_at(gate);
    let u = gate_up_at(gate + p.width);
    let s = f32_sigmoid(g);
    let h = f32_mul(g, s);
    let d_out = d_out_at(row * p.width + column);
    var d = d_out;
    if weight_given() {
        d = f32_mul(d, weight_at(row));
    }
    let slope = f32_mul(s, f32_add(ONE, f32_mul(g, f32_sub(ONE, s))));
    return Gradients(f32_mul(f32_mul(d, u), slope), f32_mul(d, h), f32_mul(d_out, f32_mul(h, u)));
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let row = linear(group, groups) * 16u + lane / 4u;
    let counts = row < p.rows && !(limit_given() && row >= limit_at(0u));
    let place = row * 2u * p.width;
    var total = 0u;
    for (var block = 0u; block < p.width; block += BLOCK) {
        let end = select(block, min(block + BLOCK, p.width), counts);
        var sum = 0u;
        // Two neighbouring columns of every eight.
        for (var i = block + lane % 4u * 2u; i < end; i += 8u) {
            let pair = i + 1u < p.width;
            let first = gradients(row, i);
            let second = gradients(row, select(i, i + 1u, pair));
            sum = f32_add(sum, first.term);
            if pair {
                sum = f32_add(sum, second.term);
                d_gate_up_set_two(place + i, first.gate, second.gate);
                d_gate_up_set_two(place + p.width + i, first.up, second.up);
            } else {
                d_gate_up_set(place + i, first.gate);
                d_gate_up_set(place + p.width + i, first.up);
            }
        }
        total = f32_add(total, quad(lane, sum));
    }
    if d_weight_given() && counts && lane % 4u == 0u {
        d_weight_set(row, total);
    }
}
