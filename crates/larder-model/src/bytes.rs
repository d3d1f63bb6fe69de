use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;

/// Below this many bytes a matrix lies on the heap like everything else.
const LARGE: usize = 4 << 20;

/// A matrix's bytes: of a large one in memory of its own, for which huge pages are asked. They are had from the system
/// faster, and products that read all of them look up fewer addresses.
pub enum Bytes {
    /// On the heap.
    Heap(Vec<u8>),
    /// In a map of its own.
    Map(MmapMut),
}

impl Bytes {
    /// So many zeros.
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

/// Huge pages save time; where the system has none, the bytes are the same.
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
