//! The traits that read tensors by name and by row.

use std::sync::Arc;

use crate::{NumberFormat, RowOrder};

/// Number format, row order and shape of a named tensor, known before its data are read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorMeta {
    /// Number format of its values.
    pub kind: NumberFormat,
    /// How its rows are interleaved.
    pub order: RowOrder,
    /// Logical shape, outermost dimension first. The last dimension is a whole number of blocks of `kind`.
    pub shape: Vec<usize>,
    /// Length in bytes.
    pub bytes: usize,
}

impl TensorMeta {
    /// A tensor in plain row order; `None` if the last dimension is not whole blocks or the size overflows.
    pub fn new(kind: NumberFormat, shape: Vec<usize>) -> Option<Self> {
        let (cols, outer) = shape.split_last().map_or((1, &[][..]), |(c, o)| (*c, o));
        let rows = outer.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        let bytes = kind.matrix_bytes(rows, cols)?;
        Some(TensorMeta { kind, order: RowOrder::Plain, shape, bytes })
    }
}

/// Why a tensor could not be read. The text names the file; callers add only the purpose.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TensorsError(pub String);

/// The rows of a matrix, of which some are read at a time.
pub trait TensorRows: Send + Sync {
    /// Number format and shape, `[rows, cols]`, in plain row order.
    fn meta(&self) -> &TensorMeta;

    /// Reads some rows, in any order; an SSD reads them at the same time. A row that does not exist is an error.
    ///
    /// The caller guarantees that `into` has the length of these rows; the implementation fills all of it, one row after the
    /// other, or fails with an error that names the file.
    fn read_rows(&self, rows: &[usize], into: &mut [u8]) -> Result<(), TensorsError>;

    /// Bytes of memory that are kept to read rows: checksums.
    fn kept_bytes(&self) -> usize {
        0
    }
}

/// Reads tensors by name, from several threads at a time; implemented by checkpoints, GGUF files and stores.
pub trait Tensors: Sync {
    /// The tensor called `name`, or `None` if there is none. Costs no I/O.
    fn meta(&self, name: &str) -> Option<&TensorMeta>;

    /// Reads `into.len()` bytes of the tensor from byte `offset` on.
    ///
    /// The caller guarantees that the range lies inside the tensor; the implementation fills all of `into`, or fails
    /// with an error that names file and offset.
    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError>;

    /// The rows of the matrix `name`, if it is stored so that single rows can be read cheaply.
    fn rows(&self, _name: &str) -> Option<Arc<dyn TensorRows>> {
        None
    }
}
