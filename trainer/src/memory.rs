//! What the system says of memory, where it says so.

use std::fs;

/// The most memory that this process had, in the system's words.
pub(crate) fn peak() -> Option<String> {
    field("/proc/self/status", "VmHWM:")
}

/// Bytes of memory in this machine.
pub(crate) fn installed() -> Option<u64> {
    let text = field("/proc/meminfo", "MemTotal:")?;
    text.strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

fn field(file: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(file).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix(name))?.trim().to_owned())
}
