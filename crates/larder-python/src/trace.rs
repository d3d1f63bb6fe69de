//! Routing traces.

use std::path::PathBuf;
use std::sync::Arc;

use larder_core::Trace;
use pyo3::prelude::*;

use crate::array::{Number, PyArray, SharedNumbers};
use crate::background::compute;

/// The experts that each token chose, recorded or read from a file.
#[pyclass(frozen, name = "Trace", module = "larder._larder")]
pub struct PyTrace(Arc<Trace>);

/// SharedNumbers of a trace, which they keep.
struct OfTrace<T: Number>(Arc<Trace>, fn(&Trace) -> &[T]);

impl<T: Number> SharedNumbers for OfTrace<T> {
    fn address(&self) -> (usize, &'static str) {
        ((self.1)(&self.0).as_ptr() as usize, T::TYPE)
    }
}

impl PyTrace {
    /// A trace that was recorded.
    pub fn new(trace: Trace) -> Self {
        PyTrace(Arc::new(trace))
    }

    fn array<T: Number>(&self, of: fn(&Trace) -> &[T], shape: &[usize]) -> PyArray {
        PyArray::new(Arc::new(OfTrace(self.0.clone(), of)), shape.to_vec())
    }

    /// `None` for numbers that the trace does not have.
    fn if_recorded<T: Number>(&self, of: fn(&Trace) -> &[T], shape: &[usize]) -> Option<PyArray> {
        (!of(&self.0).is_empty()).then(|| self.array(of, shape))
    }
}

#[pymethods]
impl PyTrace {
    /// Number of tokens.
    #[getter]
    fn tokens(&self) -> usize {
        self.0.tokens()
    }

    /// Layers with experts.
    #[getter]
    fn layers(&self) -> usize {
        self.0.rows
    }

    /// Experts of a layer.
    #[getter]
    fn experts(&self) -> usize {
        self.0.experts
    }

    /// Places for a token's experts in a layer.
    #[getter]
    fn top_k(&self) -> usize {
        self.0.top_k
    }

    /// The chosen experts, `[tokens, layers, top_k]`.
    fn ids(&self) -> PyArray {
        self.array(|trace| &trace.ids, &[self.tokens(), self.0.rows, self.0.top_k])
    }

    /// Their weights, of the same shape, or nothing.
    fn weights(&self) -> Option<PyArray> {
        self.if_recorded(|trace| &trace.weights, &[self.tokens(), self.0.rows, self.0.top_k])
    }

    /// The router logits, `[tokens, layers, experts]`, or nothing.
    fn logits(&self) -> Option<PyArray> {
        self.if_recorded(|trace| &trace.logits, &[self.tokens(), self.0.rows, self.0.experts])
    }

    /// Tokens of each forward pass.
    fn passes(&self) -> PyArray {
        self.array(|trace| &trace.passes, &[self.0.passes.len()])
    }

    /// Tokens of each sequence.
    fn sequences(&self) -> PyArray {
        self.array(|trace| &trace.sequences, &[self.0.sequences.len()])
    }

    /// Whether each token was generated.
    fn decoded(&self) -> Vec<bool> {
        self.0.origins.iter().map(|origin| origin.decode).collect()
    }

    /// Text about the origin, by name.
    #[getter]
    fn meta(&self) -> std::collections::BTreeMap<String, String> {
        self.0.meta.clone()
    }

    /// Writes it to a file for `larder lab`.
    fn write(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let trace = self.0.clone();
        compute(py, move |_| Ok(trace.write(path)?))
    }
}

/// Reads a trace file.
#[pyfunction]
pub fn read_trace(py: Python<'_>, path: PathBuf) -> PyResult<PyTrace> {
    compute(py, move |_| Ok(PyTrace::new(Trace::read(path)?)))
}
