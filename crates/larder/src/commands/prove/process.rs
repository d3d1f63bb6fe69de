//! Kernels of other instruction sets: a process chooses them once, so each set gets a process of its own.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use serde_json::Value;

use super::report::{CaseResult, Outcome};
use crate::TYPED;

/// Starts the command line of this process once more, with these kernels, to be compared with what was `written`.
pub fn compare(kernels: &str, written: &[u8]) -> Result<Outcome> {
    let program = std::env::current_exe()?;
    if !is_larder(&program) {
        let why = format!("{} cannot start a process of its own for them", program.display());
        return Ok(Outcome::LeftOut { why });
    }
    let typed = TYPED.get().map(Vec::as_slice).unwrap_or_default();
    let mut command = Command::new(program);
    command.args(line(typed, kernels)).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(Outcome::LeftOut { why: format!("a process of its own cannot be started: {error}") }),
    };
    // A process that has ended takes nothing, and its messages say why.
    let _ = child.stdin.take().map(|mut stdin| stdin.write_all(written));
    let output = child.wait_with_output()?;
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    match serde_json::from_value::<CaseResult>(printed["cases"][0].clone()) {
        Ok(case) => Ok(case.outcome),
        Err(_) => {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().last().unwrap_or_default().trim_start_matches("error: ");
            bail!("the process with {kernels} kernels ended ({}): {last}", output.status)
        }
    }
}

/// Whether a program is the command, and not one that brings it along.
fn is_larder(program: &Path) -> bool {
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("larder"))
}

/// The words behind the program's name: those that were typed, with these kernels and without what is for a person.
fn line(typed: &[OsString], kernels: &str) -> Vec<OsString> {
    let (mut words, mut typed) = (Vec::new(), typed.iter().skip(1));
    while let Some(word) = typed.next() {
        match word.to_str() {
            Some("--json") => {}
            Some("--save") => _ = typed.next(),
            Some(saved) if saved.starts_with("--save=") => {}
            _ => words.push(word.clone()),
        }
    }
    words.extend(["--json", "--against", "-", "-o"].map(OsString::from));
    words.push(format!("kernels={kernels}").into());
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_its_own_prints_json_and_saves_nothing() {
        let words = |typed: &str| {
            let typed: Vec<OsString> = typed.split(' ').map(OsString::from).collect();
            let line = line(&typed, "portable");
            line.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
        };
        let own = "--json --against - -o kernels=portable";
        assert_eq!(words("larder prove -m a -n 3"), format!("prove -m a -n 3 {own}"));
        for saved in ["--save f", "--save=f"] {
            let found = words(&format!("/bin/larder prove --json {saved} --force -o kernels=avx2"));
            assert_eq!(found, format!("prove --force -o kernels=avx2 {own}"));
        }
    }

    #[test]
    fn a_program_that_brings_the_command_along_is_not_started() {
        assert!(is_larder(Path::new("/usr/bin/larder")) && is_larder(Path::new("larder.exe")));
        assert!(!is_larder(Path::new("/usr/bin/python3.13")));
    }
}
