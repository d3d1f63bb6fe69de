//! Output files: checked before a command begins, so that nothing is replaced by mistake and no long run ends without a
//! place for its result.

use std::io::{IsTerminal, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::ArgMatches;
use larder_os::{output_file, write_atomically};

use crate::cli::output::OutputFile;

/// Checks all output files of a command line. A file that exists needs `--force` or, on a terminal, a yes.
pub fn check_all(matches: &ArgMatches) -> Result<()> {
    let mut matches = matches;
    while let Some((_, below)) = matches.subcommand() {
        matches = below;
    }
    let force = matches.try_get_one::<bool>("force").ok().flatten().is_some_and(|force| *force);
    for id in matches.ids() {
        if let Ok(Some(file)) = matches.try_get_one::<OutputFile>(id.as_str()) {
            check(file, force)?;
        }
    }
    Ok(())
}

/// Checks that `path` may be written: its folder exists, no device is there, and a file only if it may be replaced.
pub fn check(path: &Path, force: bool) -> Result<()> {
    let shown = || path.display().to_string();
    let (target, existing) = output_file(path).with_context(shown)?;
    if existing.is_some() {
        if force || confirmed(&format!("{} exists; replace it?", shown()))? {
            return Ok(());
        }
        bail!("{} exists and was not replaced; add --force to replace it", shown());
    }
    let folder = target.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        bail!("{}: the folder {} does not exist; create it first", shown(), folder.display());
    }
    Ok(())
}

/// Writes an output file whole, or leaves it as it was.
pub fn write(path: &Path, bytes: impl AsRef<[u8]>) -> Result<()> {
    write_atomically(path, |out| out.write_all(bytes.as_ref())).with_context(|| path.display().to_string())
}

/// Asks a question on the terminal; without one the answer is no.
pub fn confirmed(question: &str) -> Result<bool> {
    let input = std::io::stdin();
    if !input.is_terminal() || !std::io::stderr().is_terminal() {
        return Ok(false);
    }
    eprint!("{question} [y/N] ");
    std::io::stderr().flush()?;
    let mut answer = String::new();
    input.read_line(&mut answer)?;
    Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_replaced_only_with_force() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.csv");
        check(&path, false).unwrap();
        write(&path, "a").unwrap();
        check(&path, true).unwrap();
        let refused = format!("{:#}", check(&path, false).unwrap_err());
        assert!(refused.contains("add --force"), "{refused}");
        let device = if cfg!(windows) { "NUL" } else { "/dev/null" };
        let refused = format!("{:#}", check(Path::new(device), true).unwrap_err());
        assert!(refused.contains("not a file"), "{refused}");
        let refused = format!("{:#}", check(&dir.path().join("none/out.csv"), false).unwrap_err());
        assert!(refused.contains("create it first"), "{refused}");
    }
}
