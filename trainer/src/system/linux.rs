//! What Linux says of this process.

use std::fs;

/// The most memory that this process had, in bytes.
pub(super) fn peak() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let field = text.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    field.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// The least memory limit of the control groups of this process.
pub(super) fn cgroup_limit() -> Option<u64> {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    super::cgroup::limit(&read("/proc/self/cgroup"), &read("/proc/self/mountinfo"), |path| {
        fs::read_to_string(path).ok()
    })
}

/// Bytes of address space that this process has reserved.
pub(super) fn reserved() -> Option<u64> {
    let pages = fs::read_to_string("/proc/self/statm").ok()?.split(' ').next()?.parse::<u64>().ok()?;
    pages.checked_mul(rustix::param::page_size() as u64)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_process_had_the_memory_that_it_wrote() {
        let bytes = std::hint::black_box(vec![1u8; 32 << 20]);
        assert!(super::peak().unwrap() > bytes.len() as u64);
    }
}
