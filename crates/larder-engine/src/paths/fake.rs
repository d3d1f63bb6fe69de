//! Fake of a device, for tests, that computes experts: it computes as late as it may, and can fail.

use std::sync::Arc;
use std::time::Duration;

use larder_cache::two_tiers::{DeviceSlots, PendingCompute};
use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx};
use larder_model::{Activation, ComputeContext, DeviceExperts, ExpertWorkspace, ModelError, MoeCall, Routed};

use larder_core::Xoshiro256;

/// Fake of [`DeviceExperts`] on the bytes of [`DeviceSlots`]. Computes only in [`finish`](DeviceExperts::finish), so
/// that overwriting a slot too early changes the results.
pub struct FakeDeviceExperts {
    slots: DeviceSlots,
    workspace: ExpertWorkspace,
    /// One call in `failing` fails, at random; 0 for none.
    failing: u64,
    random: Xoshiro256,
    pending: Option<PendingCall>,
}

/// A started call with copies of its inputs.
struct PendingCall {
    layer: LayerIdx,
    gate: Gate,
    act: Activation,
    x: Vec<f32>,
    tokens: usize,
    routed: Routed,
    layout: ExpertLayout,
    groups: Vec<Vec<(ExpertId, PendingCompute)>>,
}

impl FakeDeviceExperts {
    /// A fake on `slots`, with the CPU kernels, that does not fail.
    pub fn new(slots: DeviceSlots, compute: Arc<ComputeContext>, seed: u64) -> Self {
        FakeDeviceExperts {
            slots,
            workspace: ExpertWorkspace::new(compute),
            failing: 0,
            random: Xoshiro256::new(seed),
            pending: None,
        }
    }

    /// One call in `one_in` fails, at random.
    pub fn failing(mut self, one_in: u64) -> Self {
        self.failing = one_in;
        self
    }
}

impl DeviceExperts for FakeDeviceExperts {
    fn prepare(&mut self, _: &ExpertLayout, _: Activation, _: &Gate, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) {
        assert!(self.pending.is_none(), "the last call was not finished");
        let MoeCall { layer, gate, act, x, tokens, .. } = *call;
        let (gate, x, routed, layout) = (gate.clone(), x.to_vec(), routed.clone(), layout.clone());
        self.pending = Some(PendingCall { layer, gate, act, x, tokens, routed, layout, groups: Vec::new() });
    }

    fn compute(&mut self, _: &MoeCall, _: &Routed, _: &ExpertLayout, group: &[(ExpertId, usize)]) -> Option<Duration> {
        let begun = group.iter().map(|(expert, at)| (*expert, self.slots.begin(*at))).collect();
        self.pending.as_mut().expect("begin was called").groups.push(begun);
        None
    }

    fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> Result<(), ModelError> {
        let PendingCall { layer, gate, act, x, tokens, routed, layout, groups } =
            self.pending.take().expect("begin was called");
        if self.failing > 0 && self.random.bits().is_multiple_of(self.failing) {
            let message = format!("{layer}: computing experts on the device failed: device lost");
            return Err(ModelError::Device(message.into()));
        }
        let call = MoeCall::new(layer, &gate, act, &x, tokens);
        self.workspace.begin(&call, &routed, &layout);
        for group in groups {
            let group: Vec<(ExpertId, Vec<u8>)> = group.into_iter().map(|(e, begun)| (e, begun.bytes())).collect();
            let slices: Vec<_> = group.iter().map(|(e, bytes)| (*e, &bytes[..layout.bytes])).collect();
            self.workspace.compute(&call, &routed, &layout, &slices);
            let computed = |id: &ExpertId| group.iter().any(|(e, _)| e == id);
            let places = (0..).zip(&routed.ids).filter(|(_, id)| computed(id));
            places.for_each(|(place, _)| put(place, self.workspace.output(place, x.len() / tokens)));
        }
        Ok(())
    }
}
