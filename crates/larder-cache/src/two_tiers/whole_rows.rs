//! Rows of experts that are all on the device, and those on their way to be.

use std::sync::Arc;

use larder_core::{ExpertKey, MoeRow};
use larder_policy::eviction::{CacheShape, LayerChoice};

use super::tier::TierState;
use super::{ExpertLocation, TierLedger};
use crate::one_tier::SlotIndex;

/// Rows whose missing experts are looked for at a time.
const FILLED_ROWS: usize = 2;

/// The device slots of all experts of a row.
#[derive(Clone, Debug)]
pub(super) struct WholeRow {
    /// By expert.
    pub slots: Arc<[SlotIndex]>,
    /// How many experts of the row had left the device.
    removed: u64,
}

impl TierLedger {
    /// The device slots of all experts of a row, if all are there; `before` is what this returned last, for as long as
    /// no expert leaves.
    pub(super) fn whole_row(&self, row: MoeRow, before: Option<WholeRow>) -> Option<WholeRow> {
        let removed = self.pair.device.whole_row(row)?;
        if let Some(before) = before.filter(|before| before.removed == removed) {
            return Some(before);
        }
        let slots = self.slots_on_device(row).into_iter();
        let slots = slots.map(|slot| slot.expect("all experts of the row are on the device")).collect();
        Some(WholeRow { slots, removed })
    }

    /// By expert of a row: its device slot, if it is there and not being copied.
    pub(super) fn slots_on_device(&self, row: MoeRow) -> Vec<Option<SlotIndex>> {
        let experts = self.pair.device.shape.experts;
        let slot = |expert: usize| match self.pair.device.state(row.index() * experts + expert) {
            TierState::Resident(slot) => Some(slot),
            TierState::InFlight(_) | TierState::Absent => None,
        };
        (0..experts).map(slot).collect()
    }

    /// As [`begin`](Self::begin), for a layer that has chosen and computed its experts in these device slots. Pins
    /// none. Policies get no logits, which the host does not know.
    pub(super) fn computed_on_device(&mut self, choice: &LayerChoice, slots: &[SlotIndex]) {
        // Other layers may have evicted some since.
        self.count(choice, |_, expert| ExpertLocation::Device(slots[expert.expert.index()]));
        for &id in choice.wanted {
            // A scratch slot that it was read into is not that of an unused prefetch any more.
            self.unpin(choice.row.expert(id));
        }
    }

    /// Whether the device has as many experts as it ever will without evicting one, or no room for all.
    pub(super) fn is_filled(&self) -> bool {
        let device = &self.pair.device;
        !device.has_room_for_all() || (0..device.shape.rows).all(|row| device.whole_row(MoeRow(row)).is_some())
    }

    /// The first such expert, of those that are not on the device, in the first rows from `row` on that are not whole.
    pub(super) fn missing_on_device(
        &self,
        row: MoeRow,
        is_such: impl Fn(ExpertKey, ExpertLocation) -> bool,
    ) -> Option<ExpertKey> {
        let CacheShape { rows, experts, .. } = self.pair.device.shape;
        let rows = (row.index()..rows).chain(0..row.index()).map(MoeRow);
        let mut experts = rows
            .filter(|row| self.pair.device.whole_row(*row).is_none())
            .take(FILLED_ROWS)
            .flat_map(|row| (0..experts).map(move |id| row.expert(id)));
        experts.find(|expert| is_such(*expert, self.locate(*expert)))
    }
}
