//! Numbers that macOS tells about itself and the machine.
#![allow(unsafe_code)]

use std::{ffi::CStr, ptr};

/// The number of a name of `sysctl`, such as `hw.memsize`, which has 4 or 8 bytes; `None` if there is none.
pub fn sysctl_number(name: &CStr) -> Option<u64> {
    let (mut bytes, mut len) = ([0_u8; 8], 8);
    // SAFETY: the name ends with a zero, `bytes` has `len` bytes, and nothing is set.
    let done = unsafe { libc::sysctlbyname(name.as_ptr(), bytes.as_mut_ptr().cast(), &mut len, ptr::null_mut(), 0) };
    match (done, len) {
        (0, 8) => Some(u64::from_ne_bytes(bytes)),
        (0, 4) => Some(u32::from_ne_bytes(bytes[..4].try_into().ok()?).into()),
        _ => None,
    }
}
