//! A double for tests: computes what lies in the slots of a device that is none, as late as it may, and can fail.

use std::sync::Arc;
use std::time::Duration;

use larder_cache::tiers::{DeviceSlots, PendingCompute};
use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx};
use larder_model::{Activation, ComputeContext, DeviceExperts, ExpertWorkspace, ModelError, MoeCall, Routed};

use crate::rng::Xoshiro256;

/// Computes on the bytes of [`DeviceSlots`], nothing before [`finish`](DeviceExperts::finish): who overwrites a slot too
/// early gets other results.
pub struct DeviceExpertsDouble {
    slots: DeviceSlots,
    workspace: ExpertWorkspace,
    /// One call in so many fails, by chance; 0 for none.
    failing: u64,
    random: Xoshiro256,
    under_way: Option<UnderWay>,
}

/// A call whose inputs were taken.
struct UnderWay {
    layer: LayerIdx,
    gate: Gate,
    act: Activation,
    x: Vec<f32>,
    tokens: usize,
    routed: Routed,
    layout: ExpertLayout,
    groups: Vec<Vec<(ExpertId, PendingCompute)>>,
}

impl DeviceExpertsDouble {
    /// On these slots, with the kernels of this processor; nothing fails.
    pub fn new(slots: DeviceSlots, compute: Arc<ComputeContext>, seed: u64) -> Self {
        DeviceExpertsDouble {
            slots,
            workspace: ExpertWorkspace::new(compute),
            failing: 0,
            random: Xoshiro256::new(seed),
            under_way: None,
        }
    }

    /// One call in so many fails.
    pub fn failing(mut self, one_in: u64) -> Self {
        self.failing = one_in;
        self
    }
}

impl DeviceExperts for DeviceExpertsDouble {
    fn prepare(&mut self, _: &ExpertLayout, _: Activation, _: &Gate, _: usize) -> Result<(), ModelError> {
        Ok(())
    }

    fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) {
        assert!(self.under_way.is_none(), "a call was not finished");
        let MoeCall { layer, gate, act, x, tokens, .. } = *call;
        let (gate, x, routed, layout) = (gate.clone(), x.to_vec(), routed.clone(), layout.clone());
        self.under_way = Some(UnderWay { layer, gate, act, x, tokens, routed, layout, groups: Vec::new() });
    }

    fn compute(&mut self, _: &MoeCall, _: &Routed, _: &ExpertLayout, group: &[(ExpertId, usize)]) -> Option<Duration> {
        let begun = group.iter().map(|(expert, at)| (*expert, self.slots.begin(*at))).collect();
        self.under_way.as_mut().expect("begun before").groups.push(begun);
        None
    }

    fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> Result<(), ModelError> {
        let UnderWay { layer, gate, act, x, tokens, routed, layout, groups } =
            self.under_way.take().expect("begun before");
        if self.failing > 0 && self.random.bits().is_multiple_of(self.failing) {
            return Err(ModelError::Device(format!("{layer}: computing on the device failed: it has gone away")));
        }
        let call = MoeCall { layer, gate: &gate, act, logits: &[], x: &x, tokens };
        self.workspace.begin(&call, &routed, &layout);
        for group in groups {
            let group: Vec<(ExpertId, Vec<u8>)> = group.into_iter().map(|(e, begun)| (e, begun.bytes())).collect();
            let lent: Vec<_> = group.iter().map(|(e, bytes)| (*e, &bytes[..layout.bytes])).collect();
            self.workspace.compute(&call, &routed, &layout, &lent);
            let computed = |id: &ExpertId| group.iter().any(|(e, _)| e == id);
            let places = (0..).zip(&routed.ids).filter(|(_, id)| computed(id));
            places.for_each(|(place, _)| put(place, self.workspace.output(place, x.len() / tokens)));
        }
        Ok(())
    }
}
