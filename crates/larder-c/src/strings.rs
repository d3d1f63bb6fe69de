//! Strings, arrays and errors between C and Rust.

use std::ffi::{CStr, CString, c_char};
use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_runtime::error_message;

/// A path, in the system's encoding; on Windows in UTF-8.
///
/// # Safety
///
/// `path` is a string that outlives the result, or NULL.
pub unsafe fn path_of<'a>(path: *const c_char) -> Result<&'a Path> {
    if path.is_null() {
        bail!("path is NULL");
    }
    // SAFETY: the caller's.
    as_path(unsafe { CStr::from_ptr(path) })
}

#[cfg(unix)]
fn as_path(path: &CStr) -> Result<&Path> {
    use std::{ffi::OsStr, os::unix::ffi::OsStrExt};
    Ok(Path::new(OsStr::from_bytes(path.to_bytes())))
}

#[cfg(not(unix))]
fn as_path(path: &CStr) -> Result<&Path> {
    path.to_str().map(Path::new).context("path is not UTF-8")
}

/// A text in UTF-8; `None` for NULL.
///
/// # Safety
///
/// `text` is a string that outlives the result, or NULL.
pub unsafe fn text_of<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(text) }.to_str();
    text.map(Some).with_context(|| format!("{what} is not UTF-8"))
}

/// An array; NULL is one of no elements, and refused as any other.
///
/// # Safety
///
/// `first` points to `count` elements that outlive the result, or is NULL.
pub unsafe fn array_of<'a, T>(first: *const T, count: usize, what: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        bail!("{what} is NULL");
    }
    // SAFETY: the caller's.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

/// A string that the caller frees. A NUL inside, which C could not see past, is left out.
pub fn owned(text: String) -> Result<*mut c_char> {
    let bytes: Vec<u8> = text.into_bytes().into_iter().filter(|byte| *byte != 0).collect();
    Ok(CString::new(bytes)?.into_raw())
}

/// The result of `run`, or `None` with an error in `error`. A panic is an error too.
///
/// # Safety
///
/// `error` is NULL or where a pointer may be written.
pub unsafe fn guarded<T>(run: impl FnOnce() -> Result<T>, error: *mut *mut c_char) -> Option<T> {
    match larder_runtime::guarded(run) {
        Ok(value) => Some(value),
        Err(failed) => {
            if !error.is_null() {
                // SAFETY: the caller's.
                unsafe { *error = owned(error_message(&failed)).unwrap_or(std::ptr::null_mut()) };
            }
            None
        }
    }
}
