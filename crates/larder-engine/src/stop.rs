use crate::overlap::overlap;

/// Cuts streamed text at the first of several stop strings.
///
/// The text that leaves is, whatever the pieces were, all text before the earliest position at which a stop string
/// begins. Text that may be the beginning of one is held back until that is known.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: Option<usize>,
}

/// A list of stop strings that cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum StopError {
    /// An empty string would stop everything.
    #[error("a stop string must not be empty")]
    Empty,
    /// More than can be looked for at each token.
    #[error(
        "there are {strings} stop strings of {bytes} bytes together, at most {} of {} are allowed",
        StopMatcher::MAX_STRINGS,
        StopMatcher::MAX_BYTES
    )]
    TooMany {
        /// Strings given.
        strings: usize,
        /// Their bytes.
        bytes: usize,
    },
}

impl StopMatcher {
    /// Most stop strings.
    pub const MAX_STRINGS: usize = 64;
    /// Most bytes of all stop strings together.
    pub const MAX_BYTES: usize = 8192;

    /// A matcher for `stops`; with none, all text passes.
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

    /// Takes the next piece and returns the text that is certainly before every stop string.
    pub fn push(&mut self, piece: &str) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        self.held.push_str(piece);
        let open = self.stops.iter().map(|stop| overlap(&self.held, stop)).max().unwrap_or(0);
        let undecided = self.held.len() - open;
        match self.first() {
            // A longer stop string may have begun before this one: wait for it.
            Some((at, _)) if undecided < at => self.held.drain(..undecided).collect(),
            Some((at, stop)) => self.cut(at, stop),
            None => self.held.drain(..undecided).collect(),
        }
    }

    /// Ends the text and returns what was held back and is not cut.
    pub fn finish(&mut self) -> String {
        match self.first() {
            Some((at, stop)) => self.cut(at, stop),
            None => std::mem::take(&mut self.held),
        }
    }

    /// Which stop string was found, counted in the order given.
    pub fn stopped(&self) -> Option<usize> {
        self.stopped
    }

    /// Where the earliest stop string begins, and which it is; the shortest of several.
    fn first(&self) -> Option<(usize, usize)> {
        let found = |(index, stop): (usize, &String)| Some((self.held.find(stop.as_str())?, stop.len(), index));
        let (at, _, index) = self.stops.iter().enumerate().filter_map(found).min()?;
        Some((at, index))
    }

    fn cut(&mut self, at: usize, stop: usize) -> String {
        self.stopped = Some(stop);
        self.held.truncate(at);
        std::mem::take(&mut self.held)
    }
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
    fn text_leaves_as_soon_as_it_cannot_be_a_stop_string() {
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
    fn unusable_lists_are_refused() {
        assert_eq!(StopMatcher::new(vec!["".into()]).unwrap_err(), StopError::Empty);
        assert!(StopMatcher::new(vec!["x".into(); 65]).is_err());
        assert!(StopMatcher::new(vec!["x".repeat(8193)]).is_err());
    }

    proptest! {
        #[test]
        fn whatever_the_pieces_the_cut_is_where_a_plain_search_finds_it(
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
}
