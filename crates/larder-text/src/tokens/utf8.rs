//! Incremental UTF-8 decoding.

/// Decodes UTF-8 that arrives in pieces. Invalid bytes are replaced by U+FFFD, as in [`String::from_utf8_lossy`].
#[derive(Clone, Default, Debug)]
pub(crate) struct Utf8Stream {
    /// The first bytes of an incomplete character, at most three.
    partial: Vec<u8>,
}

impl Utf8Stream {
    /// The text that is complete with `bytes`.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> String {
        self.partial.extend_from_slice(bytes);
        let bytes = std::mem::take(&mut self.partial);
        let mut text = String::with_capacity(bytes.len());
        let mut rest = bytes.as_slice();
        while let Err(error) = std::str::from_utf8(rest) {
            let (valid, after) = rest.split_at(error.valid_up_to());
            text.push_str(&String::from_utf8_lossy(valid));
            let Some(invalid) = error.error_len() else {
                self.partial = after.to_vec();
                return text;
            };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &after[invalid..];
        }
        text.push_str(&String::from_utf8_lossy(rest));
        text
    }

    /// Ends the text; an incomplete character is replaced.
    pub(crate) fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.partial)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn incomplete_characters_are_held_back_and_invalid_ones_are_replaced() {
        let mut stream = Utf8Stream::default();
        assert_eq!(stream.push(&[b'a', 0xf0, 0x9f]), "a");
        assert_eq!(stream.push(&[0xa6]), "");
        assert_eq!(stream.push(&[0x86, 0xc3]), "🦆");
        assert_eq!(stream.push(b"x"), "\u{fffd}x");
        assert_eq!(stream.push(&[0xe2, 0x82]), "");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "");
    }

    proptest! {
        #[test]
        fn pieces_decode_as_the_whole(
            pieces in prop::collection::vec(prop::collection::vec(
                prop_oneof![Just(b'a'), Just(0xc3), Just(0xa9), Just(0xf0), Just(0x9f), Just(0x80), any::<u8>()], 0..4), 0..12)
        ) {
            let mut stream = Utf8Stream::default();
            let mut text: String = pieces.iter().map(|piece| stream.push(piece)).collect();
            text.push_str(&stream.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&pieces.concat()).into_owned());
        }
    }
}
