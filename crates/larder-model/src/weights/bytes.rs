//! Memory for the bytes of matrices, with huge pages for large ones.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

/// Matrices with fewer bytes are allocated on the heap.
const LARGE: usize = 4 << 20;

/// The bytes of a matrix. A large matrix gets an anonymous map of its own with huge pages requested (madvise): the
/// system hands them out faster, and matmuls that read the whole matrix take fewer TLB misses.
pub enum Bytes {
    /// On the heap.
    Heap(Vec<u8>),
    /// In an anonymous map.
    Map(MmapMut),
}

impl Bytes {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        if len >= LARGE
            && let Ok(map) = MmapMut::map_anon(len)
        {
            ask_for_huge_pages(&map);
            return Bytes::Map(map);
        }
        Bytes::Heap(vec![0; len])
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        let mut copy = Bytes::zeroed(bytes.len());
        copy.copy_from_slice(bytes);
        copy
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Heap(bytes) => bytes,
            Bytes::Map(map) => map,
        }
    }
}

impl DerefMut for Bytes {
    fn deref_mut(&mut self) -> &mut [u8] {
        match self {
            Bytes::Heap(bytes) => bytes,
            Bytes::Map(map) => map,
        }
    }
}

/// Only an optimisation: an error, as on a system without huge pages, is ignored.
#[cfg(target_os = "linux")]
fn ask_for_huge_pages(map: &MmapMut) {
    let _ = map.advise(memmap2::Advice::HugePage);
}

#[cfg(not(target_os = "linux"))]
fn ask_for_huge_pages(_: &MmapMut) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_zeros_that_can_be_written() {
        for len in [0, 5, LARGE - 1, LARGE, LARGE + 3] {
            let mut bytes = Bytes::zeroed(len);
            assert!(bytes.len() == len && bytes.iter().all(|b| *b == 0));
            bytes.fill(7);
            assert!(bytes.iter().all(|b| *b == 7));
        }
    }
}
