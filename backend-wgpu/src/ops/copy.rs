//! Copies of bytes between buffers of the device.

use std::ops::Range;

use dropless_core::{Result, Tensor};

use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, Shader, U32, params};

params!(
    /// Byte positions in two buffers of words.
    Params { source_byte, target_byte, bytes }
);

pub(crate) static COPY: Shader = Shader {
    name: "copy",
    files: &[include_str!("../../../shaders/copy.wgsl")],
    params: Params::FIELDS,
    bindings: &[Binding::read("source", U32), Binding::in_place("copied", U32)],
    constants: &[],
};

/// Queues a copy of the bytes `from` of the view `source` to the bytes from `to` on of the view `target`. The views lie
/// in different buffers.
pub(crate) fn run(
    stream: &Stream,
    op: &'static str,
    source: &Tensor,
    from: Range<usize>,
    target: &Tensor,
    to: usize,
) -> Result<()> {
    let bytes = from.len() as u64;
    let from = buffer::range(source).start + from.start as u64;
    let to = buffer::range(target).start + to as u64;
    let [source, target] = [buffer::of(op, &stream.gpu, source)?, buffer::of(op, &stream.gpu, target)?];
    if bytes == 0 {
        return Ok(());
    }
    // The bytes past a buffer's end belong to nobody.
    let whole = bytes.next_multiple_of(4);
    let ends = bytes == whole || (from + bytes == source.bytes && to + bytes == target.bytes);
    if from.is_multiple_of(4) && to.is_multiple_of(4) && ends {
        return stream
            .encode(op, |encoder| encoder.copy_buffer_to_buffer(&source.raw, from, &target.raw, to, Some(whole)));
    }
    let word = |position: u64| u32::try_from(position).expect("a buffer that can be bound has less than 2^32 bytes");
    let [source, target] = [source.words(), target.words()];
    stream.dispatch(Dispatch {
        shader: &COPY,
        tensors: &[Some(&source), Some(&target)],
        constants: &[],
        params: Params { source_byte: word(from), target_byte: word(to), bytes: word(bytes) }.words(),
        workgroups: (bytes / 4 + 2).div_ceil(64),
    })
}
