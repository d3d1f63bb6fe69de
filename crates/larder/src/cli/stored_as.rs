//! The number formats of a conversion, as typed.

use larder_core::NumberFormat;

/// `keep`, or a number format that larder writes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct StoredAs(pub Option<NumberFormat>);

/// Parses a number format, or `keep`.
pub fn parse_stored_as(text: &str) -> Result<StoredAs, String> {
    match text {
        "keep" => Ok(StoredAs(None)),
        other => match other.parse() {
            Ok(kind) => Ok(StoredAs(Some(kind))),
            Err(_) => Err(format!("must be keep, {}", NumberFormat::names(NumberFormat::is_encodable))),
        },
    }
}
