//! Output files.

use std::ffi::OsString;
use std::ops::Deref;
use std::path::{Path, PathBuf};

use clap::Args;

use super::heading;

/// The path of a file that a command writes. It is checked before the command begins: see `crate::output`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OutputFile(pub PathBuf);

impl From<OsString> for OutputFile {
    fn from(path: OsString) -> Self {
        OutputFile(path.into())
    }
}

impl Deref for OutputFile {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.0
    }
}

impl AsRef<Path> for OutputFile {
    fn as_ref(&self) -> &Path {
        &self.0
    }
}

/// Replacing output files.
#[derive(Args, Clone, Copy, Default)]
pub struct ReplaceFlag {
    /// Replace output files that exist, without asking
    #[arg(long, hide_short_help = true, help_heading = heading::OUTPUT)]
    pub force: bool,
}
