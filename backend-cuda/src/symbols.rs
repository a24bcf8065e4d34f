//! What is called of the libraries that are loaded at run time: the driver, its compiler and NCCL. A library that lacks
//! one of these is refused when it is loaded; at the first call of it, cudarc would panic.

/// The symbols of a library that are called.
pub(crate) struct Symbols {
    /// By a call through cudarc's `result`, and by its name there.
    result: &'static [(&'static str, &'static str)],
    /// By their own names.
    sys: &'static [&'static str],
}

impl Symbols {
    /// The first one that a library does not have.
    pub(crate) fn missing(&self, has: impl Fn(&str) -> bool) -> Option<&'static str> {
        let all = self.result.iter().map(|(_, symbol)| *symbol).chain(self.sys.iter().copied());
        all.into_iter().find(|symbol| !has(symbol))
    }
}

/// Of the driver.
pub(crate) const DRIVER: Symbols = Symbols {
    result: &[
        ("ctx::set_current", "cuCtxSetCurrent"),
        ("ctx::synchronize", "cuCtxSynchronize"),
        ("device::get", "cuDeviceGet"),
        ("device::get_attribute", "cuDeviceGetAttribute"),
        ("device::get_count", "cuDeviceGetCount"),
        ("device::get_name", "cuDeviceGetName"),
        ("device::get_uuid", "cuDeviceGetUuid_v2"),
        ("device::total_mem", "cuDeviceTotalMem_v2"),
        ("event::create", "cuEventCreate"),
        ("event::destroy", "cuEventDestroy_v2"),
        ("event::elapsed", "cuEventElapsedTime_v2"),
        ("event::query", "cuEventQuery"),
        ("event::record", "cuEventRecord"),
        ("event::synchronize", "cuEventSynchronize"),
        ("free_host", "cuMemFreeHost"),
        ("free_sync", "cuMemFree_v2"),
        ("function::set_function_attribute", "cuFuncSetAttribute"),
        ("graph::destroy", "cuGraphDestroy"),
        ("graph::exec_destroy", "cuGraphExecDestroy"),
        ("graph::launch", "cuGraphLaunch"),
        ("init", "cuInit"),
        ("launch_kernel", "cuLaunchKernel"),
        ("malloc_host", "cuMemHostAlloc"),
        ("malloc_sync", "cuMemAlloc_v2"),
        ("mem_get_info", "cuMemGetInfo_v2"),
        ("memset_d8_async", "cuMemsetD8Async"),
        ("memset_d8_sync", "cuMemsetD8_v2"),
        ("module::get_function", "cuModuleGetFunction"),
        ("module::load_data", "cuModuleLoadData"),
        ("module::unload", "cuModuleUnload"),
        ("primary_ctx::release", "cuDevicePrimaryCtxRelease_v2"),
        ("primary_ctx::retain", "cuDevicePrimaryCtxRetain"),
        ("stream::begin_capture", "cuStreamBeginCapture_v2"),
        ("stream::create", "cuStreamCreate"),
        ("stream::destroy", "cuStreamDestroy_v2"),
        ("stream::end_capture", "cuStreamEndCapture"),
        ("stream::is_capturing", "cuStreamIsCapturing"),
        ("stream::synchronize", "cuStreamSynchronize"),
        ("stream::wait_event", "cuStreamWaitEvent"),
    ],
    sys: &[
        "cuDeviceCanAccessPeer",
        "cuGetErrorName",
        "cuGetErrorString",
        "cuGraphInstantiateWithFlags",
        "cuMemAddressFree",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemExportToShareableHandle",
        "cuMemGetAllocationGranularity",
        "cuMemImportFromShareableHandle",
        "cuMemMap",
        "cuMemRelease",
        "cuMemSetAccess",
        "cuMemUnmap",
        "cuMemcpyAsync",
        "cuPointerGetAttributes",
        "cuStreamGetCtx",
        "cuStreamQuery",
        "cuTensorMapEncodeTiled",
    ],
};

/// Of NVRTC.
pub(crate) const NVRTC: Symbols = Symbols {
    result: &[
        ("compile_program", "nvrtcCompileProgram"),
        ("create_program", "nvrtcCreateProgram"),
        ("destroy_program", "nvrtcDestroyProgram"),
        ("get_program_log", "nvrtcGetProgramLog"),
    ],
    // Messages and the length of a log are asked for in cudarc.
    sys: &["nvrtcGetCUBIN", "nvrtcGetCUBINSize", "nvrtcGetErrorString", "nvrtcGetProgramLogSize", "nvrtcVersion"],
};

/// Of NCCL.
pub(crate) const NCCL: Symbols = Symbols {
    result: &[
        ("all_gather", "ncclAllGather"),
        ("comm_abort", "ncclCommAbort"),
        ("comm_destroy", "ncclCommDestroy"),
        ("comm_init_rank", "ncclCommInitRank"),
        ("get_uniqueid", "ncclGetUniqueId"),
        ("group_end", "ncclGroupEnd"),
        ("group_start", "ncclGroupStart"),
        ("recv", "ncclRecv"),
        ("send", "ncclSend"),
    ],
    sys: &["ncclCommGetAsyncError", "ncclGetErrorString"],
};

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::driver;

    /// The names that stand behind `begin` and before a parenthesis, in the sources that use this part of cudarc.
    fn called(part: &str, begin: &str) -> BTreeSet<String> {
        fn walk(folder: &Path, texts: &mut Vec<String>) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, texts);
                } else {
                    texts.push(std::fs::read_to_string(path).unwrap());
                }
            }
        }
        let mut texts = Vec::new();
        walk(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut texts);
        let uses = format!("use cudarc::{part}::");
        let name = |rest: &str| -> Option<String> {
            let end = rest.find(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))?;
            rest[end..].starts_with('(').then(|| rest[..end].to_owned())
        };
        let texts = texts.iter().filter(|text| text.lines().any(|line| line.starts_with(&uses)));
        texts.flat_map(|text| text.split(begin).skip(1).filter_map(name)).collect()
    }

    #[test]
    fn f21_every_symbol_that_is_called_is_looked_for() {
        for (part, symbols, prefix) in [("driver", &DRIVER, "cu"), ("nvrtc", &NVRTC, "nvrtc"), ("nccl", &NCCL, "nccl")]
        {
            let results: BTreeSet<String> = symbols.result.iter().map(|(call, _)| (*call).to_owned()).collect();
            // Types have capitals.
            let calls = called(part, "result::").into_iter().filter(|name| !name.contains(char::is_uppercase));
            assert_eq!(calls.collect::<BTreeSet<_>>(), results, "{part}");
            let direct = called(part, "sys::")
                .into_iter()
                .filter(|name| name.strip_prefix(prefix).is_some_and(|rest| rest.starts_with(char::is_uppercase)));
            for symbol in direct {
                assert!(symbols.sys.contains(&&*symbol), "{symbol}");
            }
        }
    }

    #[test]
    fn f21_the_first_symbol_that_is_missing_is_named() {
        let symbols = Symbols { result: &[("a", "cuA"), ("b", "cuB")], sys: &["cuC"] };
        assert_eq!(symbols.missing(|_| true), None);
        assert_eq!(symbols.missing(|name| name != "cuB"), Some("cuB"));
        assert_eq!(symbols.missing(|name| name != "cuC"), Some("cuC"));
    }

    /// The process that [`f21_a_driver_that_is_too_old_or_incomplete_is_refused`] starts; does nothing among the other tests.
    #[test]
    fn process_with_a_driver() {
        if std::env::var_os("DROPLESS_TEST_DRIVER").is_some() {
            println!("init: {}", driver::init().unwrap_err());
        }
    }

    /// What a process says of a driver of this version that has these symbols.
    fn said(version: u32, symbols: &[&str]) -> String {
        let dir = tempfile::tempdir().unwrap();
        let mut source = format!("int cuDriverGetVersion(int *to) {{ *to = {version}; return 0; }}\n");
        for symbol in symbols {
            // 100: there is no device.
            source += &format!("int {symbol}(void) {{ return 100; }}\n");
        }
        std::fs::write(dir.path().join("driver.c"), source).unwrap();
        let mut compiler = Command::new("cc");
        compiler.args(["-w", "-shared", "-fPIC", "-o", "libcuda.so", "driver.c"]).current_dir(dir.path());
        assert!(compiler.status().unwrap().success());
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "symbols::tests::process_with_a_driver", "--nocapture"])
            .env("LD_LIBRARY_PATH", dir.path())
            .env("DROPLESS_TEST_DRIVER", "1")
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        let said = String::from_utf8_lossy(&output.stdout);
        let said = said.lines().find_map(|line| line.split_once("init: ")).map(|(_, why)| why.to_owned());
        said.unwrap_or_else(|| panic!("{output:?}"))
    }

    #[test]
    fn f21_a_driver_that_is_too_old_or_incomplete_is_refused() {
        let compiler = Command::new("cc").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !compiler.is_ok_and(|status| status.success()) {
            println!("skipped: no C compiler");
            return;
        }
        let all: Vec<&str> =
            DRIVER.result.iter().map(|(_, symbol)| *symbol).chain(DRIVER.sys.iter().copied()).collect();
        let without = |name: &str| all.iter().copied().filter(|symbol| *symbol != name).collect::<Vec<_>>();
        // The version comes first: an old driver lacks symbols, too.
        for symbols in [&all[..], &without("cuEventElapsedTime_v2"), &[]] {
            assert_eq!(
                said(12040, symbols),
                "cuda: the driver 12.4 is older than 13.0 (580); use --backend host or wgpu"
            );
        }
        for symbol in ["cuDeviceTotalMem_v2", "cuEventElapsedTime_v2", "cuInit", "cuGetErrorName"] {
            let expected = format!("cuda: the driver 13.0 is older than 13.0 (580) or damaged: it has no {symbol}");
            assert_eq!(said(13000, &without(symbol)), expected);
        }
        assert_eq!(said(13010, &all), "cuda: the CUDA driver finds no device");
    }
}
