//! NCCL: byte-wise transfers between the members of a group, queued on the comm stream.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use cudarc::nccl::{result, sys};
use dropless_core::{Error, Queue, Result, Tensor};
use parking_lot::Mutex;

use crate::BACKEND;
use crate::device::Gpu;
use crate::driver::Address;
use crate::memory;
use crate::symbols::NCCL;

/// How long an abort waits for a call that is being made.
const ABORT_PATIENCE: Duration = Duration::from_secs(1);

/// A transfer of a whole view.
#[derive(Debug)]
pub(crate) enum Transfer {
    /// To the member at a place.
    Send(usize, Tensor),
    /// From the member at a place.
    Receive(usize, Tensor),
    /// To every member, and from every member.
    Gather(Tensor, Tensor),
}

/// A member's end of the connections of a group.
#[derive(Debug)]
pub(crate) struct Communicator {
    raw: sys::ncclComm_t,
    /// Held during a call.
    calling: Mutex<()>,
    aborted: AtomicBool,
}

// SAFETY: NCCL allows calls from any thread, one at a time, which `calling` sees to. An abort may come from another
// thread during a call, and ends it.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

/// The bytes of a group's identity.
const ID: usize = 128;

fn failed(op: &'static str, error: &result::NcclError) -> Error {
    // SAFETY: NCCL returns a string of its own that is never freed.
    let text = unsafe { CStr::from_ptr(sys::ncclGetErrorString(error.0)) }.to_string_lossy();
    Error::Device { backend: BACKEND, op, what: format!("NCCL: {text} (NCCL_DEBUG=INFO says more)") }
}

/// Whether the library is there, with all that is called of it.
pub(super) fn present() -> bool {
    // SAFETY: only looks whether there is a symbol of this name.
    let has = |name: &str| unsafe { sys::culib().get::<*const ()>(name.as_bytes()) }.is_ok();
    // SAFETY: only looks whether the library can be loaded.
    let loads = unsafe { sys::is_culib_present() };
    loads && NCCL.missing(has).is_none()
}

/// Says whether NCCL uses NVLink multicast.
const NVLS: &str = "NCCL_NVLS_ENABLE";

/// Forbids NCCL NVLink multicast, unless the environment says otherwise. The backend does not do so by itself: when it is
/// opened, threads of the driver may be reading the environment.
///
/// # Safety
/// The process has no other thread yet.
pub unsafe fn avoid_multicast() {
    if std::env::var_os(NVLS).is_none() {
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(NVLS, "0") };
    }
}

/// Fails where nobody has decided on multicast, which NCCL would then use.
pub(super) fn multicast_is_decided(decided: bool) -> Result<()> {
    let why = || {
        format!(
            "{NVLS} is not set: set it to 0 before the process starts (1 allows NVLink multicast), or exchange by Peer"
        )
    };
    if decided { Ok(()) } else { Err(Error::Unavailable { backend: BACKEND, why: why() }) }
}

/// Whether the environment says so.
pub(super) fn decided() -> bool {
    std::env::var_os(NVLS).is_some()
}

/// A new identity, which one member makes for all.
pub(super) fn new_id() -> Result<Vec<u8>> {
    let id = result::get_uniqueid().map_err(|e| failed("bootstrap", &e))?;
    Ok(bytemuck::cast::<_, [u8; ID]>(id.internal).to_vec())
}

impl Communicator {
    /// Connects the members; blocks until all have come. The device is the calling thread's.
    pub(super) fn connect(id: &[u8], members: usize, place: usize) -> Result<Communicator> {
        multicast_is_decided(decided())?;
        let malformed =
            || Error::Device { backend: BACKEND, op: "bootstrap", what: "NCCL: an identity was cut off".into() };
        let internal: [u8; ID] = id.try_into().map_err(|_| malformed())?;
        let internal: [c_char; ID] = bytemuck::cast(internal);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the identity is one that NCCL made, the place is below the number of members.
        unsafe { result::comm_init_rank(&mut raw, number(members), sys::ncclUniqueId { internal }, number(place)) }
            .map_err(|e| failed("bootstrap", &e))?;
        Ok(Communicator { raw, calling: Mutex::new(()), aborted: AtomicBool::new(false) })
    }

    /// Queues transfers that happen together, in no order among each other.
    ///
    /// # Errors
    /// A failure of NCCL, or a tensor of another backend.
    pub(crate) fn run(&self, op: &'static str, gpu: &Arc<Gpu>, transfers: &[Transfer]) -> Result<()> {
        gpu.bind(op)?;
        let address = |tensor: &Tensor| memory::addresses(op, gpu, tensor, Queue::Comm).map(|range| range.start);
        let prepared: Vec<_> = transfers
            .iter()
            .map(|transfer| {
                Ok(match transfer {
                    Transfer::Send(to, x) => Prepared::Send { to: number(*to), from: address(x)?, bytes: x.bytes() },
                    Transfer::Receive(from, x) => {
                        Prepared::Receive { from: number(*from), to: address(x)?, bytes: x.bytes() }
                    }
                    Transfer::Gather(x, out) => {
                        Prepared::Gather { from: address(x)?, to: address(out)?, bytes: x.bytes() }
                    }
                })
            })
            .collect::<Result<_>>()?;
        let _calling = self.calling.lock();
        if self.aborted.load(Ordering::Acquire) {
            return Err(Error::Device { backend: BACKEND, op, what: "NCCL: the connections were broken off".into() });
        }
        let stream = gpu.stream(Queue::Comm).raw.cast();
        result::group_start().map_err(|e| failed(op, &e))?;
        let queued = prepared.iter().try_for_each(|transfer| {
            // SAFETY: the views lie inside their buffers, which are kept until the stream is done with them.
            unsafe { transfer.queue(self.raw, stream) }.map(|_| ())
        });
        // A group that was started is ended, whatever became of it.
        let ended = result::group_end().map(|_| ());
        queued.and(ended).map_err(|e| failed(op, &e))
    }

    /// A failure that NCCL found in the background.
    pub(super) fn background_failure(&self) -> Option<String> {
        let _calling = self.calling.try_lock()?;
        if self.aborted.load(Ordering::Acquire) {
            return None;
        }
        let mut status = sys::ncclResult_t::ncclSuccess;
        // SAFETY: the communicator lives.
        let asked = unsafe { sys::ncclCommGetAsyncError(self.raw, &mut status) }.result();
        match asked.and_then(|_| status.result()) {
            Ok(_) => None,
            Err(error) => Some(failed("all_to_all", &error).to_string()),
        }
    }

    /// Ends what is under way, here; may take long.
    pub(super) fn abort(&self) {
        // A call that does not end by itself is ended by the abort.
        let _calling = self.calling.try_lock_for(ABORT_PATIENCE);
        if !self.aborted.swap(true, Ordering::AcqRel) {
            // SAFETY: connected, and neither aborted nor destroyed.
            let _ = unsafe { result::comm_abort(self.raw) };
        }
    }
}

impl Drop for Communicator {
    /// The stream has no work left.
    fn drop(&mut self) {
        if !*self.aborted.get_mut() {
            // SAFETY: connected, and neither aborted nor destroyed.
            let _ = unsafe { result::comm_destroy(self.raw) };
        }
    }
}

enum Prepared {
    Send { to: c_int, from: Address, bytes: usize },
    Receive { from: c_int, to: Address, bytes: usize },
    Gather { from: Address, to: Address, bytes: usize },
}

impl Prepared {
    /// # Safety
    /// The addresses are allocated for that many bytes (the target of a gather for those of all members) until the
    /// stream is done; the communicator lives.
    unsafe fn queue(
        &self,
        comm: sys::ncclComm_t,
        stream: sys::cudaStream_t,
    ) -> std::result::Result<result::NcclStatus, result::NcclError> {
        let byte = sys::ncclDataType_t::ncclUint8;
        // SAFETY: the caller's promise.
        unsafe {
            match *self {
                Prepared::Send { to, from, bytes } => {
                    result::send(from as *const c_void, bytes, byte, to, comm, stream)
                }
                Prepared::Receive { from, to, bytes } => {
                    result::recv(to as *mut c_void, bytes, byte, from, comm, stream)
                }
                Prepared::Gather { from, to, bytes } => {
                    result::all_gather(from as *const c_void, to as *mut c_void, bytes, byte, comm, stream)
                }
            }
        }
    }
}

fn number(index: usize) -> c_int {
    c_int::try_from(index).expect("fewer ranks than 2^31")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f30_multicast_is_not_decided_behind_the_back_of_other_threads() {
        multicast_is_decided(true).unwrap();
        let error = multicast_is_decided(false).unwrap_err().to_string();
        assert!(error.starts_with("cuda: NCCL_NVLS_ENABLE is not set"), "{error}");
    }
}
