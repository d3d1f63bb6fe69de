//! The interfaces to a device, a processor with memory of its own. A device's results have the same bits as those of
//! the CPU kernels, so a result does not depend on where it was computed.

use std::time::Duration;

use larder_core::{ExpertId, ExpertLayout, Gate, NumberFormat};
use larder_kernels::{AttentionArgs, Inputs, WeightMatrix};

use crate::error::Result;
use crate::experts::{MoeCall, Routed};
use crate::nn::Activation;

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

    /// Waits for all work since [`begin`](Self::begin), and calls `put` with the output `[hidden]` of every place
    /// (`token · k + rank`) that was computed on the device.
    fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> Result<()>;
}

/// Products with weights that stay in a device's memory.
pub trait DeviceProducts: Send + Sync {
    /// Whether a matrix of `bytes` bytes is large enough for the device; smaller ones are multiplied on the CPU.
    fn accepts(&self, bytes: usize) -> bool;

    /// Copies a matrix into the device's memory, and returns its id.
    fn upload(&self, weights: WeightMatrix) -> Result<usize>;

    /// Computes a batch of products of `x`, and waits for them.
    ///
    /// The caller guarantees that `x` is quantised if the weights are, and outputs of the right length.
    fn multiply(&self, x: &Inputs, batch: &mut [DeviceProduct]) -> Result<()>;
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

/// KV cache blocks in a device's memory, and attention over them.
pub trait DeviceAttention: Send + Sync {
    /// Allocates a block of rows, and returns its id. Its contents are unspecified.
    fn allocate(&self, shape: DeviceKvShape) -> Result<usize>;

    /// Frees a block. The caller guarantees that the id is not used again.
    fn free(&self, block: usize);

    /// Writes `bytes [n, heads, row]` to the block, from position `at` on. May return before the copy is done;
    /// operations on one block keep the order of their calls.
    fn append(&self, block: usize, at: usize, bytes: &[u8]) -> Result<()>;

    /// Copies each head's first `len` positions to another block with the same heads and number format and enough
    /// capacity. May return before the copy is done, as [`append`](Self::append).
    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()>;

    /// As [`larder_kernels::attend`], and waits for the result. Arguments that do not fit are an error, not a panic.
    fn attend(&self, args: &AttentionArgs<DeviceKvView>, out: &mut [f32]) -> Result<()>;
}

/// Shape of a block `[heads, capacity, row]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceKvShape {
    /// Number format of the rows.
    pub kind: NumberFormat,
    /// Rows per position.
    pub heads: usize,
    /// Positions that fit into the block.
    pub capacity: usize,
    /// Bytes of one row.
    pub row_bytes: usize,
}

impl DeviceKvShape {
    /// Bytes of the whole block.
    pub fn bytes(&self) -> usize {
        self.heads * self.capacity * self.row_bytes
    }
}

/// The rows of a block, or the first `width` numbers of each row.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceKvView {
    /// Id of the block, from [`DeviceAttention::allocate`].
    pub block: usize,
    /// Numbers per row that are used.
    pub width: usize,
}
