//! Sizes in bytes.

use larder_core::parse_bytes;

/// A size in bytes, as typed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteSize(pub u64);

/// Parses a size in bytes, with a unit or without.
pub fn byte_size(text: &str) -> Result<ByteSize, String> {
    parse_bytes(text).map(ByteSize)
}
