//! What a failure of a read or of an opening means, by the system's error codes.

use std::io;

#[cfg(unix)]
use unix as system;
#[cfg(windows)]
use windows as system;

/// The kinds of failures that a reader tells apart.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IoFailure {
    /// An interruption, or a shortage in the system that ends by itself.
    Transient,
    /// An error of the disk, which may recover.
    Disk,
    /// Anything else.
    Other,
}

impl IoFailure {
    /// The kind of an error.
    pub fn of(error: &io::Error) -> Self {
        match error.raw_os_error() {
            Some(code) if system::TRANSIENT.contains(&code) => IoFailure::Transient,
            Some(code) if system::DISK.contains(&code) => IoFailure::Disk,
            _ => IoFailure::Other,
        }
    }
}

/// Whether this process, or the system, has too many open files.
pub(crate) fn is_out_of_descriptors(error: &io::Error) -> bool {
    error.raw_os_error() == Some(system::OUT_OF_DESCRIPTORS)
}

/// Whether an error is of this process: what it may not do, or has none left of.
pub(crate) fn is_own(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| system::OWN.contains(&code))
}

/// An error of the disk, for fakes.
pub(crate) fn disk_error() -> io::Error {
    io::Error::from_raw_os_error(system::DISK[0])
}

/// An interruption, for fakes.
pub(crate) fn interruption() -> io::Error {
    io::Error::from_raw_os_error(system::TRANSIENT[0])
}

#[cfg(unix)]
mod unix {
    use rustix::io::Errno;

    // Cancelled: the thread that submitted the read has ended.
    pub const TRANSIENT: &[i32] =
        &[Errno::INTR.raw_os_error(), Errno::AGAIN.raw_os_error(), Errno::CANCELED.raw_os_error()];
    pub const DISK: &[i32] = &[Errno::IO.raw_os_error()];
    pub const OUT_OF_DESCRIPTORS: i32 = Errno::MFILE.raw_os_error();
    pub const OWN: &[i32] = &[
        OUT_OF_DESCRIPTORS,
        Errno::NFILE.raw_os_error(),
        Errno::NOMEM.raw_os_error(),
        Errno::ACCESS.raw_os_error(),
        Errno::PERM.raw_os_error(),
    ];
}

#[cfg(windows)]
mod windows {
    use windows_sys::Win32::Foundation::*;

    pub const TRANSIENT: &[i32] =
        &[ERROR_OPERATION_ABORTED as i32, ERROR_NO_SYSTEM_RESOURCES as i32, ERROR_WORKING_SET_QUOTA as i32];
    pub const DISK: &[i32] = &[
        ERROR_IO_DEVICE as i32,
        ERROR_CRC as i32,
        ERROR_GEN_FAILURE as i32,
        ERROR_READ_FAULT as i32,
        ERROR_SEM_TIMEOUT as i32,
    ];
    pub const OUT_OF_DESCRIPTORS: i32 = ERROR_TOO_MANY_OPEN_FILES as i32;
    pub const OWN: &[i32] = &[
        OUT_OF_DESCRIPTORS,
        ERROR_NOT_ENOUGH_MEMORY as i32,
        ERROR_OUTOFMEMORY as i32,
        ERROR_ACCESS_DENIED as i32,
        ERROR_SHARING_VIOLATION as i32,
    ];
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_told_apart() {
        assert_eq!(IoFailure::of(&disk_error()), IoFailure::Disk);
        assert_eq!(IoFailure::of(&interruption()), IoFailure::Transient);
        let missing = std::fs::metadata("/no/such/file").unwrap_err();
        assert_eq!(IoFailure::of(&missing), IoFailure::Other);
        assert!(!is_own(&missing) && !is_own(&disk_error()) && !is_out_of_descriptors(&missing));
        assert!(is_own(&io::Error::from_raw_os_error(system::OUT_OF_DESCRIPTORS)));
        assert_eq!(IoFailure::of(&io::Error::other("x")), IoFailure::Other);
    }
}
