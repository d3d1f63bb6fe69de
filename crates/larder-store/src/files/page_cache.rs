//! The page cache of a file: what the system is told about it, where it can be told, and what tests ask about it.
#![cfg_attr(all(test, target_os = "linux"), allow(unsafe_code))]

use std::fs::File;

/// Reads of the file will be short and scattered: nothing is to be read ahead.
pub fn expect_random_reads(file: &File) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = file;
}

/// Bytes that will be read soon are to be read ahead.
pub fn read_ahead(file: &File, offset: u64, len: usize) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(len as u64), rustix::fs::Advice::WillNeed);
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = (file, offset, len);
}

/// What the page cache has of the file is to be dropped.
pub fn drop_cached(file: &File) {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
    #[cfg(not(any(target_os = "linux", target_os = "android")))]
    let _ = file;
}

/// How many pages of a file the page cache has. A read that must not wait would not do to ask: it makes the kernel read
/// the page, and succeeds where the SSD is faster than the answer.
#[cfg(all(test, target_os = "linux"))]
pub fn cached_pages(path: &std::path::Path) -> usize {
    let file = larder_os::open_regular(path).unwrap();
    // SAFETY: only the test has the path of the file, and it neither writes nor truncates the mapped file.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let mut pages = vec![0_u8; map.len().div_ceil(rustix::param::page_size())];
    // SAFETY: the range is the whole mapping, which is not written to, and `pages` has a byte for each of its pages.
    let status = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr().cast()) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
    pages.iter().filter(|page| **page & 1 == 1).count()
}
