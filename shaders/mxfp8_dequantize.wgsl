// MXFP8 to bf16: NUMERICS.md, "Block formats". Exact but for the ends of the exponent range.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let i = linear(group, groups) * 64u + lane;
    if i >= p.elements {
        return;
    }
    // Blocks run along the columns, or along the rows.
    var block = i / 32u;
    if p.along_rows == 1u {
        block = i / p.columns / 32u * p.columns + i % p.columns;
    }
    out_set(i, f32_mul(e4m3_to_f32(codes_at(i)), ue8m0_to_f32(scales_at(block))));
}
