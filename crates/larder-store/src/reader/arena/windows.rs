//! The memory of an arena on Windows.

use std::{ffi::c_void, io, ops::Range, ptr, ptr::NonNull};

use windows_sys::Win32::System::{
    Memory::{
        MEM_COMMIT, MEM_DECOMMIT, MEM_RELEASE, MEM_RESERVE, PAGE_READWRITE, VirtualAlloc, VirtualFree, VirtualLock,
        VirtualUnlock,
    },
    Threading::{GetCurrentProcess, GetProcessWorkingSetSize, SetProcessWorkingSetSize},
};

/// Committed private memory, released on drop.
pub struct AnonymousMemory {
    start: NonNull<u8>,
}

// SAFETY: the value only owns an address range.
unsafe impl Send for AnonymousMemory {}
// SAFETY: as above.
unsafe impl Sync for AnonymousMemory {}

impl AnonymousMemory {
    /// Commits `bytes` zero bytes.
    pub fn map(bytes: usize) -> io::Result<Self> {
        // SAFETY: null lets the system choose the address.
        let start = unsafe { VirtualAlloc(ptr::null(), bytes, MEM_RESERVE | MEM_COMMIT, PAGE_READWRITE) };
        let start = NonNull::new(start.cast()).ok_or_else(io::Error::last_os_error)?;
        Ok(AnonymousMemory { start })
    }

    /// The address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for AnonymousMemory {
    fn drop(&mut self) {
        // SAFETY: the memory was allocated by `map`, and nothing refers to it any more.
        unsafe { VirtualFree(self.start.as_ptr().cast(), 0, MEM_RELEASE) };
    }
}

/// Gives the memory of a range back to the system, locked or not; its bytes are zero then.
///
/// # Safety
///
/// The range must be whole pages of an [`AnonymousMemory`], and nothing else may access it.
pub unsafe fn give_back(start: *mut u8, bytes: usize) -> io::Result<()> {
    let start = start.cast::<c_void>();
    // SAFETY: by the contract of this function. An error says that the range was not locked.
    unsafe { VirtualUnlock(start, bytes) };
    // SAFETY: as above; the range stays reserved, and the system provides zero bytes again.
    let done = unsafe {
        VirtualFree(start, bytes, MEM_DECOMMIT) != 0
            && !VirtualAlloc(start, bytes, MEM_COMMIT, PAGE_READWRITE).is_null()
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Locks a range, after raising by its length what this process may lock.
///
/// # Safety
///
/// The range must be mapped.
pub unsafe fn lock(start: *mut c_void, bytes: usize) -> io::Result<()> {
    let (mut least, mut most) = (0, 0);
    // SAFETY: the handle of the current process needs no closing, and the places for the results are valid.
    unsafe {
        if GetProcessWorkingSetSize(GetCurrentProcess(), &mut least, &mut most) != 0 {
            SetProcessWorkingSetSize(GetCurrentProcess(), least + bytes, most.max(least + bytes) + bytes);
        }
    }
    // SAFETY: by the contract of this function.
    if unsafe { VirtualLock(start, bytes) } == 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Windows has no call that provides the pages of a range without changing their bytes; they are provided when first
/// used.
///
/// # Safety
///
/// None is needed.
pub unsafe fn populate(_: usize, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Large pages need a privilege that a user does not have.
pub fn advise_huge_pages(_: Range<usize>, _: bool) {}
