//! Percent-encoding of addresses.

/// A path segment, percent-encoded.
pub(crate) fn encoded(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    text.bytes().map(|b| if plain(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_separates_segments_is_encoded() {
        assert_eq!(encoded("refs/pr 1?"), "refs%2Fpr%201%3F");
    }
}
