//! Filling slots: reads of experts into slots in memory, on demand and as prefetches, and the check of their bytes.
//! Both caches read this way; each tells a ledger of its own that an expert has arrived.

mod check;
mod halves;
mod supply;
mod tag;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::{ExpertKey, ExpertLayout, Geometry, LayerIdx, MoeRow, TaskThreads};
use larder_os::timeline;
use larder_store::StoreError;
use larder_store::reader::{ReadCompletion, ReadGoal, ReadRequest, Reader, Slot};

use self::check::Check;
use self::halves::{Half, HalvedReads, Progress};
use self::tag::ReadTag;
use crate::one_tier::SlotIndex;
use crate::traffic::BusyTime;

pub use self::supply::{Shards, SlotSupply};

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
    /// Second halves, which are read behind all other waiting reads.
    waiting_backs: VecDeque<ReadRequest>,
    halved: HalvedReads,
    /// Slots whose first halves have been read and checked since [`take_fronts`](Self::take_fronts).
    fronts: Vec<SlotIndex>,
    /// The same before the check.
    unchecked_fronts: Vec<SlotIndex>,
    /// Buffer of [`check`](Self::check).
    checks: Vec<Check>,
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

/// A completed read of a whole expert.
pub(crate) struct CompletedRead {
    pub expert: ExpertKey,
    /// The slot of the read.
    pub at: SlotIndex,
    /// Whether the expert's bytes are in the slot, or why they cannot be used.
    pub result: Result<(), StoreError>,
    tag: ReadTag,
    /// The first part that is not checked yet.
    unchecked_from: usize,
}

/// The shards of the experts of a row, and its layer: rows behind those of `layers` are of smaller copies.
fn shards_of<'s>(shards: &'s dyn Shards, layers: &[LayerIdx], row: MoeRow) -> (&'s dyn Shards, LayerIdx) {
    match row.index().checked_sub(layers.len()) {
        Some(row) => (shards.small().expect("rows of smaller copies exist where there are such copies"), layers[row]),
        None => (shards, layers[row.index()]),
    }
}

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
            waiting_backs: VecDeque::new(),
            halved: HalvedReads::default(),
            fronts: Vec::new(),
            unchecked_fronts: Vec::new(),
            checks: Vec::new(),
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

    /// Whether there are smaller copies of experts.
    pub fn has_small(&self) -> bool {
        self.shards.small().is_some()
    }

    /// The row of the smaller copies of a layer's experts, if there are any. Such rows follow those of the model.
    pub fn small_row(&self, layer: LayerIdx) -> Option<MoeRow> {
        self.shards.small().map(|_| MoeRow(self.layers.len() + self.row(layer).index()))
    }

    /// Whether a row is one of smaller copies.
    pub fn is_small(&self, row: MoeRow) -> bool {
        row.index() >= self.layers.len()
    }

    /// The shards of the experts of a row, and its layer.
    fn shards_of(&self, row: MoeRow) -> (&dyn Shards, LayerIdx) {
        shards_of(self.shards.as_ref(), &self.layers, row)
    }

    /// The layout of the experts of a row.
    pub fn layout_of_row(&self, row: MoeRow) -> &ExpertLayout {
        let (shards, layer) = self.shards_of(row);
        shards.layout(layer)
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

    /// Gives the memory of a slot that holds no expert back to the system. If the reader or the system refuse, it stays
    /// with the process and counts as kept.
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
        if self.is_idle() { self.prefetch_queue.pop_front() } else { None }
    }

    /// Whether no demand read is in flight, and the reader has room.
    pub fn is_idle(&self) -> bool {
        self.demand_reads == 0 && self.reader.in_flight() < self.reader.capacity()
    }

    /// Sets the goal of the reads that are submitted from now on.
    pub fn set_goal(&mut self, goal: ReadGoal) {
        self.reader.set_goal(goal);
    }

    /// Queues a demand read into the slot that was assigned to the expert.
    pub fn read(&mut self, expert: ExpertKey, at: SlotIndex) {
        self.demand_reads += 1;
        self.demand_bytes += self.bytes(expert.row) as u64;
        self.queue(expert, at, false);
    }

    /// As [`read`](Self::read), in two halves if the expert can be cut: the first waits before those of other experts
    /// that have been queued, the second behind all. [`take_fronts`](Self::take_fronts) tells which first halves have
    /// arrived.
    pub fn read_in_halves(&mut self, expert: ExpertKey, at: SlotIndex) {
        let (shards, layer) = self.shards_of(expert.row);
        let Some(cut) = shards.cut(layer) else { return self.read(expert, at) };
        let (bytes, offset) = (self.bytes(expert.row), self.shards.data_start());
        self.demand_reads += 2;
        self.demand_bytes += bytes as u64;
        self.halved.begin(expert, at);
        let (front, back) = self.take(at).split_at(cut);
        let (shard, tag) = (self.number(expert) as usize, ReadTag::new(self.number(expert)));
        let tag_of = |half| ReadTag { half: Some(half), ..tag }.to_bits();
        self.show_begun(tag_of(Half::Front), cut);
        self.show_begun(tag_of(Half::Back), bytes - cut);
        self.waiting.push_back(ReadRequest { shard, offset, len: cut, slot: front, tag: tag_of(Half::Front) });
        let (offset, len) = (offset + cut as u64, bytes - cut);
        self.waiting_backs.push_back(ReadRequest { shard, offset, len, slot: back, tag: tag_of(Half::Back) });
    }

    /// Begins a prefetch into the slot that was assigned to the expert.
    pub fn prefetch(&mut self, expert: ExpertKey, at: SlotIndex) {
        self.prefetch_bytes += self.bytes(expert.row) as u64;
        self.queue(expert, at, true);
        self.submit();
    }

    fn queue(&mut self, expert: ExpertKey, at: SlotIndex, is_prefetch: bool) {
        let tag = ReadTag { is_prefetch, ..ReadTag::new(self.number(expert)) };
        let request = self.request(tag, at);
        self.waiting.push_back(request);
    }

    /// A read in the timeline, from when it is queued until it has completed.
    fn show_begun(&self, tag: u64, bytes: usize) {
        if timeline::is_on() {
            let expert = self.expert_of(ReadTag::from_bits(tag).number);
            let layer = self.shards_of(expert.row).1.index() as u64;
            let of = [("layer", layer), ("expert", u64::from(expert.expert.0)), ("bytes", bytes as u64)];
            timeline::begin_flight(ReadTag::from_bits(tag).name(), tag, &of);
        }
    }

    /// A read of a whole expert into the slot `at`.
    fn request(&mut self, tag: ReadTag, at: SlotIndex) -> ReadRequest {
        let len = self.bytes(self.expert_of(tag.number).row);
        let (shard, offset, slot) = (tag.number as usize, self.shards.data_start(), self.take(at));
        self.show_begun(tag.to_bits(), len);
        ReadRequest { shard, offset, len, slot, tag: tag.to_bits() }
    }

    /// Hands queued reads to the reader, as far as it has room.
    pub fn submit(&mut self) {
        if self.has_waiting_reads() {
            let start = Instant::now();
            self.reader.submit(&mut self.waiting);
            if self.waiting.is_empty() {
                self.reader.submit(&mut self.waiting_backs);
            }
            self.submitting += start.elapsed();
            self.busy.set(self.reader.in_flight() > 0);
        }
    }

    /// Number of reads that have been queued and have not completed.
    pub fn reads_in_flight(&self) -> usize {
        self.reader.in_flight() + self.waiting.len() + self.waiting_backs.len()
    }

    /// Whether reads wait for room in the reader's queue.
    pub fn has_waiting_reads(&self) -> bool {
        !(self.waiting.is_empty() && self.waiting_backs.is_empty())
    }

    /// Waits until a whole expert or a first half has been read, keeping the reader's queue full, and adds all experts
    /// that have been read by then to `reads`, with their bytes checked. Adds none if no read is in flight. The time
    /// spent waiting is added to `waited`.
    pub fn complete(&mut self, waited: &mut Duration, reads: &mut Vec<CompletedRead>) {
        // A read with wrong bytes may have begun again, from another copy.
        while reads.is_empty() && self.fronts.is_empty() {
            self.submit();
            let start = Instant::now();
            let waiting = timeline::span("waiting for reads", []);
            let first = self.reader.wait();
            drop(waiting);
            *waited += start.elapsed();
            let Some(first) = first else { return };
            self.completed(first, reads);
            self.poll_unchecked(reads);
            self.check(reads);
        }
    }

    /// Adds all experts that have been read to `reads`, with their bytes checked.
    pub fn poll(&mut self, reads: &mut Vec<CompletedRead>) {
        self.poll_unchecked(reads);
        self.check(reads);
    }

    /// Whether first halves have arrived, with right bytes, that were not taken.
    pub fn has_fronts(&self) -> bool {
        !self.fronts.is_empty()
    }

    /// Moves the slots whose first halves have arrived, with right bytes, to `fronts`. The second halves are still
    /// being read.
    pub fn take_fronts(&mut self, fronts: &mut Vec<SlotIndex>) {
        fronts.append(&mut self.fronts);
    }

    /// The expert in a slot whose first half alone has arrived, and its bytes.
    pub fn front(&self, at: SlotIndex) -> (ExpertKey, &[u8]) {
        self.halved.front(at)
    }

    fn poll_unchecked(&mut self, reads: &mut Vec<CompletedRead>) {
        let start = Instant::now();
        while let Some(read) = self.reader.poll() {
            self.completed(read, reads);
        }
        self.submitting += start.elapsed();
    }

    fn completed(&mut self, ReadCompletion { slot, tag, result }: ReadCompletion, reads: &mut Vec<CompletedRead>) {
        let (bits, tag) = (tag, ReadTag::from_bits(tag));
        if timeline::is_on() {
            timeline::end_flight(tag.name(), bits, &[]);
        }
        self.demand_reads -= usize::from(!tag.is_prefetch);
        self.busy.set(self.reader.in_flight() > 0);
        let expert = self.expert_of(tag.number);
        let Some(half) = tag.half else {
            reads.push(CompletedRead { expert, at: self.put_back(slot), result, tag, unchecked_from: 0 });
            return;
        };
        match self.halved.end(expert, half, slot, result) {
            (_, Progress::Waiting) => {}
            (at, Progress::Front) => self.unchecked_fronts.push(at),
            (at, Progress::Both { slot, front_is_checked, result }) => {
                self.put_back(slot);
                self.fronts.retain(|front| *front != at);
                self.unchecked_fronts.retain(|front| *front != at);
                let (unchecked_from, tag) = (usize::from(front_is_checked), ReadTag::new(tag.number));
                reads.push(CompletedRead { expert, at, result, tag, unchecked_from });
            }
        }
    }

    /// Whether every slot is in its place, or with the reader, except for `elsewhere` slots.
    #[cfg(test)]
    pub fn is_whole(&self, elsewhere: usize) -> bool {
        let away = self.slots.iter().filter(|slot| slot.is_none()).count();
        let mut here = self.slots.iter().enumerate().filter_map(|(at, slot)| Some((at, slot.as_ref()?)));
        let (halved, halves) = self.halved.counts();
        away + halves == self.reads_in_flight() + halved + elsewhere
            && here.all(|(at, slot)| self.places[slot.index()] == at)
    }
}

#[cfg(test)]
mod tests;
