//! The seams to a processor with memory of its own. What it computes has the bits of this processor's kernels, so a
//! result does not depend on where it was computed.

use std::time::Duration;

use larder_core::{ExpertId, ExpertLayout, Gate, NumberFormat};
use larder_kernels::{AttentionArgs, Inputs, WeightMatrix};

use crate::error::Result;
use crate::experts::{MoeCall, Routed};
use crate::nn::Activation;

/// Computes experts that lie in a device's slots, as a [`ExpertWorkspace`](crate::ExpertWorkspace) does those in memory.
pub trait DeviceExperts: Send {
    /// Makes ready for experts of this layout in calls with at most so many tokens, so that no memory is missing later;
    /// or says what it lacks.
    fn prepare(&mut self, layout: &ExpertLayout, act: Activation, gate: &Gate, tokens: usize) -> Result<()>;

    /// Takes a call's inputs. `layout` is that of the experts to come.
    fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout);

    /// Begins to compute some of the experts that the call's tokens chose, each beside the number of its slot, for all
    /// tokens that chose it. May return before it is over; what concerns a slot happens in the order asked for, copies
    /// included. Says how long computing took on the device, where it knows by now. What goes wrong is said by
    /// [`finish`](Self::finish).
    fn compute(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        layout: &ExpertLayout,
        group: &[(ExpertId, usize)],
    ) -> Option<Duration>;

    /// Waits until all that was begun since [`begin`](Self::begin) is over, and hands the output `[hidden]` of every
    /// place, `token · k + rank`, that was computed here to `put`.
    fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> Result<()>;
}

/// Multiplies with weights that stay in a device's memory.
pub trait DeviceProducts: Send + Sync {
    /// Whether products with a matrix of so many bytes are worth the way there and back.
    fn accepts(&self, bytes: usize) -> bool;

    /// Copies a matrix into the device's memory, and returns the number by which it is known there.
    fn upload(&self, weights: WeightMatrix) -> Result<usize>;

    /// Computes all products in one go, and waits for them.
    ///
    /// The caller guarantees activations that are quantised if the weights are, and outputs of the right length.
    fn multiply(&self, x: &Inputs, round: &mut [DeviceProduct]) -> Result<()>;
}

/// One product with weights that a device has: `out[t, r] = Σ_c weights[r, c] · x[t, c]`.
pub struct DeviceProduct<'a> {
    /// The number of the weights.
    pub weights: usize,
    /// Which tokens of the activations take part, in this order; all of them if there is no choice.
    pub pick: Option<&'a [u32]>,
    /// `[tokens that take part, rows]`
    pub out: &'a mut [f32],
}

/// Remembers rows of floats in a device's memory, and attends to them there.
pub trait DeviceAttention: Send + Sync {
    /// Takes memory for rows, and returns the number by which they are known there. What is in them is unspecified.
    fn allocate(&self, shape: DeviceKvShape) -> Result<usize>;

    /// Gives the memory of rows back. The caller guarantees that nobody uses their number from now on.
    fn free(&self, block: usize);

    /// Writes `bytes [n, heads, row]` to the positions from `at` on. May return before it is over; what concerns rows
    /// happens in the order asked for.
    fn append(&self, block: usize, at: usize, bytes: &[u8]) -> Result<()>;

    /// Copies each head's first `len` positions to rows of the same heads and form that have room for them. May return
    /// before it is over, as above.
    fn copy(&self, from: usize, to: usize, len: usize) -> Result<()>;

    /// As [`larder_kernels::attend`], and waits for it. What cannot be is an error.
    fn attend(&self, args: &AttentionArgs<DeviceKvView>, out: &mut [f32]) -> Result<()>;
}

/// The form of rows `[heads, room, row]`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceKvShape {
    /// How numbers are stored.
    pub kind: NumberFormat,
    /// How many are remembered at each position.
    pub heads: usize,
    /// Positions that fit.
    pub capacity: usize,
    /// Bytes of one.
    pub row_bytes: usize,
}

impl DeviceKvShape {
    /// Of all of them.
    pub fn bytes(&self) -> usize {
        self.heads * self.capacity * self.row_bytes
    }
}

/// Rows that a device remembers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceKvView {
    /// Their number.
    pub block: usize,
    /// How many numbers of each count.
    pub width: usize,
}
