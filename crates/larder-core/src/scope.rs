use std::fmt;

/// What shares one set of slots.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Scope {
    /// The experts of one layer.
    Layer,
    /// All experts.
    Global,
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Scope::Layer => "layer",
            Scope::Global => "global",
        })
    }
}
