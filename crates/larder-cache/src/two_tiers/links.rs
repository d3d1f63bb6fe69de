//! The I/O of two tiers: carries out the ledger's decisions with the reader and the device.

use std::collections::{HashSet, VecDeque};
use std::time::{Duration, Instant};

use larder_core::{ExpertId, ExpertKey, Geometry, LayerIdx, MoeRow};
use larder_store::StoreError;

use super::{
    CostModel, Demotion, Device, DeviceError, Direction, ExpertLocation, PromoteFor, Promotion, TierLedger,
    TierTraffic, Transfer, TransferDone,
};
use crate::fill::{CompletedRead, SlotFiller, SlotSupply};
use crate::one_tier::SlotIndex;

/// Copies in flight to a device that has room for all experts, beside those of wanted ones.
const FILLING_COPIES: usize = 2;
/// Reads in flight for it.
const FILLING_READS: usize = 2;

/// Why a visit failed.
#[derive(Debug, thiserror::Error)]
#[error("{layer}, {expert}: {cause}")]
pub struct TierError {
    /// The layer.
    pub layer: LayerIdx,
    /// The expert.
    pub expert: ExpertId,
    /// The failed read or copy.
    #[source]
    pub cause: TierErrorCause,
}

/// The failed step on an expert's way.
#[derive(Debug, thiserror::Error)]
pub enum TierErrorCause {
    /// A read from the SSD, or the check of its bytes.
    #[error("{0}")]
    Store(#[from] StoreError),
    /// A copy to the device.
    #[error("{0}")]
    Device(#[from] DeviceError),
}

/// The slots in memory, with the reader and the device that move bytes into and out of them.
pub(super) struct Links {
    pub tiers: TierLedger,
    pub costs: CostModel,
    pub traffic: TierTraffic,
    /// Declared before the slots, which it may have page-locked, so that it is dropped first.
    device: Box<dyn Device>,
    pub filler: SlotFiller,
    /// Reads that have completed, and of which the ledger does not know yet.
    completed: VecDeque<CompletedRead>,
    /// Bytes of wanted experts in flight to the device.
    queued_bytes: usize,
    /// Experts in flight to the device that are not wanted yet.
    ahead: usize,
    /// Experts whose read or background copy has failed: the device is not filled with them.
    broken: HashSet<ExpertKey>,
}

type CopyResult = Result<Duration, DeviceError>;

/// A completed read or copy.
pub(super) struct Completed {
    pub expert: ExpertKey,
    /// Whether it was a background copy, begun for no wanted expert.
    pub background: bool,
    pub result: Result<(), TierErrorCause>,
}

impl Links {
    /// Allocates the device's arena, with slots as long as those of `memory`. Nothing is in flight.
    pub fn new(
        geometry: &Geometry,
        tiers: TierLedger,
        host: SlotSupply,
        mut device: Box<dyn Device>,
        costs: CostModel,
    ) -> Result<Self, DeviceError> {
        let shape = tiers.shape();
        assert_eq!(host.memory.len(), shape.host.total_slots(), "one memory slot for each slot of the shape");
        device.allocate(shape.device.total_slots(), host.memory[0].len())?;
        device.expect_slots(&host.memory);
        let (traffic, completed) = Default::default();
        Ok(Links {
            tiers,
            costs,
            traffic,
            device,
            filler: SlotFiller::new(geometry, host),
            completed,
            queued_bytes: 0,
            ahead: 0,
            broken: HashSet::new(),
        })
    }

    /// Has the device prepare the slots in memory for its copies.
    pub fn prepare_slots(&mut self) {
        self.device.prepare_slots();
    }

    /// The most bytes of the device's memory that were allocated at one time.
    pub fn device_peak_bytes(&self) -> u64 {
        self.device.peak_bytes()
    }

    /// Counts, bytes and times so far.
    pub fn traffic(&self) -> TierTraffic {
        TierTraffic {
            counts: self.tiers.counts(),
            demand_bytes: self.filler.demand_bytes,
            prefetch_bytes: self.filler.prefetch_bytes,
            read_busy: self.filler.read_busy(),
            checked: self.filler.checked,
            submitting: self.filler.submitting,
            work: self.device.work(),
            ..self.traffic
        }
    }

    /// Bytes of wanted experts in flight to the device.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Whether no copy is in flight.
    pub fn link_idles(&self) -> bool {
        self.device.in_flight() == 0
    }

    /// Begins to read absent experts while there are slots; returns whether there were slots for all.
    pub fn read(&mut self, experts: &[ExpertKey]) -> bool {
        let mut slots_for_all = true;
        for expert in experts {
            let Some(at) = self.tiers.read(*expert) else {
                slots_for_all = false;
                break;
            };
            self.filler.read(*expert, at);
        }
        self.filler.submit();
        slots_for_all
    }

    /// Prefetches hinted experts while there are no demand reads.
    pub fn prefetch_if_idle(&mut self) {
        while let Some(expert) = self.filler.next_prefetch() {
            if let Some(at) = self.tiers.prefetch(expert) {
                self.filler.prefetch(expert, at);
            }
        }
    }

    /// Brings experts closer to the device, those of this row first, if it has room for all: a few reads and copies at
    /// a time, and only while no wanted expert is read.
    pub fn fill_device(&mut self, row: MoeRow) {
        if self.tiers.is_filled() || !self.filler.is_idle() {
            return;
        }
        self.take_arrived();
        while self.device.in_flight() < FILLING_COPIES
            && let Some(expert) = self.tiers.missing_on_device(row, |expert, location| {
                matches!(location, ExpertLocation::Host(_)) && !self.broken.contains(&expert)
            })
            && self.promote(expert, PromoteFor::IdleLink)
        {}
        while self.filler.reads_in_flight() < FILLING_READS
            && let Some(expert) = self.tiers.missing_on_device(row, |expert, location| {
                location == ExpertLocation::Absent && !self.broken.contains(&expert)
            })
            && let Some(at) = self.tiers.prefetch(expert)
        {
            self.filler.prefetch(expert, at);
        }
    }

    /// Notes the reads that have completed. Never waits.
    fn take_arrived(&mut self) {
        let mut reads = Vec::new();
        self.filler.poll(&mut reads);
        let reads: Vec<CompletedRead> = self.completed.drain(..).chain(reads).collect();
        reads.into_iter().for_each(|read| drop(self.arrived(read)));
    }

    /// Begins to copy an expert to the device, if there is a device slot for it. Returns whether there is.
    pub fn promote(&mut self, expert: ExpertKey, reason: PromoteFor) -> bool {
        let Some(Promotion { from, to, demotion }) = self.tiers.promote(expert, reason) else { return false };
        // The device keeps the order of operations on one slot, so both copies may begin at once.
        if let Some(Demotion { expert, to: memory }) = demotion {
            self.copy(Direction::FromDevice, expert, memory, to, reason);
        }
        match reason {
            PromoteFor::Demand => self.queued_bytes += self.filler.bytes(expert.row),
            _ => self.ahead += 1,
        }
        self.copy(Direction::ToDevice, expert, from, to, reason);
        true
    }

    fn copy(&mut self, direction: Direction, expert: ExpertKey, memory: SlotIndex, at: SlotIndex, reason: PromoteFor) {
        let (slot, len) = (self.filler.take(memory), self.filler.bytes(expert.row));
        let is_ahead = reason != PromoteFor::Demand;
        let tag = self.filler.number(expert) << 1 | u64::from(is_ahead);
        self.device.submit(Transfer { direction, slot, at, len, is_ahead, tag });
    }

    /// A copy that has completed. Never waits.
    pub fn poll_copies(&mut self) -> Option<Completed> {
        self.device.poll().map(|copied| self.copied(copied))
    }

    /// The next completed read or copy, waiting for it if necessary. `None` if nothing is in flight.
    pub fn complete_one(&mut self) -> Option<Completed> {
        self.filler.submit();
        let start = Instant::now();
        // Copies first: each takes less time than a read, and a read that completes meanwhile would queue behind it
        // anyway.
        let copied = self.device.wait();
        self.traffic.waited += start.elapsed();
        match copied {
            Some(copied) => Some(self.copied(copied)),
            None => self.completed_read().map(|read| self.arrived(read)),
        }
    }

    fn completed_read(&mut self) -> Option<CompletedRead> {
        if self.completed.is_empty() {
            let mut reads = Vec::new();
            self.filler.complete(&mut self.traffic.waited, &mut reads);
            self.completed.extend(reads);
        }
        self.completed.pop_front()
    }

    fn arrived(&mut self, CompletedRead { expert, result, .. }: CompletedRead) -> Completed {
        match &result {
            Ok(()) => self.tiers.arrived(expert),
            Err(_) => {
                self.broken.insert(expert);
                self.tiers.read_failed(expert);
            }
        }
        Completed { expert, background: false, result: result.map_err(TierErrorCause::from) }
    }

    fn copied(&mut self, copied: TransferDone) -> Completed {
        let TransferDone { direction, slot, len, tag, result, .. } = copied;
        let (expert, background) = (self.filler.expert_of(tag >> 1), tag & 1 == 1);
        self.filler.put_back(slot);
        self.traffic.failed_copies += u64::from(result.is_err());
        if background && result.is_err() {
            self.broken.insert(expert);
        }
        let result = match direction {
            Direction::ToDevice => self.copied_in(expert, len, background, result),
            Direction::FromDevice => {
                self.copied_out(expert, len, result);
                Ok(())
            }
        };
        Completed { expert, background, result: result.map_err(TierErrorCause::from) }
    }

    fn copied_in(
        &mut self,
        expert: ExpertKey,
        len: usize,
        background: bool,
        result: CopyResult,
    ) -> Result<(), DeviceError> {
        if background {
            self.ahead -= 1
        } else {
            self.queued_bytes -= len
        }
        match result {
            Ok(took) => {
                // The time of copies that share the link is not that of one.
                if self.ahead == 0 && !(background && self.device.in_flight() > 0) {
                    self.costs.copied(len, took);
                }
                self.traffic.to_device_bytes += len as u64;
                self.traffic.to_device_busy += took;
                self.tiers.promoted(expert);
                Ok(())
            }
            Err(e) => {
                self.tiers.promotion_failed(expert);
                Err(e)
            }
        }
    }

    /// A failed copy to memory is not an error: the expert has to be read again when it is wanted.
    fn copied_out(&mut self, expert: ExpertKey, len: usize, result: CopyResult) {
        match result {
            Ok(took) => {
                self.traffic.from_device_bytes += len as u64;
                self.traffic.from_device_busy += took;
                self.tiers.demoted(expert);
            }
            Err(_) => self.tiers.demotion_failed(expert),
        }
    }

    /// Whether every slot in memory is in its place, or with the reader or the device.
    #[cfg(test)]
    pub fn is_whole(&self) -> bool {
        self.filler.is_whole(self.device.in_flight())
    }
}
