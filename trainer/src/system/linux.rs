//! What Linux says of this process.

use std::fs;

/// The most memory that this process had, in bytes.
pub(super) fn peak() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let field = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    field.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_had_the_memory_that_it_wrote() {
        let bytes = std::hint::black_box(vec![1u8; 32 << 20]);
        assert!(super::peak().unwrap() > bytes.len() as u64);
    }
}
