// Copies bytes at any alignment. An invocation owns one word of the destination and keeps the bytes of it that lie
// outside the range.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.params;
    let word = p.to / 4u + linear(group, groups) * 64u + lane;
    let start = max(word * 4u, p.to);
    let end = min(word * 4u + 4u, p.to + p.bytes);
    if start >= end {
        return;
    }
    var value = to_at(word);
    for (var byte = start; byte < end; byte += 1u) {
        let source = byte - p.to + p.from;
        let code = (from_at(source / 4u) >> ((source & 3u) * 8u)) & 0xFFu;
        let shift = (byte & 3u) * 8u;
        value = (value & ~(0xFFu << shift)) | (code << shift);
    }
    to_set(word, value);
}
