//! The interfaces to a device, a processor with memory of its own. A device's results have the same bits as those of
//! the CPU kernels, so a result does not depend on where it was computed.

mod scratch;

use std::sync::Arc;

use larder_core::{NumberFormat, RowOrder};
use larder_kernels::{Inputs, WeightMatrix};
pub use scratch::{CHOICE_TOKENS, FEW_TILES, MAX_SCORE_BYTES, TILE_QUERIES, device_attention_bytes, position_tiles};

use crate::error::Result;

/// Matmuls with weights that stay in a device's memory.
pub trait DeviceProducts: Send + Sync {
    /// Copies a matrix into the device's memory, and returns its id.
    fn upload(&self, weights: WeightMatrix) -> Result<usize> {
        let WeightMatrix { kind, order, rows, cols, scale, bytes } = weights;
        let row_bytes = bytes.len() / rows.max(1);
        let mut copy = |first: usize, out: &mut [u8]| {
            out.copy_from_slice(&bytes[first * row_bytes..][..out.len()]);
            Ok(())
        };
        self.upload_rows(&MatrixShape { kind, order, rows, cols, scale, bytes: bytes.len() }, &mut copy)
    }

    /// As [`upload`](Self::upload), of a matrix that `read` reads: it gets the number of a row, and a place for some
    /// whole rows.
    fn upload_rows(&self, shape: &MatrixShape, read: &mut dyn FnMut(usize, &mut [u8]) -> Result<()>) -> Result<usize>;

    /// Computes a batch of matmuls of `x`, and waits for them.
    ///
    /// The caller guarantees that `x` is quantised if the weights are, and outputs of the right length.
    fn matmul(&self, x: &Inputs, batch: &mut [DeviceProduct]) -> Result<()>;
}

/// A matrix without its bytes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct MatrixShape {
    /// Number format.
    pub kind: NumberFormat,
    /// Order of rows.
    pub order: RowOrder,
    /// Number of rows.
    pub rows: usize,
    /// Values of a row.
    pub cols: usize,
    /// All values are multiplied by this.
    pub scale: f32,
    /// Number of bytes.
    pub bytes: usize,
}

/// One matmul with weights on a device: `out[t, r] = Σ_c weights[r, c] · x[t, c]`.
pub struct DeviceProduct<'a> {
    /// Id of the weights, from [`DeviceProducts::upload`].
    pub weights: usize,
    /// The rows of `x` to multiply, in this order; `None` for all.
    pub pick: Option<&'a [u32]>,
    /// `[picked tokens, rows]`
    pub out: &'a mut [f32],
}

/// Pages of KV caches in a device's memory, and attention over them.
pub trait DeviceAttention: Send + Sync {
    /// Allocates a page, and returns its id. Its contents are unspecified.
    fn allocate(&self, shape: KvPageShape) -> Result<usize>;

    /// Frees a page. The caller guarantees that the id is not used again.
    fn free(&self, page: usize);

    /// Writes `bytes [n, heads, row]` to the page, from row `at` of each head on. May return before the copy is done;
    /// operations on one page keep the order of their calls.
    fn append(&self, page: usize, at: usize, bytes: &[u8]) -> Result<()>;

    /// Copies each head's first `len` rows to another page of the same shape. May return before the copy is done, as
    /// [`append`](Self::append).
    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()>;

    /// Waits for all operations on the page, and copies its bytes.
    fn read(&self, page: usize, out: &mut [u8]) -> Result<()>;
}

/// Shape of a page `[heads, positions, row]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KvPageShape {
    /// Number format of the rows.
    pub kind: NumberFormat,
    /// Rows per position.
    pub heads: usize,
    /// Positions of the page.
    pub positions: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
}

impl KvPageShape {
    /// Bytes of the whole page.
    pub fn bytes(&self) -> usize {
        self.heads * self.positions * self.row_bytes
    }

    /// The most numbers of a row.
    pub fn row_values(&self) -> usize {
        self.row_bytes / self.kind.block_bytes() * self.kind.block_len()
    }

    /// Bytes of the rows of `positions` positions.
    pub(crate) fn rows_bytes(&self, positions: usize) -> usize {
        positions * self.heads * self.row_bytes
    }

    /// Copies the first rows of each head of a page in main memory, `out [positions, heads, row]`.
    pub(crate) fn rows_of(&self, page: &[u8], out: &mut [u8]) {
        for (i, row) in out.chunks_exact_mut(self.row_bytes).enumerate() {
            row.copy_from_slice(&page[self.place_of(i)..][..self.row_bytes]);
        }
    }

    /// Where a page has row `i` of `[positions, heads, row]`.
    fn place_of(&self, i: usize) -> usize {
        (i % self.heads * self.positions + i / self.heads) * self.row_bytes
    }

    /// Copies each head's first `count` rows from one page in main memory to another.
    pub(crate) fn copy_rows(&self, from: &[u8], to: &mut [u8], count: usize) {
        let (head, used) = (self.positions * self.row_bytes, count * self.row_bytes);
        for (from, to) in from.chunks_exact(head).zip(to.chunks_exact_mut(head)) {
            to[..used].copy_from_slice(&from[..used]);
        }
    }
}

/// Where activations, or keys and values, are.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Place {
    /// In main memory.
    Host,
    /// On a device.
    Device,
}

/// The rows of a sequence, or the first `width` numbers of each row.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct KvView {
    /// Where they are.
    pub place: Place,
    /// Number of the first page that is stored: it has the positions from `first_page · positions of a page` on.
    pub first_page: usize,
    /// Ids of the pages, from [`DeviceAttention::allocate`]. All have the same shape.
    pub pages: Arc<Vec<usize>>,
    /// Numbers per row that are used.
    pub width: usize,
}
