//! Counts the instructions that this process executes in user mode, where the kernel and the processor allow it.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Read;

/// A running count of this thread and all threads that it starts.
pub struct Instructions(#[cfg_attr(not(target_os = "linux"), allow(dead_code))] File);

impl Instructions {
    /// Begins to count; `None` if there is no counter (a virtual machine without one, or `perf_event_paranoid`).
    #[cfg(target_os = "linux")]
    pub fn start() -> Option<Self> {
        use std::os::fd::FromRawFd;

        /// `perf_event_attr` as far as its first published version goes (64 bytes).
        #[repr(C)]
        struct Attributes {
            kind: u32,
            size: u32,
            config: u64,
            period: u64,
            sample: u64,
            format: u64,
            flags: u64,
            rest: [u64; 2],
        }
        const HARDWARE: u32 = 0;
        const INSTRUCTIONS: u64 = 1;
        const INHERIT: u64 = 1 << 1;
        const EXCLUDE_KERNEL: u64 = 1 << 5;
        const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
        let attributes = Attributes {
            kind: HARDWARE,
            size: size_of::<Attributes>() as u32,
            config: INSTRUCTIONS,
            period: 0,
            sample: 0,
            format: 0,
            flags: INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR,
            rest: [0; 2],
        };
        // SAFETY: the kernel reads `size` bytes of the attributes, which live until the call returns; the other
        // arguments are numbers: this process, any processor, no group, closed on exec.
        let file = unsafe { libc::syscall(libc::SYS_perf_event_open, &raw const attributes, 0, -1, -1, 8) };
        // SAFETY: a descriptor that the kernel has just given to nothing else.
        (file >= 0).then(|| Instructions(unsafe { File::from_raw_fd(file as i32) }))
    }

    #[cfg(not(target_os = "linux"))]
    pub fn start() -> Option<Self> {
        None
    }

    /// The count so far, with threads that have ended.
    pub fn count(mut self) -> Option<u64> {
        let mut bytes = [0; 8];
        self.0.read_exact(&mut bytes).ok()?;
        Some(u64::from_ne_bytes(bytes))
    }
}
