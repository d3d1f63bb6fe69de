//! The checksums in a store: XXH3 of 128 bits, in hex.

use twox_hash::XxHash3_128;

/// The checksum of `bytes`.
pub fn checksum_of(bytes: &[u8]) -> String {
    format!("{:032x}", XxHash3_128::oneshot(bytes))
}

/// Whether a text has the form of a checksum.
pub fn is_checksum(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

/// Whether `checksum` is that of `bytes`; allocates nothing.
pub fn is_checksum_of(checksum: &str, bytes: &[u8]) -> bool {
    checksum.len() == 32 && u128::from_str_radix(checksum, 16) == Ok(XxHash3_128::oneshot(bytes))
}
