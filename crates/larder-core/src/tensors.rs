use crate::{NumberFormat, RowOrder};

/// What a named tensor is, before any of it is read.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorMeta {
    /// How its numbers are stored.
    pub kind: NumberFormat,
    /// How its rows lie beside each other.
    pub order: RowOrder,
    /// Logical shape, outermost dimension first. The last dimension is whole blocks of `kind`.
    pub shape: Vec<usize>,
    /// Length in bytes: the product of the shape, in blocks.
    pub bytes: usize,
}

impl TensorMeta {
    /// `None` if the last dimension is not whole blocks or the size overflows.
    pub fn new(kind: NumberFormat, shape: Vec<usize>) -> Option<Self> {
        let (cols, outer) = shape.split_last().map_or((1, &[][..]), |(c, o)| (*c, o));
        let rows = outer.iter().try_fold(1usize, |n, d| n.checked_mul(*d))?;
        let bytes = kind.matrix_bytes(rows, cols)?;
        Some(TensorMeta { kind, order: RowOrder::Plain, shape, bytes })
    }
}

/// Why a tensor could not be had. The text names the file; whoever asks adds nothing but the purpose.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TensorsError(pub String);

/// Tensors by name: a checkpoint, a GGUF file or a store, as the model sees them.
pub trait Tensors {
    /// What is called `name`, or `None`. Costs no I/O.
    fn meta(&self, name: &str) -> Option<&TensorMeta>;

    /// Reads `into.len()` bytes of the tensor from byte `offset` on.
    ///
    /// The caller guarantees that the range lies inside the tensor; the implementation fills all of `into` or fails,
    /// naming file and offset.
    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError>;
}
