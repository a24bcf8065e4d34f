//! Copies of bytes between buffers of the device.

use std::ops::Range;

use dropless_core::{Result, Tensor};

use crate::buffer;
use crate::dispatch::{Dispatch, Stream};
use crate::shader::{Binding, Shader, U32, scalars};

scalars!(
    /// Byte positions in two buffers of words.
    pub(crate) struct CopyScalars { source_byte, target_byte, bytes }
);

pub(crate) static COPY: Shader<CopyScalars> = Shader::new(
    "copy",
    &[include_str!("../../../shaders/copy.wgsl")],
    &[Binding::read("source", U32), Binding::in_place("copied", U32)],
);

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
    let length = from.len();
    let bytes = length as u64;
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
        return stream.copy(op, (source, from), (target, to), whole);
    }
    let word = |position: u64| u32::try_from(position).expect("a buffer that can be bound has less than 2^32 bytes");
    let [source, target] = [source.words(), target.words()];
    let scalars = CopyScalars { source_byte: word(from), target_byte: word(to), bytes: word(bytes) };
    stream.dispatch(Dispatch::new(&COPY, scalars, &[Some(&source), Some(&target)], (length / 4 + 2).div_ceil(64)))
}
