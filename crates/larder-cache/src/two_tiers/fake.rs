//! The fake of a device, for tests: its memory is a few vectors, and faults and latency follow from a seed.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder_core::Rng;
use parking_lot::{Mutex, MutexGuard};

use super::{Device, DeviceError, Direction, Transfer, TransferDone};
use crate::one_tier::SlotIndex;

/// The bytes that a failed copy leaves behind.
const GARBAGE: u8 = 0xA5;

/// The slots of a device, for inspection from outside.
#[derive(Clone, Default)]
pub struct DeviceSlots(Arc<Mutex<Vec<FakeSlot>>>);

#[derive(Clone)]
struct FakeSlot {
    bytes: Vec<u8>,
    /// Computations that have begun with these bytes and have not read them yet.
    pending: Vec<Arc<OnceLock<Vec<u8>>>>,
}

/// A computation that has begun with a slot: whenever it reads, it sees the bytes before the next copy into the slot.
pub struct PendingCompute {
    slots: DeviceSlots,
    at: SlotIndex,
    saved: Arc<OnceLock<Vec<u8>>>,
}

impl DeviceSlots {
    /// The bytes of a slot.
    pub fn bytes(&self, at: SlotIndex) -> Vec<u8> {
        self.lock()[at].bytes.clone()
    }

    /// Begins a computation with a slot.
    pub fn begin(&self, at: SlotIndex) -> PendingCompute {
        let saved = Arc::new(OnceLock::new());
        self.lock()[at].pending.push(saved.clone());
        PendingCompute { slots: self.clone(), at, saved }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<FakeSlot>> {
        self.0.lock()
    }
}

impl PendingCompute {
    /// The bytes that the computation sees.
    pub fn bytes(self) -> Vec<u8> {
        match self.saved.get() {
            Some(saved) => saved.clone(),
            None => self.slots.bytes(self.at),
        }
    }
}

impl Drop for PendingCompute {
    fn drop(&mut self) {
        self.slots.lock()[self.at].pending.retain(|saved| !Arc::ptr_eq(saved, &self.saved));
    }
}

/// A device whose copies happen when they are polled or waited for. The same seed and the same calls give the same
/// completions in the same order.
pub struct FakeDevice {
    slots: DeviceSlots,
    free_bytes: u64,
    overtaken_max: u64,
    seconds_per_byte: f64,
    racy: bool,
    /// One poll in `polled` finds a completed transfer, at random; 0 for none.
    polled: u64,
    /// One copy in this many fails, at random, by direction; 0 for none.
    failing: [u64; 2],
    random: Rng,
    submitted: u64,
    /// The transfers in flight in order of submission, each with its completion time as a count of transfers.
    flights: Vec<(u64, Transfer)>,
}

impl FakeDevice {
    /// A device with this much memory, without failures, on which transfers complete in order.
    pub fn new(free_bytes: u64, seed: u64) -> Self {
        FakeDevice {
            slots: DeviceSlots::default(),
            free_bytes,
            overtaken_max: 0,
            seconds_per_byte: 0.0,
            racy: false,
            polled: 0,
            failing: [0, 0],
            random: Rng::new(seed),
            submitted: 0,
            flights: Vec::new(),
        }
    }

    /// Latency: up to `transfers_max` later transfers may overtake a transfer, if they concern other slots.
    pub fn overtaken(mut self, transfers_max: u64) -> Self {
        self.overtaken_max = transfers_max;
        self
    }

    /// One poll in `one_in` finds the next completed transfer. Otherwise transfers complete only when waited for.
    pub fn polled(mut self, one_in: u64) -> Self {
        self.polled = one_in;
        self
    }

    /// One transfer in `one_in` of this direction fails.
    pub fn failing(mut self, direction: Direction, one_in: u64) -> Self {
        self.failing[direction as usize] = one_in;
        self
    }

    /// A broken device, whose copies do not wait for computations that have begun.
    pub fn racy(mut self) -> Self {
        self.racy = true;
        self
    }

    /// The reported speed of the link.
    pub fn link(mut self, seconds_per_byte: f64) -> Self {
        self.seconds_per_byte = seconds_per_byte;
        self
    }

    /// Its slots, which stay accessible after the device has been given away.
    pub fn slots(&self) -> DeviceSlots {
        self.slots.clone()
    }

    fn perform(&mut self, transfer: &mut Transfer) -> Result<Duration, DeviceError> {
        let Transfer { direction, at, len, .. } = *transfer;
        let one_in = self.failing[direction as usize];
        let fails = one_in > 0 && self.below(one_in) == 0;
        let mut slots = self.slots.lock();
        let FakeSlot { bytes, pending } = &mut slots[at];
        if direction == Direction::ToDevice && !self.racy {
            pending.drain(..).for_each(|saved| saved.set(bytes.clone()).expect("bytes are saved once"));
        }
        let (here, there) = (&mut transfer.slot[..len], &mut bytes[..len]);
        match (direction, fails) {
            (Direction::ToDevice, false) => there.copy_from_slice(here),
            (Direction::FromDevice, false) => here.copy_from_slice(there),
            (Direction::ToDevice, true) => there.fill(GARBAGE),
            (Direction::FromDevice, true) => here.fill(GARBAGE),
        }
        if fails {
            Err(DeviceError::Copy { len, direction, at, cause: "the link is down".into() })
        } else {
            Ok(Duration::from_secs_f64(self.seconds_per_byte * len as f64))
        }
    }

    /// The next random number below `limit`, which is at least 1.
    fn below(&mut self, limit: u64) -> u64 {
        self.random.bits() % limit
    }
}

impl Device for FakeDevice {
    fn allocate(&mut self, slots: usize, slot_bytes: usize) -> Result<(), DeviceError> {
        let free_bytes = self.free_bytes;
        if slots as u64 * slot_bytes as u64 > free_bytes {
            return Err(DeviceError::OutOfMemory { slots, slot_bytes, free_bytes });
        }
        *self.slots.lock() = vec![FakeSlot { bytes: vec![0; slot_bytes], pending: Vec::new() }; slots];
        Ok(())
    }

    fn submit(&mut self, transfer: Transfer) {
        let over = self.submitted + self.below(self.overtaken_max + 1);
        self.submitted += 1;
        self.flights.push((over, transfer));
    }

    fn poll(&mut self) -> Option<TransferDone> {
        let is_over = self.polled > 0 && self.below(self.polled) == 0;
        if is_over { self.wait() } else { None }
    }

    fn wait(&mut self) -> Option<TransferDone> {
        let first_of_its_slot =
            |(i, (_, t)): &(usize, &(u64, Transfer))| self.flights[..*i].iter().all(|(_, earlier)| earlier.at != t.at);
        let flights = self.flights.iter().enumerate().filter(first_of_its_slot);
        // Among transfers that complete at the same time, the first submitted: `min_by_key` takes the first.
        let next = flights.min_by_key(|(_, (over, _))| *over)?.0;
        let (_, mut transfer) = self.flights.remove(next);
        let result = self.perform(&mut transfer);
        let Transfer { direction, slot, at, len, tag, .. } = transfer;
        Some(TransferDone { direction, slot, at, len, tag, result })
    }

    fn in_flight(&self) -> usize {
        self.flights.len()
    }
}

#[cfg(test)]
mod tests {
    use larder_core::SHARD_ALIGN;
    use larder_store::reader::Arena;

    use super::*;

    /// Copies numbered slots in, to four device slots in turn, and out again; returns the order of completion.
    fn order(mut device: FakeDevice) -> Vec<(Direction, u64)> {
        device.allocate(4, SHARD_ALIGN).unwrap();
        let (_, mut slots) = Arena::new(16, SHARD_ALIGN).unwrap();
        let outs = slots.split_off(8);
        for (tag, (mut slot, out)) in slots.into_iter().zip(outs).enumerate() {
            slot.fill(tag as u8 + 1);
            let (at, len, tag) = (tag % 4, SHARD_ALIGN, tag as u64);
            device.submit(Transfer { direction: Direction::ToDevice, slot, at, len, is_ahead: false, tag });
            device.submit(Transfer { direction: Direction::FromDevice, slot: out, at, len, is_ahead: false, tag });
        }
        let mut order = Vec::new();
        while let Some(over) = device.wait() {
            assert!(over.slot.iter().all(|b| *b == over.tag as u8 + 1), "the copy out follows the copy in of its slot");
            order.push((over.direction, over.tag));
        }
        order
    }

    #[test]
    fn latency_reorders_by_seed_but_never_within_one_slot() {
        let late = |seed| order(FakeDevice::new(1 << 20, seed).overtaken(9));
        assert_eq!(late(1), late(1));
        assert_ne!(late(1), late(2));
        assert_ne!(late(1), order(FakeDevice::new(1 << 20, 1)));
    }

    #[test]
    fn polls_find_completed_transfers_at_random_and_in_order() {
        let polls_until_all_is_over = |one_in, polls: usize| {
            let mut device = FakeDevice::new(1 << 20, 1).polled(one_in);
            device.allocate(4, SHARD_ALIGN).unwrap();
            let (_, slots) = Arena::new(4, SHARD_ALIGN).unwrap();
            for (tag, slot) in (0..).zip(slots) {
                let at = tag as usize;
                device.submit(Transfer {
                    direction: Direction::ToDevice,
                    slot,
                    at,
                    len: SHARD_ALIGN,
                    is_ahead: false,
                    tag,
                });
            }
            (0..polls).filter_map(|poll| Some((poll, device.poll()?.tag))).collect::<Vec<_>>()
        };
        assert_eq!(polls_until_all_is_over(0, 99), []);
        assert_eq!(polls_until_all_is_over(1, 99), [(0, 0), (1, 1), (2, 2), (3, 3)]);
        let now_and_then = polls_until_all_is_over(5, 999);
        assert_eq!(now_and_then.iter().map(|(_, tag)| *tag).collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(now_and_then[3].0 > 4, "{now_and_then:?}");
    }

    #[test]
    fn a_pending_computation_sees_the_bytes_of_its_beginning() {
        for racy in [false, true] {
            let mut device = FakeDevice::new(1 << 20, 1);
            device.racy = racy;
            device.allocate(1, SHARD_ALIGN).unwrap();
            let slots = device.slots();
            let (_, mut memory) = Arena::new(1, SHARD_ALIGN).unwrap();
            let (mut slot, mut pending) = (memory.remove(0), Vec::new());
            for round in 1..4 {
                slot.fill(round);
                device.submit(Transfer {
                    direction: Direction::ToDevice,
                    slot,
                    at: 0,
                    len: SHARD_ALIGN,
                    is_ahead: false,
                    tag: 0,
                });
                slot = device.wait().unwrap().slot;
                pending.push(slots.begin(0));
            }
            let saw: Vec<u8> = pending.into_iter().map(|pending| pending.bytes()[0]).collect();
            assert_eq!(saw, if racy { [3, 3, 3] } else { [1, 2, 3] });
            assert!(slots.lock()[0].pending.is_empty());
        }
    }

    #[test]
    fn an_arena_that_does_not_fit_is_refused_with_the_numbers() {
        let error = FakeDevice::new(10_000, 1).allocate(3, 4096).unwrap_err().to_string();
        assert_eq!(error, "3 slots of 4096 bytes do not fit into the 10000 bytes of device memory that are free");
    }
}
