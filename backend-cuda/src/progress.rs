//! Which op was running when a device failed.
//!
//! A failure shows at the next wait, long after the call that queued the work. So each kernel writes, when it begins, the
//! number of its launch to memory of the host; here is the list of which op had which number.

use std::collections::VecDeque;

use dropless_core::{Error, Queue, Result};
use parking_lot::Mutex;

use crate::BACKEND;
use crate::driver::{self, Address, Kind};

/// Launches whose names are kept: more than a device has queued at once.
const KEPT: usize = 1 << 16;

/// The launches of a device.
#[derive(Debug)]
pub(crate) struct Progress {
    /// One word for each queue, which the kernels write.
    words: Address,
    launches: Mutex<Launches>,
}

#[derive(Debug, Default)]
struct Launches {
    /// The number of the next one.
    next: u32,
    names: VecDeque<&'static str>,
}

const WORDS: usize = 3;

impl Progress {
    pub(crate) fn new() -> Result<Progress> {
        let unavailable = || Error::Unavailable { backend: BACKEND, why: "no pinned memory of the host".into() };
        let words = driver::allocate(Kind::Pinned, WORDS * size_of::<u32>())?.ok_or_else(unavailable)?;
        for word in 0..WORDS {
            // Nothing has begun: the number before the first. The memory holds nothing yet that a reference could show.
            // SAFETY: inside of what was allocated above, aligned to pages, and nobody else knows it yet.
            unsafe { (words as *mut u32).add(word).write_volatile(u32::MAX) };
        }
        Ok(Progress { words, launches: Mutex::default() })
    }

    /// Where a kernel on `queue` writes its number, and the number.
    pub(crate) fn launch(&self, op: &'static str, queue: Queue) -> (Address, u32) {
        let mut launches = self.launches.lock();
        if launches.names.len() == KEPT {
            launches.names.pop_front();
        }
        launches.names.push_back(op);
        let number = launches.next;
        launches.next = number.wrapping_add(1);
        (self.words + (queue as usize * size_of::<u32>()) as Address, number)
    }

    /// The last op that began on `queue`.
    pub(crate) fn running(&self, queue: Queue) -> Option<&'static str> {
        let word = (self.words as *const u32).wrapping_add(queue as usize);
        // SAFETY: allocated in `new`; kernels write whole words.
        let number = unsafe { word.read_volatile() };
        let launches = self.launches.lock();
        let age = launches.next.wrapping_sub(number) as usize;
        (age > 0).then(|| launches.names.len().checked_sub(age)).flatten().map(|at| launches.names[at])
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`. Kernels that write there are done: `Gpu`, which has this, waits for them first.
        unsafe { driver::release(Kind::Pinned, self.words) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::Gpu;
    use crate::kernel::{Kernel, Launch, PRELUDE, scalars};
    use crate::memory;
    use dropless_core::{DType, Memory};
    use dropless_tests::require::Need;

    scalars!(
        /// `address`: where the kernel writes, if it is not 0.
        struct Target { address }
    );

    macro_rules! writer {
        ($kernel:ident, $name:literal) => {
            static $kernel: Kernel<Target> = Kernel::new(
                $name,
                &[
                    PRELUDE,
                    concat!(
                        "extern \"C\" __global__ void ",
                        $name,
                        "(const __grid_constant__ Given given) {
                            begin(given);
                            const u64 address = given.scalars.address;
                            if (address != 0) *reinterpret_cast<u32*>(address) = 1;
                        }"
                    ),
                ],
                &[],
            );
        };
    }
    writer!(BEFORE, "before");
    writer!(STRAY, "stray");
    writer!(AFTER, "after");

    /// The process that [`a_kernel_that_fails_is_named_by_whoever_notices`] starts; does nothing among the other tests, for
    /// which the device would be of no use afterwards.
    #[test]
    fn process_whose_kernel_fails() {
        if std::env::var_os("DROPLESS_TEST_STRAY").is_none() {
            return;
        }
        let gpu = Gpu::open(0, false, None).unwrap();
        let launch = |kernel, address| gpu.launch(Launch::new(kernel, Target { address }, &[], 1, 1));
        launch(&BEFORE, 0).unwrap();
        launch(&AFTER, 0).unwrap();
        gpu.synchronize("wait").unwrap();
        launch(&BEFORE, 0).unwrap();
        launch(&STRAY, 4).unwrap();
        // The failure may be known by now.
        let after = gpu.blame(launch(&AFTER, 0));
        let waited = gpu.blame(gpu.synchronize("wait"));
        let allocated = gpu.blame(memory::alloc(&gpu, DType::F32, &[1 << 20], Memory::Device)).map(drop);
        assert!(waited.is_err());
        for (result, op) in [(after, "after"), (waited, "wait"), (allocated, "alloc")] {
            let Err(error) = result else { continue };
            let text = error.to_string();
            assert!(matches!(error, Error::Device { op: "stray", .. }), "{text}");
            assert!(
                text.contains("CUDA_ERROR_ILLEGAL_ADDRESS") && text.ends_with(&format!("noticed by {op}")),
                "{text}"
            );
        }
    }
    #[test]
    fn a_kernel_that_fails_is_named_by_whoever_notices() {
        if Need::Cuda.or_skip(Gpu::open(0, false, None)).is_none() {
            return;
        }
        let output = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "progress::tests::process_whose_kernel_fails", "--nocapture"])
            .env("DROPLESS_TEST_STRAY", "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
}
