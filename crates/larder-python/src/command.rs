//! The `larder` command within Python.

use std::ffi::OsString;
use std::path::PathBuf;

use pyo3::prelude::*;

/// Runs a command line, of which the first word is the program's name, and ends the process with its exit code. `demo`
/// is the folder of the demo model.
#[pyfunction]
pub fn command(py: Python<'_>, line: Vec<OsString>, demo: PathBuf) {
    let code = py.detach(|| larder_command::main_of(line, Some(demo)));
    // Standard output is flushed by this and not by the end of the interpreter.
    std::process::exit(code.into());
}
