//! Experts that were begun before the host knew the choice, because the device had them.

use std::collections::HashSet;

use larder_core::{ExpertId, LayerIdx};
use larder_model::{MoeCall, Rows};

use crate::arena_sync::{ArenaSync, Candidates};

/// The chosen experts of a call that are on the device.
pub struct BegunHits {
    /// Index of the decoder layer.
    pub layer: LayerIdx,
    /// The inputs of its experts, which no other call has.
    pub x: Rows,
    /// By expert: its slot, if it was on the device.
    pub slots: Vec<Option<usize>>,
    /// The slots that its kernels may use.
    pub candidates: Candidates,
    /// Address of the outputs `[rows, hidden]`.
    pub outputs: u64,
}

/// Those of the call that is being computed.
#[derive(Default)]
pub struct HitsOfCall {
    slots: Vec<Option<usize>>,
    outputs: u64,
    /// By place: the row of its output.
    rows: Vec<u32>,
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
        let used: HashSet<usize> = ids.iter().filter_map(chosen).collect();
        sync.settle(begun.candidates, |slot| used.contains(&slot));
        (self.slots, self.outputs, self.rows) = (begun.slots, begun.outputs, rows_of(ids));
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
        let at = move |place: u32| self.outputs + 4 * u64::from(self.rows[place as usize]) * hidden as u64;
        self.places.iter().map(move |place| (*place, at(*place)))
    }
}

/// By place of a call the row of its output, as the kernel that chooses experts gives them: those of an expert are
/// consecutive, in the order in which experts are first chosen.
fn rows_of(ids: &[ExpertId]) -> Vec<u32> {
    let first = |id: &ExpertId| ids.iter().position(|other| other == id);
    let mut order: Vec<usize> = (0..ids.len()).filter(|place| ids[*place] != ExpertId::NONE).collect();
    order.sort_by_cached_key(|place| first(&ids[*place]));
    let mut rows = vec![0; ids.len()];
    (0..).zip(order).for_each(|(row, place)| rows[place] = row);
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_of_an_expert_are_consecutive() {
        let ids = [7, 2, 2, 9, u16::MAX, 7, 9, 2].map(|id| if id == u16::MAX { ExpertId::NONE } else { ExpertId(id) });
        assert_eq!(rows_of(&ids), [0, 2, 3, 5, 0, 1, 6, 4]);
        assert_eq!(rows_of(&[3, 1, 2].map(ExpertId)), [0, 1, 2]);
    }
}
