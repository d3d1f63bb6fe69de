/// Turns bytes that arrive in pieces into text; what can never become valid is replaced by U+FFFD, as
/// [`String::from_utf8_lossy`] does it.
#[derive(Clone, Default, Debug)]
pub(crate) struct Utf8Stream {
    /// The beginning of a character, at most three bytes.
    partial: Vec<u8>,
}

impl Utf8Stream {
    /// The text that `bytes` complete.
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

    /// The end: a character that was never completed is replaced.
    pub(crate) fn finish(&mut self) -> String {
        String::from_utf8_lossy(&std::mem::take(&mut self.partial)).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn half_a_character_waits_and_a_broken_one_does_not() {
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
        fn pieces_give_what_the_whole_gives(
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
