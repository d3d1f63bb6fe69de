//! The I/O of two tiers: carries out the ledger's decisions with the reader and the device.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use larder_core::{ExpertId, Geometry, LayerIdx};
use larder_store::StoreError;
use larder_store::reader::{ReadCompletion, ReadRequest, Reader, Slot};

use super::{
    CostModel, Demotion, Device, DeviceError, Direction, PromoteFor, Promotion, TierLedger, TierTraffic, Transfer,
    TransferDone,
};
use crate::cache::Shards;
use crate::ledger::SlotIndex;
use crate::traffic::BusyTime;

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

/// The lower tier: its memory, and the reader that fills it.
pub struct HostTier {
    /// Exactly the slots of [`TierShape::host`](super::TierShape::host), in order, each large enough for every
    /// expert.
    pub memory: Vec<Slot>,
    /// The reader that fills the slots.
    pub reader: Box<dyn Reader>,
    /// Knows the layout of experts and checks their bytes.
    pub shards: Box<dyn Shards>,
}

/// The slots in memory, with the reader and the device that move bytes into and out of them.
pub(super) struct Links {
    pub tiers: TierLedger,
    pub costs: CostModel,
    pub traffic: TierTraffic,
    pub shards: Box<dyn Shards>,
    /// The decoder layers that have experts.
    pub layers: Vec<LayerIdx>,
    experts: usize,
    /// Declared before the slots, which it may have page-locked, so that it is dropped first.
    device: Box<dyn Device>,
    /// The memory of each slot; `None` while a slot is with the reader or the device.
    slots: Vec<Option<Slot>>,
    reader: Box<dyn Reader>,
    /// Reads that did not fit into the reader's queue.
    waiting: VecDeque<ReadRequest>,
    /// Number of demand reads in flight.
    demand_reads: usize,
    /// Hinted experts to prefetch: row and expert, likeliest first.
    pub prefetch_queue: VecDeque<(usize, usize)>,
    busy: BusyTime,
    /// Bytes in flight to the device.
    queued_bytes: usize,
}

type CopyResult = Result<Duration, DeviceError>;

/// A completed read or copy.
pub(super) struct Completed {
    pub row: usize,
    pub expert: usize,
    /// Whether it was a background copy, begun for no wanted expert.
    pub background: bool,
    pub result: Result<(), TierErrorCause>,
}

impl Links {
    /// Allocates the device's arena, with slots as long as those of `memory`. Nothing is in flight.
    pub fn new(
        geometry: &Geometry,
        tiers: TierLedger,
        host: HostTier,
        mut device: Box<dyn Device>,
        costs: CostModel,
    ) -> Result<Self, DeviceError> {
        let HostTier { memory, reader, shards } = host;
        let shape = tiers.shape();
        assert_eq!(memory.len(), shape.host.total_slots(), "one memory slot for each slot of the shape");
        device.allocate(shape.device.total_slots(), memory[0].len())?;
        Ok(Links {
            tiers,
            costs,
            traffic: TierTraffic::default(),
            shards,
            layers: geometry.moe_layers.clone(),
            experts: geometry.experts,
            slots: memory.into_iter().map(Some).collect(),
            reader,
            device,
            waiting: VecDeque::new(),
            demand_reads: 0,
            prefetch_queue: VecDeque::new(),
            busy: BusyTime::default(),
            queued_bytes: 0,
        })
    }

    /// Counts, bytes and times so far.
    pub fn traffic(&self) -> TierTraffic {
        TierTraffic { counts: self.tiers.counts(), read_busy: self.busy.total(), ..self.traffic }
    }

    /// Bytes of an expert of this row.
    pub fn bytes(&self, row: usize) -> usize {
        self.shards.layout(self.layers[row]).bytes
    }

    /// Bytes in flight to the device.
    pub fn queued_bytes(&self) -> usize {
        self.queued_bytes
    }

    /// Whether no copy is in flight.
    pub fn link_idles(&self) -> bool {
        self.device.in_flight() == 0
    }

    /// The bytes of an expert in memory.
    pub fn data(&self, row: usize, at: SlotIndex) -> &[u8] {
        let slot = self.slots[at].as_ref().expect("the slot of an expert in memory is with the cache");
        &slot[..self.bytes(row)]
    }

    /// Begins to read absent experts while there are slots; returns whether there were slots for all.
    pub fn read(&mut self, row: usize, experts: impl Iterator<Item = usize>) -> bool {
        let mut slots_for_all = true;
        for expert in experts {
            let Some(at) = self.tiers.read(row, expert) else {
                slots_for_all = false;
                break;
            };
            self.demand_reads += 1;
            self.traffic.demand_bytes += self.bytes(row) as u64;
            self.begin_read(row, expert, at, false);
        }
        self.submit_reads();
        slots_for_all
    }

    /// Prefetches hinted experts while there are no demand reads.
    pub fn prefetch_if_idle(&mut self) {
        while self.demand_reads == 0
            && self.reader.in_flight() < self.reader.capacity()
            && let Some((row, expert)) = self.prefetch_queue.pop_front()
        {
            let Some(at) = self.tiers.prefetch(row, expert) else { continue };
            self.traffic.prefetch_bytes += self.bytes(row) as u64;
            self.begin_read(row, expert, at, true);
            self.submit_reads();
        }
    }

    fn begin_read(&mut self, row: usize, expert: usize, at: SlotIndex, prefetch: bool) {
        let (len, offset) = (self.bytes(row), self.shards.data_start());
        let slot = self.slots[at].take().expect("an assigned slot is with the cache");
        let shard = row * self.experts + expert;
        self.waiting.push_back(ReadRequest {
            shard,
            offset,
            len,
            slot,
            tag: (shard as u64) << 1 | u64::from(prefetch),
        });
    }

    /// Begins to copy an expert to the device, if there is a device slot for it.
    pub fn promote(&mut self, row: usize, expert: usize, reason: PromoteFor) {
        let Some(Promotion { from, to, demotion }) = self.tiers.promote(row, expert, reason) else { return };
        // The device keeps the order of operations on one slot, so both copies may begin at once.
        if let Some(Demotion { row, expert, to: memory }) = demotion {
            self.copy(Direction::FromDevice, (row, expert), memory, to, reason);
        }
        self.queued_bytes += self.bytes(row);
        self.copy(Direction::ToDevice, (row, expert), from, to, reason);
    }

    fn copy(
        &mut self,
        direction: Direction,
        (row, expert): (usize, usize),
        memory: SlotIndex,
        at: SlotIndex,
        reason: PromoteFor,
    ) {
        let slot = self.slots[memory].take().expect("the slot of a copy is with the cache");
        let tag = ((row * self.experts + expert) as u64) << 1 | u64::from(reason == PromoteFor::IdleLink);
        self.device.submit(Transfer { direction, slot, at, len: self.bytes(row), tag });
    }

    fn submit_reads(&mut self) {
        if !self.waiting.is_empty() {
            self.reader.submit(&mut self.waiting);
            self.busy.set(self.reader.in_flight() > 0);
        }
    }

    /// A copy that has completed. Never waits.
    pub fn poll_copies(&mut self) -> Option<Completed> {
        self.device.poll().map(|copied| self.copied(copied))
    }

    /// Waits for the next read or copy to complete. `None` if nothing is in flight.
    pub fn complete_one(&mut self) -> Option<Completed> {
        self.submit_reads();
        let start = Instant::now();
        // Copies first: each takes less time than a read, and a read that completes meanwhile would queue behind it
        // anyway.
        let copied = self.device.wait();
        let read = if copied.is_none() { self.reader.wait() } else { None };
        self.traffic.waited += start.elapsed();
        match (copied, read) {
            (Some(copied), _) => Some(self.copied(copied)),
            (None, Some(read)) => Some(self.arrived(read)),
            (None, None) => None,
        }
    }

    fn arrived(&mut self, ReadCompletion { slot, tag, result }: ReadCompletion) -> Completed {
        let (row, expert) = self.expert_of(tag >> 1);
        self.demand_reads -= usize::from(tag & 1 == 0);
        self.busy.set(self.reader.in_flight() > 0);
        let at = slot.index();
        self.slots[at] = Some(slot);
        let layer = self.layers[row];
        let check = || self.shards.check(layer, ExpertId(expert as u16), self.data(row, at));
        let result = result.and_then(|()| check()).map_err(TierErrorCause::from);
        match &result {
            Ok(()) => self.tiers.arrived(row, expert),
            Err(_) => self.tiers.read_failed(row, expert),
        }
        Completed { row, expert, background: false, result }
    }

    fn copied(&mut self, copied: TransferDone) -> Completed {
        let TransferDone { direction, slot, len, tag, result, .. } = copied;
        let ((row, expert), background) = (self.expert_of(tag >> 1), tag & 1 == 1);
        let at = slot.index();
        self.slots[at] = Some(slot);
        self.traffic.failed_copies += u64::from(result.is_err());
        let result = match direction {
            Direction::ToDevice => self.copied_in(row, expert, len, result),
            Direction::FromDevice => {
                self.copied_out(row, expert, len, result);
                Ok(())
            }
        };
        Completed { row, expert, background, result: result.map_err(TierErrorCause::from) }
    }

    fn copied_in(&mut self, row: usize, expert: usize, len: usize, result: CopyResult) -> Result<(), DeviceError> {
        self.queued_bytes -= len;
        match result {
            Ok(took) => {
                self.costs.copied(len, took);
                self.traffic.to_device_bytes += len as u64;
                self.traffic.to_device_busy += took;
                self.tiers.promoted(row, expert);
                Ok(())
            }
            Err(e) => {
                self.tiers.promotion_failed(row, expert);
                Err(e)
            }
        }
    }

    /// A failed copy to memory is not an error: the expert has to be read again when it is wanted.
    fn copied_out(&mut self, row: usize, expert: usize, len: usize, result: CopyResult) {
        match result {
            Ok(took) => {
                self.traffic.from_device_bytes += len as u64;
                self.traffic.from_device_busy += took;
                self.tiers.demoted(row, expert);
            }
            Err(_) => self.tiers.demotion_failed(row, expert),
        }
    }

    fn expert_of(&self, tag: u64) -> (usize, usize) {
        (tag as usize / self.experts, tag as usize % self.experts)
    }

    /// Whether every slot in memory is in its place, or with the reader or the device.
    #[cfg(test)]
    pub fn is_whole(&self) -> bool {
        let away = self.slots.iter().filter(|slot| slot.is_none()).count();
        let here = self.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.as_ref()?)));
        away == self.reader.in_flight() + self.waiting.len() + self.device.in_flight()
            && here.into_iter().all(|(at, slot)| slot.index() == at)
    }
}
