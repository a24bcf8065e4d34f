// Copies bytes at any alignment. An invocation owns one word of the destination and keeps the bytes of it that lie
// outside the range.

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) lane: u32,
) {
    let p = given.scalars;
    let word = p.target_byte / 4u + linear(group, groups) * 64u + lane;
    let start = max(word * 4u, p.target_byte);
    let end = min(word * 4u + 4u, p.target_byte + p.bytes);
    if start >= end {
        return;
    }
    var value = copied_at(word);
    for (var byte = start; byte < end; byte += 1u) {
        let place = byte - p.target_byte + p.source_byte;
        let code = (source_at(place / 4u) >> ((place & 3u) * 8u)) & 0xFFu;
        let shift = (byte & 3u) * 8u;
        value = (value & ~(0xFFu << shift)) | (code << shift);
    }
    copied_set(word, value);
}
