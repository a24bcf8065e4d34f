//! Which GPU: the list of adapters and the choice among them.

use dropless_core::{Error, Result};

use crate::BACKEND;
use crate::device::largest_buffer;

/// The environment variable that names the adapter where the options do not.
const VARIABLE: &str = "DROPLESS_ADAPTER";

/// What `doctor` prints of an adapter.
#[derive(Clone, Debug)]
pub struct AdapterReport {
    /// Its place in the list; a valid choice.
    pub index: usize,
    /// Its name; any part of it is a valid choice.
    pub name: String,
    /// `Vulkan`, `Metal` or `Dx12`.
    pub api: String,
    /// `DiscreteGpu`, `IntegratedGpu`, `Cpu`, ...
    pub kind: String,
    /// The driver and its version.
    pub driver: String,
    /// The largest tensor in bytes.
    pub max_buffer_bytes: u64,
}

/// Every adapter of this machine, in the order of their indices.
pub fn adapters() -> Vec<AdapterReport> {
    let report = |(index, adapter): (usize, &wgpu::Adapter)| {
        let (info, limits) = (adapter.get_info(), adapter.limits());
        AdapterReport {
            index,
            name: info.name,
            api: format!("{:?}", info.backend),
            kind: format!("{:?}", info.device_type),
            driver: format!("{} {}", info.driver, info.driver_info),
            max_buffer_bytes: largest_buffer(&limits),
        }
    };
    all().iter().enumerate().map(report).collect()
}

fn all() -> Vec<wgpu::Adapter> {
    let descriptor = wgpu::InstanceDescriptor::new_without_display_handle();
    pollster::block_on(wgpu::Instance::new(descriptor).enumerate_adapters(wgpu::Backends::all()))
}

/// The adapter that `wanted` (an index or a part of a name), else the environment, else a preference for real GPUs
/// picks.
pub(crate) fn choose(wanted: Option<&str>) -> Result<wgpu::Adapter> {
    let from_environment = std::env::var(VARIABLE).ok();
    let wanted = wanted.or(from_environment.as_deref());
    let mut found = all();
    let names: Vec<String> = found.iter().map(|adapter| adapter.get_info().name).collect();
    let kinds = found.iter().map(|adapter| adapter.get_info().device_type);
    let index = match wanted {
        Some(wanted) => named(wanted, &names),
        // The first of the best kind.
        None => kinds.enumerate().min_by_key(|&(index, kind)| (rank(kind), index)).map(|(index, _)| index),
    };
    index.map(|index| found.swap_remove(index)).ok_or_else(|| {
        let why = match wanted {
            _ if names.is_empty() => {
                "no adapter; install a Vulkan driver (mesa-vulkan-drivers has one for CPUs)".into()
            }
            Some(wanted) => format!("no adapter {wanted:?} among {names:?} (an index or a part of a name)"),
            None => format!("no adapter among {names:?}"),
        };
        Error::Unavailable { backend: BACKEND, why }
    })
}

/// The adapter with that index, or the first whose name contains `wanted` in any case.
fn named(wanted: &str, names: &[String]) -> Option<usize> {
    match wanted.parse::<usize>() {
        Ok(index) => (index < names.len()).then_some(index),
        Err(_) => names.iter().position(|name| name.to_lowercase().contains(&wanted.to_lowercase())),
    }
}

fn rank(kind: wgpu::DeviceType) -> u8 {
    match kind {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::named;

    #[test]
    fn an_adapter_is_named_by_index_or_part() {
        let names = ["NVIDIA H200".to_owned(), "llvmpipe (LLVM 15.0.6, 256 bits)".to_owned()];
        assert_eq!(named("1", &names), Some(1));
        assert_eq!(named("2", &names), None);
        assert_eq!(named("LLVMpipe", &names), Some(1));
        assert_eq!(named("h200", &names), Some(0));
        assert_eq!(named("radeon", &names), None);
    }
}
