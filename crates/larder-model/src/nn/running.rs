//! State that the layers of a forward pass share.

use smallvec::SmallVec;

use crate::experts::{DevicePath, ExpertPath, device_of};
use crate::ops::{Ops, Rows};
use crate::step::ForwardPass;
use crate::tap::{PhaseClock, Tap};

/// What the layers of a forward pass share.
pub(crate) struct Running<'r> {
    pub pass: &'r ForwardPass,
    pub ops: &'r dyn Ops,
    pub experts: &'r mut dyn ExpertPath,
    pub tap: &'r mut dyn Tap,
    pub clock: &'r mut PhaseClock,
    /// On what a part adds to the residual stream.
    pub factor: f32,
}

impl Running<'_> {
    /// The device that has the rows and computes experts, if there is one.
    pub(crate) fn device(&mut self) -> Option<&mut dyn DevicePath> {
        device_of(self.experts, self.ops)
    }

    /// Of all rows so far only these are used from now on, and what routers hand on.
    pub(crate) fn keep_only(&self, rows: impl IntoIterator<Item = Rows>) {
        let mut live = SmallVec::<[Rows; 8]>::new();
        live.extend(rows.into_iter().chain(self.pass.router_state.get()));
        self.ops.retain(&live);
    }
}
