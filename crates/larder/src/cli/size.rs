use larder_core::parse_bytes;

/// A number of bytes, as typed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ByteSize(pub u64);

/// Reads a number of bytes, with a unit or without.
pub fn byte_size(text: &str) -> Result<ByteSize, String> {
    parse_bytes(text).map(ByteSize)
}
