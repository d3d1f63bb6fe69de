//! Index of the sequences in a folder: which tokens each has, and which files are removed when there are too many.

use larder_engine::SequenceOrigin;

/// The most sequences that are indexed.
const FILES_MAX: usize = 1024;
/// The most tokens of all indexed sequences, of four bytes each in memory.
const TOKENS_MAX: usize = 16 << 20;
/// Bytes of a name in memory.
const NAME_BYTES: usize = 32;

/// The most bytes of an index of sequences of at most `context` tokens.
pub fn index_bytes(context: usize) -> u64 {
    let tokens = FILES_MAX.saturating_mul(context).min(TOKENS_MAX);
    (tokens * size_of::<u32>() + FILES_MAX * (size_of::<IndexEntry>() + NAME_BYTES)) as u64
}

/// A saved sequence.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct IndexEntry {
    /// Name of the file.
    pub name: String,
    /// What it is of.
    pub origin: SequenceOrigin,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Length of the file.
    pub bytes: u64,
}

/// The sequences of a folder that were saved as prefixes, within a limit of bytes.
pub struct SessionIndex {
    /// Least recently used first.
    entries: Vec<IndexEntry>,
    /// Names and lengths of files that clients named; they count, and are not removed.
    named: Vec<(String, u64)>,
    limit_bytes: u64,
}

impl SessionIndex {
    /// An empty index for files of `limit_bytes` bytes together.
    pub fn new(limit_bytes: u64) -> Self {
        SessionIndex { entries: Vec::new(), named: Vec::new(), limit_bytes }
    }

    /// Adds a sequence as the most recently used one, in the place of an earlier one of this name.
    pub fn add(&mut self, entry: IndexEntry) {
        self.forget(&entry.name);
        self.entries.push(entry);
    }

    /// Counts a file that a client named.
    pub fn add_named(&mut self, name: &str, bytes: u64) {
        self.named.retain(|(other, _)| other != name);
        self.named.push((name.to_owned(), bytes));
    }

    /// Leaves a sequence out.
    pub fn forget(&mut self, name: &str) {
        self.entries.retain(|entry| entry.name != name);
    }

    /// Makes a sequence the most recently used one; false if it is not there.
    pub fn touch(&mut self, name: &str) -> bool {
        let at = self.entries.iter().position(|entry| entry.name == name);
        at.map(|at| self.entries[at..].rotate_left(1)).is_some()
    }

    /// The sequence of `origin` with the longest prefix for which `shared` returns a length, and that length. Of
    /// several it is the one that was used last.
    pub fn best(&self, origin: &SequenceOrigin, shared: impl Fn(&[u32]) -> Option<usize>) -> Option<(String, usize)> {
        let own = self.entries.iter().filter(|entry| entry.origin == *origin);
        let (shared, entry) =
            own.filter_map(|entry| Some((shared(&entry.tokens)?, entry))).max_by_key(|(shared, _)| *shared)?;
        Some((entry.name.clone(), shared))
    }

    /// Takes out the sequences that `longer` continues, and returns their names.
    pub fn take_continued(&mut self, longer: &IndexEntry) -> Vec<String> {
        let is_continued = |entry: &mut IndexEntry| {
            entry.origin == longer.origin && entry.name != longer.name && longer.tokens.starts_with(&entry.tokens)
        };
        self.entries.extract_if(.., is_continued).map(|entry| entry.name).collect()
    }

    /// Takes out all sequences, and returns their names.
    pub fn take_all(&mut self) -> Vec<String> {
        self.entries.drain(..).map(|entry| entry.name).collect()
    }

    /// Takes out the least recently used sequences until a file of `bytes` bytes and `tokens` tokens fits, in the place
    /// of one that a client named `instead_of`. Returns their names; `None` if it does not fit at all.
    pub fn make_room(&mut self, bytes: u64, tokens: usize, instead_of: Option<&str>) -> Option<Vec<String>> {
        let kept = self.named.iter().filter(|(name, _)| Some(name.as_str()) != instead_of);
        let fixed = kept.map(|(_, bytes)| bytes).sum::<u64>().saturating_add(bytes);
        if fixed > self.limit_bytes {
            return None;
        }
        let (mut used, mut held, mut from) = (fixed, tokens, self.entries.len());
        for (i, entry) in self.entries.iter().enumerate().rev() {
            (used, held) = (used.saturating_add(entry.bytes), held + entry.tokens.len());
            if used > self.limit_bytes || held > TOKENS_MAX || self.entries.len() - i >= FILES_MAX {
                break;
            }
            from = i;
        }
        Some(self.entries.drain(..from).map(|entry| entry.name).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, tokens: &[u32], bytes: u64) -> IndexEntry {
        let origin = SequenceOrigin::new("model", "");
        IndexEntry { name: name.into(), origin, tokens: tokens.to_vec(), bytes }
    }

    fn names(index: &SessionIndex) -> Vec<&str> {
        index.entries.iter().map(|entry| entry.name.as_str()).collect()
    }

    fn index(limit: u64) -> SessionIndex {
        let mut index = SessionIndex::new(limit);
        for (name, tokens) in [("a", &[1, 2][..]), ("b", &[1, 2, 3]), ("c", &[9])] {
            index.add(entry(name, tokens, 10));
        }
        index
    }

    #[test]
    fn the_least_recently_used_go_first() {
        let mut index = index(40);
        assert!(index.touch("a") && !index.touch("x"));
        assert_eq!(names(&index), ["b", "c", "a"]);
        assert_eq!(index.make_room(10, 1, None), Some(vec![]));
        assert_eq!(index.make_room(11, 1, None), Some(vec!["b".into()]));
        index.add(entry("c", &[4], 12));
        assert_eq!(names(&index), ["a", "c"]);
        assert_eq!(index.make_room(41, 1, None), None);
        assert_eq!(index.make_room(40, 1, None), Some(vec!["a".into(), "c".into()]));
    }

    #[test]
    fn files_of_clients_count_and_stay() {
        let mut index = index(40);
        index.add_named("mine.bin", 25);
        index.add_named("mine.bin", 15);
        assert_eq!(index.make_room(0, 0, None), Some(vec!["a".into()]));
        assert_eq!(index.make_room(26, 1, None), None);
        assert_eq!(index.make_room(26, 1, Some("mine.bin")), Some(vec!["b".into()]));
    }

    #[test]
    fn a_longer_sequence_takes_the_place_of_its_beginnings() {
        let mut index = index(100);
        let longer = entry("d", &[1, 2, 3, 4], 10);
        assert_eq!(index.take_continued(&longer), ["a", "b"]);
        assert_eq!(names(&index), ["c"]);
        let other = IndexEntry { origin: SequenceOrigin::new("model", "q8_0"), ..entry("e", &[9, 9], 10) };
        assert!(index.take_continued(&other).is_empty());
    }

    #[test]
    fn the_longest_prefix_of_the_same_origin_is_found() {
        let index = index(100);
        let shared = |tokens: &[u32]| Some(tokens.len()).filter(|len| *len > 1);
        assert_eq!(index.best(&SequenceOrigin::new("model", ""), shared), Some(("b".into(), 3)));
        assert_eq!(index.best(&SequenceOrigin::new("model", "f32"), shared), None);
    }
}
