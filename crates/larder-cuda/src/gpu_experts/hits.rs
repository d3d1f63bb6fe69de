//! Experts that were begun before the host knew the choice, because the device had them.

use larder_core::{ExpertId, LayerIdx};
use larder_model::{DeviceRows, MoeCall};

use crate::arena_sync::{ArenaSync, Candidates};

/// The chosen experts of a call that are on the device.
pub struct BegunHits {
    /// Index of the decoder layer.
    pub layer: LayerIdx,
    /// The inputs of its experts, which no other call has.
    pub x: DeviceRows,
    /// By expert: its slot, if it was on the device.
    pub slots: Vec<Option<usize>>,
    /// The slots that its kernels may use.
    pub candidates: Candidates,
    /// Address of the outputs `[places, hidden]`.
    pub outputs: u64,
}

/// Those of the call that is being computed.
#[derive(Default)]
pub struct HitsOfCall {
    slots: Vec<Option<usize>>,
    outputs: u64,
    /// The places that they were computed for.
    places: Vec<u32>,
}

impl HitsOfCall {
    /// Those that were begun for a call, which has chosen `ids`: copies wait for no other slots.
    /// Returns whether there are any.
    pub fn settle(&mut self, begun: Option<BegunHits>, call: &MoeCall, ids: &[ExpertId], sync: &ArenaSync) -> bool {
        self.places.clear();
        self.slots.clear();
        let of_call = (call.layer, call.on_device.map(|rows| rows.x));
        let Some(begun) = begun.filter(|begun| (begun.layer, Some(begun.x)) == of_call) else { return false };
        let chosen = |id: &ExpertId| begun.slots.get(id.index()).copied().flatten();
        let used: Vec<usize> = ids.iter().filter_map(chosen).collect();
        sync.settle(begun.candidates, |slot| used.contains(&slot));
        (self.slots, self.outputs) = (begun.slots, begun.outputs);
        true
    }

    /// Whether an expert in this slot was begun.
    pub fn has(&self, expert: ExpertId, slot: usize) -> bool {
        self.slots.get(expert.index()) == Some(&Some(slot))
    }

    /// An expert that was begun is one of the call, which wants it for these places.
    pub fn take(&mut self, places: impl Iterator<Item = u32>) {
        self.places.extend(places);
    }

    /// The places, each with the address of its output `[hidden]`.
    pub fn outputs(&self, hidden: usize) -> impl Iterator<Item = (u32, u64)> {
        self.places.iter().map(move |place| (*place, self.outputs + 4 * u64::from(*place) * hidden as u64))
    }
}
