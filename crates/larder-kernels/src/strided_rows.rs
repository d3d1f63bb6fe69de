//! Rows of one page of keys or values, as kernels read them.

use larder_core::NumberFormat;

/// Rows at equal distances.
#[derive(Clone, Copy)]
pub struct StridedRows<'a> {
    pub kind: NumberFormat,
    /// Up to the last byte that is used.
    pub bytes: &'a [u8],
    /// Bytes from one row to the next.
    pub row_bytes: usize,
}

impl StridedRows<'_> {
    /// The rows without the first `count`.
    pub fn skip(self, count: usize) -> Self {
        StridedRows { bytes: &self.bytes[count * self.row_bytes..], ..self }
    }
}
