//! The extension module of the Python package, `larder._larder`: what `python/larder/` is built on.
//!
//! Options, answers and counts pass as JSON, with the names of the command's flags. Whatever computes runs on a thread
//! of its own, while the caller waits without the interpreter's lock and looks for signals.

mod array;
mod background;
mod command;
mod errors;
mod images;
mod model;
mod stream;
mod trace;

use pyo3::prelude::*;

/// The extension module.
#[pymodule]
fn _larder(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("Error", module.py().get_type::<errors::Error>())?;
    module.add_class::<model::PyModel>()?;
    module.add_class::<stream::PyStream>()?;
    module.add_class::<trace::PyTrace>()?;
    module.add_class::<array::PyArray>()?;
    module.add_function(wrap_pyfunction!(trace::read_trace, module)?)?;
    module.add_function(wrap_pyfunction!(command::command, module)?)
}
