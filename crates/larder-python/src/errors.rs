//! Errors as Python exceptions.

use larder_runtime::error_message;
use pyo3::prelude::*;
use pyo3::{create_exception, exceptions::PyException};

create_exception!(larder, Error, PyException, "What went wrong, in one sentence, which is also that of the command.");

/// The exception of an error.
pub fn raised(error: anyhow::Error) -> PyErr {
    Error::new_err(error_message(&error))
}

/// A result with its error as an exception.
pub fn or_raise<T>(result: anyhow::Result<T>) -> PyResult<T> {
    result.map_err(raised)
}
