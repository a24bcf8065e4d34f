//! The machine and this process, where the system tells.

use sysinfo::{CpuRefreshKind, MemoryRefreshKind, ProcessRefreshKind, ProcessesToUpdate, System, get_current_pid};

/// Bytes of memory in this machine.
pub(crate) fn installed() -> Option<u64> {
    let mut system = System::new();
    system.refresh_memory_specifics(MemoryRefreshKind::nothing().with_ram());
    Some(system.total_memory()).filter(|&bytes| bytes > 0)
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
