//! Who leaves when room is needed. One policy per file; to add one, copy the nearest file and add its row to the table.

mod lru;

pub use lru::Lru;

/// An expert among all that one cache may hold, counted densely from 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Key(pub u32);

impl Key {
    /// As an index into a slice over all keys.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Ranks what is in memory. The ledger owns capacity, pins and counts; a policy only answers who next.
///
/// Experts that one token uses in one layer arrive together. The ledger tells of them in the order of their rank, best
/// first, so that a policy which goes by recency gives up the best of them first.
pub trait Eviction: Send {
    /// `key` has come in. The caller guarantees that it was out.
    fn admit(&mut self, key: Key);

    /// `key` is used again. The caller guarantees that it is in.
    fn touch(&mut self, key: Key);

    /// Who leaves, among those that are in and for which `evictable` holds; `None` if there is nobody. The policy keeps
    /// the key until [`forget`](Eviction::forget).
    fn victim(&mut self, evictable: &dyn Fn(Key) -> bool) -> Option<Key>;

    /// `key` has left. The caller guarantees that it was in.
    fn forget(&mut self, key: Key);
}

/// A policy by name.
pub struct Policy {
    /// The name in flags and reports.
    pub name: &'static str,
    /// Makes one for keys below `keys`.
    pub make: fn(keys: usize) -> Box<dyn Eviction>,
}

/// Every policy.
pub const POLICIES: &[Policy] = &[Policy { name: "lru", make: |keys| Box::new(Lru::new(keys)) }];

/// A name that is no policy.
#[derive(Debug, thiserror::Error)]
#[error("unknown eviction policy '{name}'; known are {known}")]
pub struct UnknownPolicy {
    name: String,
    known: String,
}

/// The policy called `name`.
pub fn find(name: &str) -> Result<&'static Policy, UnknownPolicy> {
    POLICIES.iter().find(|p| p.name == name).ok_or_else(|| {
        let known: Vec<_> = POLICIES.iter().map(|p| p.name).collect();
        UnknownPolicy { name: name.to_owned(), known: known.join(", ") }
    })
}
