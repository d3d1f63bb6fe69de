//! Freed memory that the allocator keeps for later.
#![allow(unsafe_code)]

/// Gives freed memory back to the system where the C library keeps it (glibc does; musl and bionic return large blocks
/// themselves). For work that took far more memory than is needed from then on; it takes some milliseconds.
pub fn give_back_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the function only returns pages that hold nothing allocated; it may be called at any time from any
    // thread.
    unsafe {
        libc::malloc_trim(0);
    }
}
