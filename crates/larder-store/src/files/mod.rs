//! Files as bytes: atomic writes, reads at offsets and past the page cache, safetensors headers, checksums.

pub(crate) mod atomic_file;
pub(crate) mod checksum;
pub(crate) mod describe;
pub(crate) mod direct;
pub(crate) mod io_failure;
pub(crate) mod page_cache;
pub(crate) mod read_at;
pub(crate) mod safetensors;
