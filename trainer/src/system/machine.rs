//! The machine and this process, where the system tells.

use sysinfo::{CpuRefreshKind, MemoryRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

/// Bytes of memory in this machine.
pub(crate) fn installed() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    Some(system.total_memory()).filter(|&bytes| bytes > 0)
}

/// How much memory this process may use, and what says so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit {
    pub(crate) bytes: u64,
    pub(crate) of: &'static str,
}

/// The least of what limits the memory of this process; None where nothing is known.
pub(crate) fn memory_limit() -> Option<Limit> {
    #[cfg(all(target_os = "linux", not(dropless_portable)))]
    let group = super::linux::cgroup_limit();
    #[cfg(not(all(target_os = "linux", not(dropless_portable))))]
    let group = None;
    #[cfg(all(unix, not(dropless_portable)))]
    let space = super::unix::address_space();
    #[cfg(not(all(unix, not(dropless_portable))))]
    let space = None;
    let all = [
        (installed(), "the memory of this machine"),
        (group, "the limit of its control group"),
        (space, "the limit of its address space"),
    ];
    let known = all.into_iter().filter_map(|(bytes, of)| Some(Limit { bytes: bytes?, of }));
    known.min_by_key(|limit| limit.bytes)
}

/// Bytes of memory that this process had at most, or has now where only that is known.
pub(crate) fn peak() -> Option<u64> {
    #[cfg(all(target_os = "linux", not(dropless_portable)))]
    if let Some(peak) = super::linux::peak() {
        return Some(peak);
    }
    resident()
}

/// Bytes of memory that this process has now.
fn resident() -> Option<u64> {
    let (mut system, this) = (System::new(), get_current_pid().ok()?);
    let memory = ProcessRefreshKind::nothing().with_memory();
    system.refresh_processes_specifics(ProcessesToUpdate::Some(&[this]), false, memory);
    Some(system.process(this)?.memory())
}

/// What the system calls this processor.
pub(crate) fn processor() -> Option<String> {
    let mut system = System::new();
    system.refresh_cpu_list(CpuRefreshKind::nothing());
    system.cpus().first().map(|cpu| cpu.brand().trim().to_owned()).filter(|name| !name.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_the_memory_that_it_wrote_and_no_more_than_the_machine() {
        let bytes = std::hint::black_box(vec![1u8; 32 << 20]);
        let resident = resident().unwrap();
        assert!(resident > bytes.len() as u64);
        assert!(peak().unwrap() >= resident / 2 && resident < installed().unwrap());
    }
}
