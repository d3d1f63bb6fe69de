//! How often the bytes that a run reads are compared with their checksums.

use std::{
    fmt,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering},
};

/// Which reads of an expert, or of a block of a row table, are compared with its checksums.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum CheckReads {
    /// The first in a run. Bytes that a disk, a cable or memory returns wrong later are computed with, without an
    /// error.
    First,
    /// Every read.
    #[default]
    All,
}

impl CheckReads {
    /// All, with their names.
    pub const NAMED: [(&str, CheckReads); 2] = [("first", CheckReads::First), ("all", CheckReads::All)];
}

impl FromStr for CheckReads {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let named = CheckReads::NAMED.iter().find(|(name, _)| *name == text);
        named.map(|(_, checks)| *checks).ok_or_else(|| "must be first or all".into())
    }
}

impl fmt::Display for CheckReads {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            CheckReads::First => "first",
            CheckReads::All => "all",
        })
    }
}

/// A [`CheckReads`] that can be set while the store is shared.
pub(crate) struct ReadChecks {
    all: AtomicBool,
}

impl ReadChecks {
    /// With the default.
    pub fn new() -> Self {
        ReadChecks { all: AtomicBool::new(CheckReads::default() == CheckReads::All) }
    }

    pub fn set(&self, checks: CheckReads) {
        self.all.store(checks == CheckReads::All, Ordering::Relaxed);
    }

    /// Whether bytes that were compared before are compared again.
    pub fn again(&self) -> bool {
        self.all.load(Ordering::Relaxed)
    }
}
