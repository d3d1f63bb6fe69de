use std::fmt;

/// What shares one set of slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CacheScope {
    /// The experts of one layer.
    Layer,
    /// All experts.
    Global,
}

impl fmt::Display for CacheScope {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            CacheScope::Layer => "layer",
            CacheScope::Global => "global",
        })
    }
}
