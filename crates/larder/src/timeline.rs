//! The timeline that `--profile` asks for.

use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ArgMatches;
use larder_os::timeline::{self, TimelineGuard};

use crate::cli::ByteSize;
use crate::output;

/// A timeline that is being written. Dropped, it is complete, and a line names the file.
pub struct RunTimeline {
    path: PathBuf,
    guard: Option<TimelineGuard>,
}

/// Begins the timeline of a command line; `None` if it asks for none.
pub fn begin(matches: &ArgMatches) -> Result<Option<RunTimeline>> {
    let mut matches = matches;
    while let Some((_, below)) = matches.subcommand() {
        matches = below;
    }
    let of = |id: &str| matches.try_get_one::<PathBuf>(id).ok().flatten();
    let Some(path) = of("profile") else { return Ok(None) };
    let limit = matches.get_one::<ByteSize>("profile_max").map_or(u64::MAX, |size| size.0);
    Ok(Some(RunTimeline::new(path, limit)?))
}

impl RunTimeline {
    fn new(path: &Path, limit: u64) -> Result<Self> {
        output::check(path, true)?;
        let shown = || path.display().to_string();
        let file = File::create(path).with_context(shown)?;
        let guard = timeline::begin(file, path, limit).with_context(shown)?;
        Ok(RunTimeline { path: path.to_owned(), guard: Some(guard) })
    }
}

impl Drop for RunTimeline {
    fn drop(&mut self) {
        match self.guard.take().and_then(TimelineGuard::finish) {
            None => eprintln!("profile: written to {}; open it in Perfetto or chrome://tracing", self.path.display()),
            Some(why) => eprintln!("profile: ended early, {why}"),
        }
    }
}
