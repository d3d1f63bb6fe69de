//! Rows of activations.

use smallvec::SmallVec;

/// Values of which there are seldom more than eight, so that seldom memory is allocated for them.
pub type Few<T> = SmallVec<[T; 8]>;

/// Rows of activations where a backend has them, `[rows, width]`: a result of [`Ops`](super::Ops), valid until the
/// second [`download`](super::Ops::download) or [`begin_layer`](super::Ops::begin_layer) after it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Number of the operation.
    pub id: usize,
    /// Number of rows.
    pub rows: usize,
    /// Values of a row.
    pub width: usize,
}
