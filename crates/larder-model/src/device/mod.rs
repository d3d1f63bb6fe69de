//! The interfaces to a device, a processor with memory of its own. A device's results have the same bits as those of
//! the CPU kernels, so a result does not depend on where it was computed.

mod scratch;

use std::sync::Arc;
use std::time::Duration;

use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx, NumberFormat, RowOrder};
use larder_kernels::{Inputs, WeightMatrix};

use crate::error::Result;
use crate::expert_workspace::ExpertWorkspace;
use crate::experts::{DeviceMoeCall, MoeCall, Routed};
use crate::nn::Activation;
use crate::ops::Rows;
pub use scratch::{CHOICE_TOKENS, FEW_TILES, MAX_SCORE_BYTES, TILE_QUERIES, device_attention_bytes, position_tiles};

/// Computes experts in the slots of a device; [`ExpertWorkspace`](crate::ExpertWorkspace) is its counterpart for the
/// CPU.
pub trait DeviceExperts: Send {
    /// Allocates all memory that experts of this layout need in calls with at most `tokens` tokens, so that later calls
    /// cannot run out of memory.
    fn prepare(&mut self, layout: &ExpertLayout, act: Activation, gate: &Gate, tokens: usize) -> Result<()>;

    /// Starts a call: copies its inputs. `layout` is the layout of the call's experts.
    fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout);

    /// Starts to compute some of the call's experts, given with their slot indices, for all tokens that chose them. May
    /// return before the work is done; operations on one slot, copies included, keep the order of their calls. Returns
    /// the compute time on the device if it is known by now. Errors are reported by [`finish`](Self::finish).
    fn compute(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        layout: &ExpertLayout,
        group: &[(ExpertId, usize)],
    ) -> Option<Duration>;

    /// The host goes on to something that takes time: work that was collected is submitted.
    fn submit(&mut self) {}

    /// Waits for all work since [`begin`](Self::begin), and calls `put` with the output `[hidden]` of every place
    /// (`token · k + rank`) that was computed on the device.
    fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> Result<()>;

    /// Whether the device chooses the experts of a step of `tokens` tokens by this gate.
    fn chooses(&self, gate: &Gate, tokens: usize) -> bool {
        let _ = (gate, tokens);
        false
    }

    /// Chooses the experts of a layer on the device, and begins them and their sums. `slots` are those of all experts of the layer. The
    /// caller has asked whether the device [chooses](Self::chooses).
    fn begin_chosen(&mut self, call: &DeviceMoeCall, layout: &ExpertLayout, slots: &Arc<[usize]>) -> Result<Rows> {
        let _ = (layout, slots);
        unreachable!("the device does not choose the experts of {}", call.layer)
    }

    /// Begins the choice of a layer's experts on the device, and those of the chosen ones that are there: `slots` has by expert its slot,
    /// if it is on the device. The layer's call that [begins](Self::begin) next, with the same inputs, finds them computed; there is none
    /// if its only token has no expert. The caller has asked whether the device [chooses](Self::chooses).
    fn begin_hits(&mut self, call: &DeviceMoeCall, layout: &ExpertLayout, slots: &[Option<usize>]) -> Result<()> {
        let _ = (layout, slots);
        unreachable!("the device does not choose the experts of {}", call.layer)
    }

    /// A step begins, and `in_flight` before it, at most one, are not complete: their choices stay apart.
    fn step_begins(&mut self, in_flight: usize) {
        let _ = in_flight;
    }

    /// The experts that the device has chosen in the oldest step that was not taken yet. The caller guarantees that it is complete.
    fn take_chosen(&mut self) -> Vec<ChosenOnDevice> {
        Vec::new()
    }

    /// In place of [`finish`](Self::finish), and without waiting: begins [`ExpertWorkspace::sum`] on the device, for a call whose
    /// inputs are [on the device](MoeCall::on_device), and adds the rows that the call names. Outputs of places that were not computed
    /// there are those of `host`. `None` where a device does not have it; then nothing was changed.
    fn begin_sum(&mut self, call: &MoeCall, routed: &Routed, host: &ExpertWorkspace) -> Result<Option<Rows>> {
        let _ = (call, routed, host);
        Ok(None)
    }
}

/// The experts that a device has chosen for a layer.
#[derive(Clone, Debug)]
pub struct ChosenOnDevice {
    /// Index of the decoder layer.
    pub layer: LayerIdx,
    /// `[tokens, k]`
    pub experts: Vec<ExpertId>,
    /// The slots of all experts of the layer.
    pub slots: Arc<[usize]>,
}

/// Products with weights that stay in a device's memory.
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

    /// As [`upload`](Self::upload), of a matrix that `read` reads: it gets the number of a row, and a place for some whole rows.
    fn upload_rows(&self, shape: &MatrixShape, read: &mut dyn FnMut(usize, &mut [u8]) -> Result<()>) -> Result<usize>;

    /// Computes a batch of products of `x`, and waits for them.
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

/// One product with weights on a device: `out[t, r] = Σ_c weights[r, c] · x[t, c]`.
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
