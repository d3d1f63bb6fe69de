//! Filling slots: reads of experts into slots in memory, on demand and as prefetches, and the check of what arrives. Both
//! caches read this way; each tells a ledger of its own that an expert has arrived.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use larder_core::{ExpertId, ExpertKey, ExpertLayout, Geometry, LayerIdx, MoeRow, TaskThreads};
use larder_store::reader::{ReadCompletion, ReadRequest, Reader, Slot};
use larder_store::{DATA_START, ExpertSource, Store, StoreError};

use crate::one_tier::SlotIndex;
use crate::traffic::BusyTime;

/// What the cache needs to know of the store: where an expert's data are in its shard, and whether read bytes are
/// valid.
pub trait Shards: Send + Sync {
    /// The layout of the experts of `layer`.
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout;

    /// First byte of an expert's data in its shard.
    fn data_start(&self) -> u64;

    /// Number of parts of an expert that can be checked at the same time; at least 1.
    fn check_parts(&self) -> usize {
        1
    }

    /// Checks one of the [`check_parts`](Self::check_parts) of an expert that was read, given with all its data.
    fn check(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<(), StoreError>;
}

impl Shards for Arc<Store> {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        ExpertSource::layout(self.as_ref(), layer)
    }

    fn data_start(&self) -> u64 {
        DATA_START as u64
    }

    fn check_parts(&self) -> usize {
        self.as_ref().check_parts()
    }

    fn check(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<(), StoreError> {
        self.check_part(layer, expert, part, data)
    }
}

/// The memory of a cache, and what fills it.
pub struct SlotSupply {
    /// The slots, each large enough for every expert that is read into it.
    pub memory: Vec<Slot>,
    /// The reader that fills the slots.
    pub reader: Box<dyn Reader>,
    /// Knows the layout of experts and checks their bytes.
    pub shards: Box<dyn Shards>,
    /// The threads that share the checks.
    pub threads: Arc<dyn TaskThreads>,
}

/// The slots in memory, and the reader that fills them.
pub(crate) struct SlotFiller {
    shards: Box<dyn Shards>,
    /// The decoder layers that have experts.
    layers: Vec<LayerIdx>,
    /// For each decoder layer, its MoE row.
    rows: Vec<Option<MoeRow>>,
    experts: usize,
    /// The memory of each slot; `None` while a slot is with the reader or a device.
    slots: Vec<Option<Slot>>,
    /// For each piece of memory, the index of the slot that it is the memory of.
    places: Vec<SlotIndex>,
    reader: Box<dyn Reader>,
    threads: Arc<dyn TaskThreads>,
    /// Reads that did not fit into the reader's queue.
    waiting: VecDeque<ReadRequest>,
    /// Number of demand reads that have not completed.
    demand_reads: usize,
    /// Hinted experts to prefetch, likeliest first.
    prefetch_queue: VecDeque<ExpertKey>,
    /// Bytes of demand reads so far.
    pub demand_bytes: u64,
    /// Bytes of prefetches so far.
    pub prefetch_bytes: u64,
    /// Time in which the threads compared bytes that were read with their checksums.
    pub checked: Duration,
    /// Time that this thread spent on handing reads to the reader and on taking completions from it, without waiting.
    pub submitting: Duration,
    busy: BusyTime,
    /// Whether the memory of slots in use is locked.
    locked: bool,
    /// Slots that are not in use and whose memory could not be given back.
    kept: BTreeSet<SlotIndex>,
}

/// A completed read.
pub(crate) struct CompletedRead {
    pub expert: ExpertKey,
    /// The slot of the read.
    pub at: SlotIndex,
    /// Whether the expert's bytes are in the slot, or why they cannot be used.
    pub result: Result<(), StoreError>,
    /// Tag of the request.
    tag: u64,
}

/// Bit of a tag: the read is a prefetch.
const PREFETCH: u64 = 1;
/// Bit of a tag: the read is of another copy, because the bytes of a first one were wrong.
const COPY: u64 = 2;
/// Bits of a tag below the number of the expert.
const TAG_BITS: u32 = 2;

impl SlotFiller {
    /// A filler of the slots of `supply`. Nothing is in flight.
    pub fn new(geometry: &Geometry, supply: SlotSupply) -> Self {
        let SlotSupply { memory, reader, shards, threads } = supply;
        SlotFiller {
            shards,
            threads,
            layers: geometry.moe_layers.clone(),
            rows: geometry.moe_rows(),
            experts: geometry.experts,
            places: (0..memory.len()).collect(),
            slots: memory.into_iter().map(Some).collect(),
            reader,
            waiting: VecDeque::new(),
            demand_reads: 0,
            prefetch_queue: VecDeque::new(),
            demand_bytes: 0,
            prefetch_bytes: 0,
            checked: Duration::ZERO,
            submitting: Duration::ZERO,
            busy: BusyTime::default(),
            locked: false,
            kept: BTreeSet::new(),
        }
    }

    /// The MoE row of a layer. The caller guarantees that it has experts.
    pub fn row(&self, layer: LayerIdx) -> MoeRow {
        self.rows[layer.index()].expect("the layer has experts")
    }

    /// The layout of the experts of a layer.
    pub fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        self.shards.layout(layer)
    }

    /// The layout of the experts of a row.
    pub fn layout_of_row(&self, row: MoeRow) -> &ExpertLayout {
        self.layout(self.layers[row.index()])
    }

    /// Bytes of an expert of this row.
    pub fn bytes(&self, row: MoeRow) -> usize {
        self.layout_of_row(row).bytes
    }

    /// The bytes of an expert of `row` in memory.
    pub fn data(&self, row: MoeRow, at: SlotIndex) -> &[u8] {
        let slot = self.slots[at].as_ref().expect("the slot of an expert in memory is with the cache");
        &slot[..self.bytes(row)]
    }

    /// Number of an expert among all, for tags.
    pub fn number(&self, expert: ExpertKey) -> u64 {
        expert.index(self.experts) as u64
    }

    /// The expert of a number.
    pub fn expert_of(&self, number: u64) -> ExpertKey {
        ExpertKey::from_index(number as usize, self.experts)
    }

    /// Takes a slot out, for a device that copies into or out of it.
    pub fn take(&mut self, at: SlotIndex) -> Slot {
        self.slots[at].take().expect("an assigned slot is with the cache")
    }

    /// Puts a slot back, and returns its index.
    pub fn put_back(&mut self, slot: Slot) -> SlotIndex {
        let at = self.places[slot.index()];
        self.slots[at] = Some(slot);
        at
    }

    /// Gives the memory of a slot that holds no expert back to the system. If the reader or the system refuse, it stays with the
    /// process and counts as kept.
    pub fn give_back(&mut self, at: SlotIndex) {
        let slot = self.slots[at].as_mut().expect("a slot that is not in use is with the cache");
        if self.reader.release(slot) && slot.give_back().is_ok() {
            self.kept.remove(&at);
        } else {
            self.kept.insert(at);
        }
    }

    /// Tries again to give back what was kept.
    pub fn give_back_kept(&mut self) {
        let kept: Vec<SlotIndex> = self.kept.iter().copied().collect();
        kept.into_iter().for_each(|at| self.give_back(at));
    }

    /// Bytes of slots that are not in use and whose memory could not be given back.
    pub fn kept_bytes(&self) -> u64 {
        let bytes = |at: &SlotIndex| self.slots[*at].as_ref().map_or(0, |slot| slot.len() as u64);
        self.kept.iter().map(bytes).sum()
    }

    /// Prepares a slot that was not in use for its next use.
    pub fn use_again(&mut self, at: SlotIndex) {
        self.kept.remove(&at);
        if self.locked {
            // A system that refuses may swap it out; so it may where it has refused at the start.
            let _ = self.slots[at].as_mut().expect("a slot that is not in use is with the cache").lock();
        }
    }

    /// Locks the memory of slots from now on when they are used again. Those that are not in use are unlocked.
    pub fn lock_slots(&mut self, unused: impl Iterator<Item = SlotIndex>) {
        self.locked = true;
        unused.for_each(|at| self.give_back(at));
    }

    /// For each piece of memory, whether it is of a slot that is not among the unused ones.
    pub fn memory_beside(&self, unused: impl Iterator<Item = SlotIndex>) -> Vec<bool> {
        let mut in_use = vec![true; self.slots.len()];
        for at in unused {
            in_use[self.slots[at].as_ref().expect("a slot that is not in use is with the cache").index()] = false;
        }
        in_use
    }

    /// Moves the bytes of an expert of `row` from one slot to another. Slots of the same size exchange their memory, so
    /// nothing is copied.
    pub fn move_expert(&mut self, row: MoeRow, from: SlotIndex, to: SlotIndex) {
        let (source, mut target) = (self.take(from), self.take(to));
        if source.len() == target.len() {
            (self.places[source.index()], self.places[target.index()]) = (to, from);
        } else {
            let bytes = self.bytes(row);
            target[..bytes].copy_from_slice(&source[..bytes]);
        }
        self.put_back(source);
        self.put_back(target);
    }

    /// Time in which reads were in flight.
    pub fn read_busy(&self) -> Duration {
        self.busy.total()
    }

    /// Replaces the experts to prefetch, likeliest first.
    pub fn set_prefetch_queue(&mut self, experts: VecDeque<ExpertKey>) {
        self.prefetch_queue = experts;
    }

    /// The next expert to prefetch, if nothing better is to be read and the reader has room.
    pub fn next_prefetch(&mut self) -> Option<ExpertKey> {
        let idle = self.demand_reads == 0 && self.reader.in_flight() < self.reader.capacity();
        if idle { self.prefetch_queue.pop_front() } else { None }
    }

    /// Queues a demand read into the slot that was assigned to the expert.
    pub fn read(&mut self, expert: ExpertKey, at: SlotIndex) {
        self.demand_reads += 1;
        self.demand_bytes += self.bytes(expert.row) as u64;
        self.queue(expert, at, false);
    }

    /// Begins a prefetch into the slot that was assigned to the expert.
    pub fn prefetch(&mut self, expert: ExpertKey, at: SlotIndex) {
        self.prefetch_bytes += self.bytes(expert.row) as u64;
        self.queue(expert, at, true);
        self.submit();
    }

    fn queue(&mut self, expert: ExpertKey, at: SlotIndex, prefetch: bool) {
        let (len, offset, slot) = (self.bytes(expert.row), self.shards.data_start(), self.take(at));
        let number = self.number(expert);
        let tag = number << TAG_BITS | if prefetch { PREFETCH } else { 0 };
        self.waiting.push_back(ReadRequest { shard: number as usize, offset, len, slot, tag });
    }

    /// Hands queued reads to the reader, as far as it has room.
    pub fn submit(&mut self) {
        if !self.waiting.is_empty() {
            let start = Instant::now();
            self.reader.submit(&mut self.waiting);
            self.submitting += start.elapsed();
            self.busy.set(self.reader.in_flight() > 0);
        }
    }

    /// Number of reads that have been queued and have not completed.
    pub fn reads_in_flight(&self) -> usize {
        self.reader.in_flight() + self.waiting.len()
    }

    /// Whether reads wait for room in the reader's queue.
    pub fn has_waiting_reads(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Waits until a read completes, keeping the reader's queue full, and adds it and all others that have completed by then
    /// to `reads`, with their bytes checked. Adds none if no read is in flight. The time spent waiting is added to `waited`.
    pub fn complete(&mut self, waited: &mut Duration, reads: &mut Vec<CompletedRead>) {
        // A read with wrong bytes may have begun again, from another copy.
        while reads.is_empty() {
            self.submit();
            let start = Instant::now();
            let first = self.reader.wait();
            *waited += start.elapsed();
            let Some(first) = first else { return };
            let first = self.completed(first);
            reads.push(first);
            self.poll_unchecked(reads);
            self.check(reads);
        }
    }

    /// Adds all reads that have completed to `reads`, with their bytes checked.
    pub fn poll(&mut self, reads: &mut Vec<CompletedRead>) {
        self.poll_unchecked(reads);
        self.check(reads);
    }

    fn poll_unchecked(&mut self, reads: &mut Vec<CompletedRead>) {
        let start = Instant::now();
        while let Some(read) = self.reader.poll() {
            let read = self.completed(read);
            reads.push(read);
        }
        self.submitting += start.elapsed();
    }

    fn completed(&mut self, ReadCompletion { slot, tag, result }: ReadCompletion) -> CompletedRead {
        self.demand_reads -= usize::from(tag & PREFETCH == 0);
        self.busy.set(self.reader.in_flight() > 0);
        CompletedRead { expert: self.expert_of(tag >> TAG_BITS), at: self.put_back(slot), result, tag }
    }

    /// Checks the bytes of `reads`, shared between all threads. Those that are wrong are read again if there is another copy,
    /// and leave `reads`.
    fn check(&mut self, reads: &mut Vec<CompletedRead>) {
        if reads.is_empty() {
            return;
        }
        let start = Instant::now();
        let (parts, failures) = (self.shards.check_parts(), Mutex::new(Vec::new()));
        // The reader stays with this thread.
        let SlotFiller { shards, layers, slots, threads, .. } = &*self;
        threads.run(reads.len() * parts, &|task| {
            let (read, part) = (task / parts, task % parts);
            let CompletedRead { expert: ExpertKey { row, expert }, at, ref result, .. } = reads[read];
            let layer = layers[row.index()];
            let data = &slots[at].as_ref().expect("a completed read gave its slot back")[..shards.layout(layer).bytes];
            if result.is_ok()
                && let Err(e) = shards.check(layer, expert, part, data)
            {
                failures.lock().unwrap_or_else(PoisonError::into_inner).push((read, e));
            }
        });
        let mut failures = failures.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Both parts of an expert may be wrong. The last reads come first, so that indices stay what they are.
        failures.sort_by_key(|(read, _)| std::cmp::Reverse(*read));
        failures.dedup_by_key(|(read, _)| *read);
        for (read, wrong) in failures {
            match self.read_copy(&reads[read], &wrong) {
                true => drop(reads.remove(read)),
                false => reads[read].result = Err(about_copies(wrong, reads[read].tag)),
            }
        }
        self.checked += start.elapsed();
    }

    /// Reads an expert whose bytes are wrong from another copy, if there is one that was not read for this.
    fn read_copy(&mut self, read: &CompletedRead, wrong: &StoreError) -> bool {
        let CompletedRead { expert, at, tag, .. } = *read;
        if tag & COPY != 0 {
            return false;
        }
        let (len, offset, slot) = (self.bytes(expert.row), self.shards.data_start(), self.take(at));
        let shard = self.number(expert) as usize;
        match self.reader.read_copy(ReadRequest { shard, offset, len, slot, tag: tag | COPY }, wrong) {
            Ok(()) => {
                self.demand_reads += usize::from(tag & PREFETCH == 0);
                self.busy.set(true);
                true
            }
            Err(request) => {
                self.put_back(request.slot);
                false
            }
        }
    }

    /// Whether every slot is in its place, or with the reader, except for `elsewhere` slots.
    #[cfg(test)]
    pub fn is_whole(&self, elsewhere: usize) -> bool {
        let away = self.slots.iter().filter(|slot| slot.is_none()).count();
        let mut here = self.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.as_ref()?)));
        away == self.reader.in_flight() + self.waiting.len() + elsewhere
            && here.all(|(at, slot)| self.places[slot.index()] == at)
    }
}

/// The error of wrong bytes, which says if those of the other copy are wrong as well.
fn about_copies(wrong: StoreError, tag: u64) -> StoreError {
    match tag & COPY {
        0 => wrong,
        _ => StoreError { message: format!("{}, and its other copy is wrong, too", wrong.message), ..wrong },
    }
}
