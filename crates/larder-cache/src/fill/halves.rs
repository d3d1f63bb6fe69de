//! Reads of experts in two halves: gate and up first, with which computing begins, then the rest.

use larder_core::ExpertKey;
use larder_store::StoreError;
use larder_store::reader::Slot;

use crate::one_tier::SlotIndex;

/// A half of an expert.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Half {
    /// Gate and up.
    Front,
    /// The rest, from the page behind them.
    Back,
}

/// The experts that are being read in halves.
#[derive(Default)]
pub(super) struct HalvedReads(Vec<HalvedRead>);

struct HalvedRead {
    expert: ExpertKey,
    at: SlotIndex,
    /// The parts of the slot whose reads have ended.
    front: Option<Slot>,
    back: Option<Slot>,
    front_is_checked: bool,
    /// Whether the front is being read, or was, from another copy.
    front_is_copy: bool,
    /// Why the bytes of a half cannot be used.
    failure: Option<StoreError>,
}

/// How far the read of an expert has come.
pub(super) enum Progress {
    /// Neither half can be used yet.
    Waiting,
    /// Gate and up have been read and are not checked.
    Front,
    /// Both halves have been read.
    Both { slot: Slot, front_is_checked: bool, result: Result<(), StoreError> },
}

impl HalvedReads {
    /// Both halves of an expert are going to be read into parts of the slot `at`.
    pub fn begin(&mut self, expert: ExpertKey, at: SlotIndex) {
        let (front_is_checked, front_is_copy) = (false, false);
        self.0.push(HalvedRead { expert, at, front: None, back: None, front_is_checked, front_is_copy, failure: None });
    }

    /// Takes note of the read of a half, and returns the expert's slot with it.
    pub fn end(
        &mut self,
        expert: ExpertKey,
        half: Half,
        slot: Slot,
        result: Result<(), StoreError>,
    ) -> (SlotIndex, Progress) {
        let index = self.0.iter().position(|read| read.expert == expert).expect("its halves are being read");
        let read = &mut self.0[index];
        match half {
            Half::Front => read.front = Some(slot),
            Half::Back => read.back = Some(slot),
        }
        if let Err(e) = result {
            read.failure.get_or_insert(e);
        }
        let at = read.at;
        match (read.front.take(), read.back.take()) {
            (Some(front), Some(back)) => {
                let HalvedRead { front_is_checked, failure, .. } = self.0.swap_remove(index);
                let result = failure.map_or(Ok(()), Err);
                (at, Progress::Both { slot: front.join(back), front_is_checked, result })
            }
            (front, back) => {
                (read.front, read.back) = (front, back);
                let has_front = half == Half::Front && read.failure.is_none();
                (at, if has_front { Progress::Front } else { Progress::Waiting })
            }
        }
    }

    /// The front of the expert in the slot `at`, whose back is still being read, with the expert.
    pub fn front(&self, at: SlotIndex) -> (ExpertKey, &[u8]) {
        let read = self.0.iter().find(|read| read.at == at).expect("its halves are being read");
        (read.expert, read.front.as_ref().expect("it has been read"))
    }

    /// The bytes of a front are as they should be.
    pub fn front_is_right(&mut self, at: SlotIndex) {
        self.of(at).front_is_checked = true;
    }

    /// Takes a front out that is to be read again from another copy, if it has not been.
    pub fn take_front(&mut self, at: SlotIndex) -> Option<Slot> {
        let read = self.of(at);
        if std::mem::replace(&mut read.front_is_copy, true) { None } else { read.front.take() }
    }

    /// A front is wrong and is not read again. `slot` is it if it was taken out.
    pub fn front_is_lost(&mut self, at: SlotIndex, slot: Option<Slot>, error: StoreError) {
        let read = self.of(at);
        read.front = slot.or(read.front.take());
        read.failure.get_or_insert(error);
    }

    /// Number of experts, and of their halves that are being read.
    #[cfg(test)]
    pub fn counts(&self) -> (usize, usize) {
        let halves = |read: &HalvedRead| usize::from(read.front.is_none()) + usize::from(read.back.is_none());
        (self.0.len(), self.0.iter().map(halves).sum())
    }

    fn of(&mut self, at: SlotIndex) -> &mut HalvedRead {
        self.0.iter_mut().find(|read| read.at == at).expect("its halves are being read")
    }
}
