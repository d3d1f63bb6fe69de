//! What the page cache has of a file, for tests.
#![allow(unsafe_code)]

use std::{io, path::Path};

use larder_core::open_regular;

/// How many pages of a file the page cache has. A read that must not wait would not do to ask: it makes the kernel read
/// the page, and succeeds where the SSD is faster than the answer.
pub fn cached_pages(path: &Path) -> usize {
    let file = open_regular(path).unwrap();
    // SAFETY: only the test has the path of the file, and it neither writes nor truncates the mapped file.
    let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
    let mut pages = vec![0_u8; map.len().div_ceil(rustix::param::page_size())];
    // SAFETY: the range is the whole mapping, which is not written to, and `pages` has a byte for each of its pages.
    let status = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), pages.as_mut_ptr().cast()) };
    assert_eq!(status, 0, "{}", io::Error::last_os_error());
    pages.iter().filter(|page| **page & 1 == 1).count()
}
