//! Memory of one device that several processes map: CUDA's virtual memory with file descriptors as handles.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use cudarc::driver::{result, sys};
use dropless_core::Result;

use crate::driver::{Address, Context, During};

const OP: &str = "exchange window";
const HANDLE: sys::CUmemAllocationHandleType = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// Mapped memory, of this device or of another one of the machine.
#[derive(Debug)]
pub(super) struct SharedMemory {
    handle: sys::CUmemGenericAllocationHandle,
    address: Address,
    bytes: usize,
}

fn place(context: &Context) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: context.device }
}

impl SharedMemory {
    /// New memory of this device, full of zeros, of at least this size.
    pub(super) fn new(context: &Context, bytes: usize) -> Result<SharedMemory> {
        // SAFETY: plain data, for which zeros are the defaults.
        let mut properties: sys::CUmemAllocationProp = unsafe { MaybeUninit::zeroed().assume_init() };
        properties.type_ = sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.requestedHandleTypes = HANDLE;
        properties.location = place(context);
        let (mut granule, mut handle) = (0, 0);
        let option = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: writes one number.
        unsafe { sys::cuMemGetAllocationGranularity(&mut granule, &properties, option) }.result().during(OP)?;
        let bytes = bytes.next_multiple_of(granule);
        // SAFETY: the size is a multiple of the granule; released in `drop`.
        unsafe { sys::cuMemCreate(&mut handle, bytes, &properties, 0) }.result().during(OP)?;
        let memory = SharedMemory::map(context, handle, bytes)?;
        // SAFETY: mapped above.
        unsafe { result::memset_d8_sync(memory.address, 0, bytes) }.during(OP)?;
        // The driver may return before the device is done, and others write here as soon as they know of it.
        result::ctx::synchronize().during(OP)?;
        Ok(memory)
    }

    /// The memory behind another process's descriptor, of the same size as this process's own.
    pub(super) fn import(context: &Context, descriptor: BorrowedFd<'_>, bytes: usize) -> Result<SharedMemory> {
        let mut handle = 0;
        let descriptor = descriptor.as_raw_fd() as usize as *mut c_void;
        // SAFETY: for this type of handle the pointer is the descriptor's number. Released in `drop`.
        unsafe { sys::cuMemImportFromShareableHandle(&mut handle, descriptor, HANDLE) }.result().during(OP)?;
        SharedMemory::map(context, handle, bytes)
    }

    /// Maps what a handle stands for and takes the handle over.
    fn map(context: &Context, handle: sys::CUmemGenericAllocationHandle, bytes: usize) -> Result<SharedMemory> {
        let mut memory = SharedMemory { handle, address: 0, bytes };
        let access = sys::CUmemAccessDesc {
            location: place(context),
            flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: a fresh range of addresses for the whole memory; what was done is undone in `drop`.
        unsafe {
            sys::cuMemAddressReserve(&mut memory.address, bytes, 0, 0, 0).result().during(OP)?;
            sys::cuMemMap(memory.address, bytes, 0, handle, 0).result().during(OP)?;
            sys::cuMemSetAccess(memory.address, bytes, &access, 1).result().during(OP)?;
        }
        Ok(memory)
    }

    /// A descriptor for another process.
    pub(super) fn export(&self) -> Result<OwnedFd> {
        let mut descriptor: RawFd = -1;
        let to = (&raw mut descriptor).cast();
        // SAFETY: for this type of handle a descriptor is written.
        unsafe { sys::cuMemExportToShareableHandle(to, self.handle, HANDLE, 0) }.result().during(OP)?;
        // SAFETY: the descriptor is new and nobody else's.
        Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
    }

    /// Where it begins, in this process.
    pub(super) fn address(&self) -> Address {
        self.address
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for SharedMemory {
    /// The device has no work left that uses it. Other processes keep what they have mapped.
    fn drop(&mut self) {
        // SAFETY: what was not done cannot be undone, which the driver says and which is no harm.
        unsafe {
            if self.address != 0 {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
                let _ = sys::cuMemAddressFree(self.address, self.bytes);
            }
            let _ = sys::cuMemRelease(self.handle);
        }
    }
}
