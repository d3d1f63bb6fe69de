//! The experts on a device.

use std::sync::Arc;
use std::time::Duration;

use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx};

use crate::error::Result;
use crate::experts::{DeviceMoeCall, ExpertWorkspace, MoeCall, Routed};
use crate::ops::{Activation, Rows};

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

    /// Chooses the experts of a layer on the device, and begins them and their sums. `slots` are those of all experts
    /// of the layer. The caller has asked whether the device [chooses](Self::chooses).
    fn begin_chosen(&mut self, call: &DeviceMoeCall, layout: &ExpertLayout, slots: &Arc<[usize]>) -> Result<Rows> {
        let _ = (layout, slots);
        unreachable!("the device does not choose the experts of {}", call.layer)
    }

    /// Begins the choice of a layer's experts on the device, and those of the chosen ones that are there: `slots` has
    /// by expert its slot, if it is on the device. The layer's call that [begins](Self::begin) next, with the same
    /// inputs, finds them computed; there is none if its only token has no expert. The caller has asked whether the
    /// device [chooses](Self::chooses).
    fn begin_hits(&mut self, call: &DeviceMoeCall, layout: &ExpertLayout, slots: &[Option<usize>]) -> Result<()> {
        let _ = (layout, slots);
        unreachable!("the device does not choose the experts of {}", call.layer)
    }

    /// A step begins, and `in_flight` before it, at most one, are not complete: their choices stay apart.
    fn step_begins(&mut self, in_flight: usize) {
        let _ = in_flight;
    }

    /// The experts that the device has chosen in the oldest step that was not taken yet. The caller guarantees that it
    /// is complete.
    fn take_chosen(&mut self) -> Vec<ChosenOnDevice> {
        Vec::new()
    }

    /// In place of [`finish`](Self::finish), and without waiting: begins [`ExpertWorkspace::sum`] on the device, for a
    /// call whose inputs are [on the device](MoeCall::on_device), and adds the rows that the call names. Outputs of
    /// places that were not computed there are those of `host`. `None` where a device does not have it; then nothing
    /// was changed.
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
