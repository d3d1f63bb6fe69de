//! Finds the program and runs it in the foreground.

use std::path::PathBuf;
use std::process::{Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Time between looks at the program.
const PAUSE: Duration = Duration::from_millis(20);

/// The program of this name in a folder of `PATH`.
pub fn find(name: &str) -> Option<PathBuf> {
    let endings: &[&str] = if cfg!(windows) { &[".exe", ".cmd", ".bat"] } else { &[""] };
    let folders = std::env::var_os("PATH")?;
    let candidates = std::env::split_paths(&folders)
        .flat_map(|folder| endings.iter().map(move |ending| folder.join(format!("{name}{ending}"))));
    candidates.into_iter().find(|path| path.is_file())
}

/// Runs the program until it ends. Ctrl-C is for the program alone; a signal to end is passed on.
pub fn run(mut command: Command, name: &str) -> Result<ExitStatus> {
    let (interrupt, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let registered = flag::register(SIGINT, interrupt).and_then(|_| flag::register(SIGTERM, end.clone()));
    registered.context("signal handlers cannot be registered")?;
    let mut child = command.spawn().with_context(|| format!("{name} cannot be started"))?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if end.swap(false, Ordering::Relaxed) {
            super::server::terminate(&mut child);
        }
        std::thread::sleep(PAUSE);
    }
}
