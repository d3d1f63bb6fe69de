//! Partial matches at the end of a text, for text that has to be held back.

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `needle`. This part of the text is held
/// back until it is known whether `needle` follows.
pub(crate) fn overlap(text: &str, needle: &str) -> usize {
    let longest = text.len().min(needle.len().saturating_sub(1));
    (1..=longest).rev().find(|&bytes| text.as_bytes()[text.len() - bytes..] == needle.as_bytes()[..bytes]).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::overlap;

    #[test]
    fn the_longest_proper_prefix_counts() {
        assert_eq!(overlap("xaba", "abab"), 3);
        assert_eq!(overlap("xab", "ab"), 0);
        assert_eq!(overlap("aa", "aaa"), 2);
        assert_eq!(overlap("", "a"), 0);
        assert_eq!(overlap("é", "éa"), 2);
    }
}
