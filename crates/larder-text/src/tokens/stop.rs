//! Stop strings.

/// Ends streamed text at the first of several stop strings.
///
/// The output is all text before the earliest position at which a stop string begins, independent of how the text is
/// split into pieces. Text that may be the beginning of a stop string is held back until it is decided.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: Option<usize>,
}

/// An invalid list of stop strings.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty string, which would stop every text.
    #[error("a stop string is empty; remove it or give it at least one character")]
    Empty,
    /// More strings or bytes than are searched for at each token.
    #[error(
        "{strings} stop strings with {bytes} bytes in total; at most {} strings with {} bytes are supported",
        StopMatcher::MAX_STRINGS,
        StopMatcher::MAX_BYTES
    )]
    TooMany {
        /// Number of strings.
        strings: usize,
        /// Bytes of all strings together.
        bytes: usize,
    },
}

impl StopMatcher {
    /// Maximum number of stop strings.
    pub const MAX_STRINGS: usize = 64;
    /// Maximum bytes of all stop strings together.
    pub const MAX_BYTES: usize = 8192;

    /// A matcher for `stops`; an empty list lets all text pass.
    pub fn new(stops: Vec<String>) -> Result<Self, StopError> {
        let (strings, bytes) = (stops.len(), stops.iter().map(String::len).sum());
        if stops.iter().any(String::is_empty) {
            return Err(StopError::Empty);
        }
        if strings > Self::MAX_STRINGS || bytes > Self::MAX_BYTES {
            return Err(StopError::TooMany { strings, bytes });
        }
        Ok(StopMatcher { stops, held: String::new(), stopped: None })
    }

    /// Takes the next piece and returns the text that cannot be part of a stop string.
    pub fn push(&mut self, piece: &str) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let overlap_bytes = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let undecided = self.held.len() - overlap_bytes;
        match self.first() {
            // A longer stop string may have begun before this one: wait for it.
            Some((at, _)) if undecided < at => self.held.drain(..undecided).collect(),
            Some((at, stop)) => self.end_at(at, stop),
            None => self.held.drain(..undecided).collect(),
        }
    }

    /// Ends the text and returns the part that was held back, up to a stop string.
    pub fn finish(&mut self) -> String {
        match self.first() {
            Some((at, stop)) => self.end_at(at, stop),
            None => std::mem::take(&mut self.held),
        }
    }

    /// Index of the stop string that was found, if one was.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Position and index of the earliest stop string, the shortest of several at one position.
    fn first(&self) -> Option<(usize, usize)> {
        let found = |(index, stop): (usize, &String)| Some((self.held.find(stop.as_str())?, stop.len(), index));
        let (at, _, index) = self.stops.iter().enumerate().filter_map(found).min()?;
        Some((at, index))
    }

    fn end_at(&mut self, at: usize, stop: usize) -> String {
        self.stopped = Some(stop);
        self.held.truncate(at);
        std::mem::take(&mut self.held)
    }
}

/// Bytes of `text` that cannot be the beginning of any of `marks`, whatever follows.
pub(crate) fn certain(text: &str, marks: &[&str]) -> usize {
    text.len() - marks.iter().map(|mark| overlap(text, mark)).max().unwrap_or(0)
}

/// Length in bytes of the longest suffix of `text` that is a proper prefix of `needle`. This part of the text is held
/// back until it is known whether `needle` follows.
pub(crate) fn overlap(text: &str, needle: &str) -> usize {
    let longest = text.len().min(needle.len().saturating_sub(1));
    (1..=longest).rev().find(|&bytes| text.as_bytes()[text.len() - bytes..] == needle.as_bytes()[..bytes]).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect()).unwrap();
        let mut out: Vec<String> = pieces.iter().map(|piece| matcher.push(piece)).collect();
        out.push(matcher.finish());
        (out, matcher.stopped())
    }

    #[test]
    fn text_is_released_as_soon_as_it_cannot_be_a_stop_string() {
        let (out, stopped) = run(&["\nUser:"], &["Hi", "\n", "U", "nit", "\nUs", "er", ": x", "more"]);
        assert_eq!(out, ["Hi", "", "", "\nUnit", "", "", "", "", ""]);
        assert_eq!(stopped, Some(0));
    }

    #[test]
    fn an_earlier_longer_stop_string_wins_over_one_inside_it() {
        assert_eq!(run(&["abcd", "bc"], &["xabc", "d"]), (vec!["x".into(), "".into(), "".into()], Some(0)));
        assert_eq!(run(&["abcd", "bc"], &["xabc", "e"]), (vec!["x".into(), "a".into(), "".into()], Some(1)));
        assert_eq!(run(&["abcd", "bc"], &["xabc"]), (vec!["x".into(), "a".into()], Some(1)));
    }

    #[test]
    fn without_stop_strings_all_text_passes() {
        assert_eq!(run(&[], &["a", "b"]), (vec!["a".into(), "b".into(), "".into()], None));
    }

    #[test]
    fn invalid_lists_are_errors() {
        assert_eq!(StopMatcher::new(vec!["".into()]).unwrap_err(), StopError::Empty);
        assert!(StopMatcher::new(vec!["x".into(); 65]).is_err());
        assert!(StopMatcher::new(vec!["x".repeat(8193)]).is_err());
    }

    proptest! {
        #[test]
        fn text_split_into_any_pieces_ends_where_a_plain_search_finds_a_stop(
            stops in prop::collection::vec("[abé]{1,4}", 0..4),
            pieces in prop::collection::vec("[abé]{0,3}", 0..12),
        ) {
            let text: String = pieces.concat();
            let cut = stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
            let mut matcher = StopMatcher::new(stops).unwrap();
            let mut out: String = pieces.iter().map(|piece| matcher.push(piece)).collect();
            out.push_str(&matcher.finish());
            prop_assert_eq!(out, &text[..cut.unwrap_or(text.len())]);
            prop_assert_eq!(matcher.stopped().is_some(), cut.is_some());
        }
    }

    #[test]
    fn the_longest_proper_prefix_counts() {
        assert_eq!(overlap("xaba", "abab"), 3);
        assert_eq!(overlap("xab", "ab"), 0);
        assert_eq!(overlap("aa", "aaa"), 2);
        assert_eq!(overlap("", "a"), 0);
        assert_eq!(overlap("é", "éa"), 2);
    }
}
