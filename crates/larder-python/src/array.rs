//! Arrays of numbers that numpy reads in place.

use std::sync::Arc;

use half::f16;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// A number that an array may hold, with numpy's name for it.
pub trait Number: Send + Sync + 'static {
    /// The type's name in numpy's array interface, little-endian.
    const TYPE: &'static str;
}

impl Number for f32 {
    const TYPE: &'static str = "<f4";
}

impl Number for f16 {
    const TYPE: &'static str = "<f2";
}

impl Number for u16 {
    const TYPE: &'static str = "<u2";
}

impl Number for u32 {
    const TYPE: &'static str = "<u4";
}

/// What keeps the numbers of an array.
pub trait SharedNumbers: Send + Sync {
    /// Address of the first, and numpy's name of their type.
    fn address(&self) -> (usize, &'static str);
}

impl<T: Number> SharedNumbers for Vec<T> {
    fn address(&self) -> (usize, &'static str) {
        (self.as_ptr() as usize, T::TYPE)
    }
}

/// A read-only array: `numpy.asarray` makes an array of it that shares its memory and keeps it.
#[pyclass(frozen, name = "Array", module = "larder._larder")]
pub struct PyArray {
    numbers: Arc<dyn SharedNumbers>,
    shape: Vec<usize>,
}

impl PyArray {
    /// An array of this shape, whose numbers it keeps.
    pub fn new(numbers: Arc<dyn SharedNumbers>, shape: Vec<usize>) -> Self {
        PyArray { numbers, shape }
    }
}

#[pymethods]
impl PyArray {
    /// The shape.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    /// Where the numbers are, for numpy.
    #[getter]
    fn __array_interface__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (address, name) = self.numbers.address();
        let interface = PyDict::new(py);
        interface.set_item("version", 3)?;
        interface.set_item("typestr", name)?;
        interface.set_item("shape", self.shape(py)?)?;
        interface.set_item("data", (address, true))?;
        Ok(interface)
    }
}
