//! The memory of an arena on Linux, Android and macOS.

use std::{ffi::c_void, io, ops::Range, ptr::NonNull};

use memmap2::MmapMut;
use rustix::param::page_size;

/// Anonymous memory, unmapped on drop.
pub struct AnonymousMemory {
    start: NonNull<u8>,
    _map: MmapMut,
}

// SAFETY: the address is only handed out; the mapping is `Send`.
unsafe impl Send for AnonymousMemory {}
// SAFETY: as above, and `MmapMut` is `Sync`.
unsafe impl Sync for AnonymousMemory {}

impl AnonymousMemory {
    /// Maps `bytes` zero bytes.
    pub fn map(bytes: usize) -> io::Result<Self> {
        let mut map = MmapMut::map_anon(bytes)?;
        Ok(AnonymousMemory { start: NonNull::from(&mut map[..]).cast(), _map: map })
    }

    /// The address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }
}

/// Gives the memory of a range back to the system, locked or not; its bytes are zero then.
///
/// # Safety
///
/// The range must be part of an [`AnonymousMemory`], and nothing else may access it.
pub unsafe fn give_back(start: *mut u8, bytes: usize) -> io::Result<()> {
    // Pages may be larger than those that slots are made of; what is not a whole one is cleared by hand.
    let page = page_size();
    let before = start.align_offset(page).min(bytes);
    let whole = (bytes - before) / page * page;
    let after = bytes - before - whole;
    // SAFETY: by the contract of this function; the memory is private, so that it stays mapped. Locked memory cannot be
    // given back.
    unsafe {
        start.write_bytes(0, before);
        start.add(before + whole).write_bytes(0, after);
        if whole > 0 {
            rustix::mm::munlock(start.add(before).cast(), whole)?;
            discard(start.add(before).cast(), whole)?;
        }
    }
    Ok(())
}

/// # Safety
///
/// As that of [`give_back`], for whole pages.
#[cfg(any(target_os = "linux", target_os = "android"))]
unsafe fn discard(start: *mut c_void, bytes: usize) -> io::Result<()> {
    // SAFETY: by the contract of this function.
    unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxDontNeed) }.map_err(io::Error::from)
}

/// Elsewhere an advice need not zero the bytes, so that new memory takes the place of the old.
///
/// # Safety
///
/// As that of [`give_back`], for whole pages.
#[cfg(not(any(target_os = "linux", target_os = "android")))]
unsafe fn discard(start: *mut c_void, bytes: usize) -> io::Result<()> {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: by the contract of this function the range is this process's own, and nothing refers to its bytes.
    unsafe { mmap_anonymous(start, bytes, access, MapFlags::PRIVATE | MapFlags::FIXED) }?;
    Ok(())
}

/// Makes the system provide the pages of a range. Their bytes do not change, also if the kernel or a thread writes to
/// them at the same time.
///
/// # Safety
///
/// The range must be mapped and stay so during the call, by nothing but a writable private mapping.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub unsafe fn populate(address: usize, bytes: usize) -> io::Result<()> {
    let start = std::ptr::with_exposed_provenance_mut(address);
    // SAFETY: by the contract of this function; the advice neither frees memory nor changes what is in it.
    unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxPopulateWrite) }.map_err(io::Error::from)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub unsafe fn populate(_: usize, _: usize) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Locks a range.
///
/// # Safety
///
/// The range must be mapped.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub unsafe fn lock(start: *mut c_void, bytes: usize) -> io::Result<()> {
    // SAFETY: by the contract of this function.
    unsafe { rustix::mm::mlock_with(start, bytes, rustix::mm::MlockFlags::ONFAULT) }.map_err(io::Error::from)
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub unsafe fn lock(start: *mut c_void, bytes: usize) -> io::Result<()> {
    // SAFETY: by the contract of this function.
    unsafe { rustix::mm::mlock(start, bytes) }.map_err(io::Error::from)
}

/// Requests huge pages for a range of the arena, or small ones. Only an optimisation: an error, as on a system without
/// huge pages, is ignored.
#[cfg(any(target_os = "linux", target_os = "android"))]
pub fn advise_huge_pages(range: Range<usize>, huge: bool) {
    use rustix::mm::{Advice, madvise};
    let advice = if huge { Advice::LinuxHugepage } else { Advice::LinuxNoHugepage };
    if !range.is_empty() {
        // SAFETY: the callers' ranges are mapped; this advice neither frees memory nor changes what is in it.
        let _ = unsafe { madvise(std::ptr::with_exposed_provenance_mut(range.start), range.len(), advice) };
    }
}

#[cfg(not(any(target_os = "linux", target_os = "android")))]
pub fn advise_huge_pages(_: Range<usize>, _: bool) {}
