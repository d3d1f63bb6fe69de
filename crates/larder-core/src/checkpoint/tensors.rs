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

/// The name under which a source has, beside the matrix `name`, the f32 that all of its values are multiplied by.
pub fn matrix_scale_name(name: &str) -> String {
    format!("{name}.scale")
}

/// Where the scale of a matrix is.
pub struct MatrixScale {
    name: String,
    offset: usize,
}

impl MatrixScale {
    /// The scale of the matrix `name`, or of number `index` of the `count` matrices that the tensor holds; `None` if
    /// there is none, which is as if it were 1. Costs no I/O.
    pub fn find(
        tensors: &dyn Tensors,
        name: &str,
        (index, count): (usize, usize),
    ) -> Result<Option<Self>, TensorsError> {
        if !tensors.meta(name).is_some_and(|meta| meta.kind.has_matrix_scale()) {
            return Ok(None);
        }
        let name = matrix_scale_name(name);
        let Some(meta) = tensors.meta(&name) else { return Ok(None) };
        let stored = if meta.kind == NumberFormat::F32 { meta.shape.iter().product() } else { 0 };
        match stored {
            1 => Ok(Some(MatrixScale { name, offset: 0 })),
            _ if stored == count => Ok(Some(MatrixScale { name, offset: index * size_of::<f32>() })),
            _ => {
                let TensorMeta { kind, shape, .. } = meta;
                let wanted = if count == 1 { "one f32".into() } else { format!("one f32, or {count}, one per matrix") };
                Err(TensorsError(format!("tensor '{name}' is {kind} of shape {shape:?}, but should be {wanted}")))
            }
        }
    }

    /// The tensor that holds it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Reads it. It may be infinite or NaN.
    pub fn read(&self, tensors: &dyn Tensors) -> Result<f32, TensorsError> {
        let mut bytes = [0; size_of::<f32>()];
        tensors.read(&self.name, self.offset, &mut bytes)?;
        Ok(f32::from_le_bytes(bytes))
    }
}

/// What all values of the matrix `name` are multiplied by: its [`MatrixScale`], or 1. Refused if it is infinite or NaN.
pub fn matrix_scale(tensors: &dyn Tensors, name: &str) -> Result<f32, TensorsError> {
    let Some(stored) = MatrixScale::find(tensors, name, (0, 1))? else { return Ok(1.0) };
    let scale = stored.read(tensors)?;
    if scale.is_finite() {
        Ok(scale)
    } else {
        Err(TensorsError(format!("tensor '{}' holds the scale {scale}", stored.name)))
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
    /// The caller guarantees that `into` has the length of these rows; the implementation fills all of it, one row
    /// after the other, or fails with an error that names the file.
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
