//! The scope of a cache: slots per layer, or one pool for all.

use std::fmt;

/// Which experts share one pool of slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum CacheScope {
    /// A pool per layer.
    Layer,
    /// One pool for all layers.
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
