//! Group offsets come from the device, so unlike shapes they are only known when an op runs.

use crate::error::{Error, Result};

/// Verifies that offsets begin at 0, ascend, and stay within `rows`.
pub(super) fn check(op: &'static str, offsets: &[u32], rows: usize) -> Result<()> {
    let expected = |i: usize| {
        if i == 0 {
            return (offsets[0] != 0).then(|| "0 at the start".to_owned());
        }
        let before = offsets[i - 1];
        (offsets[i] < before).then(|| format!("ascending, so at least offsets[{}] = {before}", i - 1))
    };
    let order = (0..offsets.len()).find_map(|i| Some((i, expected(i)?)));
    let beyond =
        || (0..offsets.len()).find(|&i| offsets[i] as usize > rows).map(|i| (i, format!("at most {rows}, the rows")));
    match order.or_else(beyond) {
        None => Ok(()),
        Some((i, expected)) => {
            let found = format!("offsets[{i}] = {}", offsets[i]);
            Err(Error::Argument { op, field: "offsets", expected, found })
        }
    }
}
