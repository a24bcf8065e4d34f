//! Movement between device and host memory.

#[cfg(test)]
mod properties;

use dropless_core::Memory;
use dropless_core::ops::Offload;

use crate::differential::{Maker, Problem, TYPES};

pub(crate) const PROBLEMS: [Problem; 1] = [Problem::new("offload", offload)];

fn offload(m: &mut Maker<'_>) {
    let (dtype, shape) = (m.one_of(&TYPES), [m.below(20), m.extent(200)]);
    let device = m.tensor(dtype, &shape);
    let kept = m.output_in("kept", dtype, &shape, Memory::Host);
    let back = m.output("back", dtype, &shape);
    m.run(Offload { from: &device, to: &kept }, Offload::run);
    m.run(Offload { from: &kept, to: &back }, Offload::run);
}
