//! The ledger: which expert is in which slot, in which state. A state machine without bytes, files or clocks, which
//! replay runs too.

mod assignment;
mod counts;

use larder_core::{ExpertKey, MoeRow, Presence, Residency};
use larder_policy::eviction::{CacheShape, Eviction, Key, LayerChoice};

use crate::pools::PolicyPools;

pub use assignment::{CapacityChange, SlotAssignment, SlotIndex};
pub use counts::CacheCounts;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    /// Being read for a miss.
    Reading(u32),
    /// Being prefetched.
    Prefetching(u32),
    Resident(u32),
}

#[derive(Clone)]
struct Entry {
    state: State,
    pinned: bool,
    /// Wanted by the open visit, and its place is decided.
    placed: bool,
    seen: bool,
    /// Prefetched and not wanted since.
    unused_prefetch: bool,
}

struct PoolSlots {
    free: Vec<u32>,
    /// Slots that are not in use, because the capacity is below the shape's; the first to be used again is last.
    retired: Vec<u32>,
    /// Number of scratch slots that this pool holds.
    borrowed_scratch: usize,
}

/// The state of every expert of every row, and the slots that they share.
pub struct Ledger {
    shape: CacheShape,
    /// Slots of each pool that are in use, at most those of the shape.
    capacity: usize,
    entries: Vec<Entry>,
    policies: PolicyPools,
    pools: Vec<PoolSlots>,
    /// Scratch slots that no pool holds; between visits these are all of them.
    scratch: Vec<u32>,
    counts: CacheCounts,
}

impl Ledger {
    /// The caller guarantees one policy for each pool of `shape`, and at least one slot.
    pub fn new(shape: &CacheShape, policies: Vec<Box<dyn Eviction>>) -> Self {
        assert!(shape.slots > 0, "a pool without slots");
        let descending = |from: usize, count: usize| (from as u32..(from + count) as u32).rev().collect();
        let pool =
            |p| PoolSlots { free: descending(p * shape.slots, shape.slots), retired: Vec::new(), borrowed_scratch: 0 };
        let entry = Entry { state: State::Absent, pinned: false, placed: false, seen: false, unused_prefetch: false };
        Ledger {
            shape: *shape,
            capacity: shape.slots,
            entries: vec![entry; shape.rows * shape.experts],
            policies: PolicyPools::new(shape, policies),
            pools: (0..shape.pools()).map(pool).collect(),
            scratch: descending(shape.pools() * shape.slots, shape.scratch),
            counts: CacheCounts::default(),
        }
    }

    /// The shape that it was made for.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// The shape with the slots that are in use, as policies are made for.
    pub fn policy_shape(&self) -> CacheShape {
        CacheShape { slots: self.capacity, ..self.shape }
    }

    /// Slots of each pool that are in use.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the number of slots of each pool that are in use, at least 1 and at most those of the shape, and writes
    /// what follows from it to `change`. If fewer slots are left than experts, the policies name those that are
    /// evicted.
    ///
    /// The caller guarantees that no visit is open and no read in flight.
    pub fn set_capacity(&mut self, slots: usize, change: &mut CapacityChange) {
        assert!((1..=self.shape.slots).contains(&slots), "the memory holds {} slots per pool", self.shape.slots);
        change.clear();
        let before = std::mem::replace(&mut self.capacity, slots);
        if slots == before {
            return;
        }
        self.policies.resize(slots);
        for pool in 0..self.pools.len() {
            for _ in before..slots {
                let slot = self.pools[pool].retired.pop().expect("a pool has the slots of its shape");
                self.pools[pool].free.push(slot);
                change.added.push(slot as usize);
            }
            for _ in slots..before {
                // The one that would be used last comes first.
                let free = &mut self.pools[pool].free;
                let free = (!free.is_empty()).then(|| free.remove(0));
                let slot = free.or_else(|| self.evict(self.row_of_pool(pool), &mut change.evicted));
                let slot = slot.expect("an expert that is neither wanted nor in flight can be evicted");
                self.pools[pool].retired.push(slot);
                change.removed.push(slot as usize);
            }
        }
    }

    /// The slots that are not in use, because the capacity is below the shape's.
    pub fn unused_slots(&self) -> impl Iterator<Item = SlotIndex> + '_ {
        self.pools.iter().flat_map(|pool| &pool.retired).map(|slot| *slot as usize)
    }

    /// A row whose experts are in a pool.
    fn row_of_pool(&self, pool: usize) -> MoeRow {
        self.shape.expert(pool, Key(0)).row
    }

    /// The counts so far.
    pub fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// Whether an expert is resident.
    pub fn is_resident(&self, expert: ExpertKey) -> bool {
        self.presence(expert) == Presence::Resident
    }

    /// Whether an expert is neither resident nor in flight.
    pub fn is_absent(&self, expert: ExpertKey) -> bool {
        self.presence(expert) == Presence::Absent
    }

    /// Free slots of a row's pool: never used, or left by a failed read.
    pub fn free_slots(&self, row: MoeRow) -> usize {
        self.pools[self.shape.pool(row)].free.len()
    }

    /// The slot that an expert is being read into, if it is in flight.
    pub fn in_flight(&self, expert: ExpertKey) -> Option<SlotIndex> {
        match self.entries[self.index(expert)].state {
            State::Reading(slot) | State::Prefetching(slot) => Some(slot as usize),
            State::Absent | State::Resident(_) => None,
        }
    }

    /// Replaces the eviction policies. The new ones are told of the residents in the order in which the old ones would
    /// have evicted them.
    ///
    /// The caller guarantees one policy for each pool, and that no visit is open.
    pub fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.policies.replace(policies);
    }

    /// A new sequence begins, unrelated to the one before.
    pub fn new_sequence(&mut self) {
        self.policies.new_sequence();
    }

    /// A layer has chosen. Called before the visit for these experts opens.
    pub fn begin(&mut self, choice: &LayerChoice) {
        self.policies.begin(choice);
    }

    /// A whole visit whose reads complete at once, as in a replay.
    pub fn replay_visit(&mut self, choice: &LayerChoice, assignment: &mut SlotAssignment) {
        let row = choice.row;
        self.begin(choice);
        self.open(row, choice.wanted, assignment);
        assignment.reads_into_slots().for_each(|(expert, _)| self.arrived(row.expert(expert)));
        self.close(row, assignment);
    }

    /// Opens a visit: pins all of `wanted` (distinct, in order of last use), assigns slots to the absent ones, and
    /// writes this to `assignment`. The policy is told in this order.
    ///
    /// A miss gets a free slot, else a scratch slot, else that of a victim. If all other experts of the pool are wanted
    /// too, the policy names the victim among those of `wanted` that came before the miss, and the miss itself: one
    /// that has a slot gives it up after it has been used, one that would have been read passes through a slot of the
    /// caller's.
    ///
    /// The caller guarantees that no visit is open, reports each miss that has a slot and each expert in flight by
    /// [`arrived`](Self::arrived) or [`failed`](Self::failed), and then closes the visit. It uses a hit before it reads
    /// another expert into its slot.
    pub fn open(&mut self, row: MoeRow, wanted: &[usize], assignment: &mut SlotAssignment) {
        assignment.clear();
        let first = row.index() * self.shape.experts;
        for expert in wanted {
            self.entries[first + expert].pinned = true;
        }
        for &expert in wanted {
            match self.entries[first + expert].state {
                State::Resident(slot) => {
                    self.counts.hits += 1;
                    self.touch(row.expert(expert));
                    assignment.hits.push((expert, slot as usize));
                }
                State::Reading(slot) | State::Prefetching(slot) => {
                    self.counts.in_flight_hits += 1;
                    self.touch(row.expert(expert));
                    assignment.in_flight.push((expert, slot as usize));
                }
                State::Absent => self.assign_miss(row.expert(expert), assignment),
            }
            self.entries[first + expert].placed = true;
        }
    }

    /// Where these experts are, written to `assignment` as by a visit in which absent experts get no slot. Policies and
    /// counts do not know of it. The caller guarantees that no visit is open, that none is opened before the experts
    /// have been used, and reports each expert in flight.
    pub fn look_up(&self, row: MoeRow, wanted: &[usize], assignment: &mut SlotAssignment) {
        assignment.clear();
        for &expert in wanted {
            match self.entries[self.index(row.expert(expert))].state {
                State::Resident(slot) => assignment.hits.push((expert, slot as usize)),
                State::Reading(slot) | State::Prefetching(slot) => assignment.in_flight.push((expert, slot as usize)),
                State::Absent => assignment.misses.push((expert, None)),
            }
        }
    }

    /// A slot to prefetch an absent expert into, if there is one and the open visit does not want the expert, which
    /// reads it itself. The caller reports the read like a miss.
    pub fn prefetch(&mut self, expert: ExpertKey) -> Option<SlotIndex> {
        if !self.is_absent(expert) || self.entries[self.index(expert)].pinned {
            return None;
        }
        let slot = self.find_slot(expert.row, false, &mut Vec::new())?;
        self.counts.prefetches += 1;
        self.admit(expert, State::Prefetching(slot));
        let index = self.index(expert);
        self.entries[index].unused_prefetch = true;
        Some(slot as usize)
    }

    /// Ranks these experts, as far as they have slots, as if they had come in this order. The caller guarantees that no
    /// visit is open.
    pub fn readmit(&mut self, experts: impl Iterator<Item = ExpertKey>) {
        for expert in experts {
            if !self.is_absent(expert) {
                self.policies.forget(expert);
                self.policies.admit(expert);
            }
        }
    }

    /// A read has succeeded: the expert is resident.
    pub fn arrived(&mut self, expert: ExpertKey) {
        let slot = self.end_read(expert);
        let index = self.index(expert);
        self.entries[index].state = State::Resident(slot);
    }

    /// A read has failed: the slot is free again.
    pub fn failed(&mut self, expert: ExpertKey) {
        let slot = self.end_read(expert);
        let index = self.index(expert);
        let entry = &mut self.entries[index];
        (entry.state, entry.pinned, entry.unused_prefetch) = (State::Absent, false, false);
        self.policies.forget(expert);
        let pool = &mut self.pools[self.shape.pool(expert.row)];
        if pool.borrowed_scratch > 0 {
            pool.borrowed_scratch -= 1;
            self.scratch.push(slot);
        } else {
            pool.free.push(slot);
        }
    }

    /// Closes a visit: unpins its experts. For each scratch slot that it took, an expert is evicted, possibly its own.
    pub fn close(&mut self, row: MoeRow, assignment: &mut SlotAssignment) {
        let first = row.index() * self.shape.experts;
        for expert in assignment.experts() {
            let entry = &mut self.entries[first + expert];
            (entry.pinned, entry.placed) = (false, false);
        }
        let pool = self.shape.pool(row);
        while self.pools[pool].borrowed_scratch > 0 {
            let slot = self.evict(row, &mut assignment.evicted).expect("prefetches never take scratch slots");
            self.pools[pool].borrowed_scratch -= 1;
            self.scratch.push(slot);
        }
    }

    /// Finds a slot for an absent expert that is wanted, or decides that it passes through.
    fn assign_miss(&mut self, expert: ExpertKey, assignment: &mut SlotAssignment) {
        self.counts.misses += 1;
        let index = self.index(expert);
        self.counts.rereads += u64::from(std::mem::replace(&mut self.entries[index].seen, true));
        let slot = match self.find_slot(expert.row, true, &mut assignment.evicted) {
            Some(slot) => {
                self.admit(expert, State::Reading(slot));
                Some(slot)
            }
            None => self.displace(expert, assignment),
        };
        assignment.misses.push((expert.expert.index(), slot.map(|slot| slot as usize)));
    }

    /// Gives a wanted expert the slot of one that was wanted before it, as the policy decides; `None` if it keeps none
    /// itself.
    fn displace(&mut self, expert: ExpertKey, assignment: &mut SlotAssignment) -> Option<u32> {
        self.policies.admit(expert);
        let (entries, experts) = (&self.entries, self.shape.experts);
        let may_go = |key: ExpertKey| {
            let entry = &entries[key.index(experts)];
            key == expert || (entry.placed && matches!(entry.state, State::Resident(_) | State::Reading(_)))
        };
        let victim = self.policies.victim(expert.row, may_go).expect("the expert itself may go");
        self.policies.forget(victim);
        if victim == expert {
            return None;
        }
        let index = self.index(victim);
        let slot = match self.entries[index].state {
            State::Resident(slot) => {
                self.counts.evictions += 1;
                assignment.evicted.push(victim);
                slot
            }
            State::Reading(slot) => {
                assignment.pass_through(victim.expert.index());
                slot
            }
            State::Absent | State::Prefetching(_) => unreachable!("such an expert may not go"),
        };
        let entry = &mut self.entries[index];
        (entry.state, entry.unused_prefetch) = (State::Absent, false);
        let index = self.index(expert);
        self.entries[index].state = State::Reading(slot);
        Some(slot)
    }

    fn admit(&mut self, expert: ExpertKey, state: State) {
        let index = self.index(expert);
        self.entries[index].state = state;
        self.entries[index].seen = true;
        self.policies.admit(expert);
    }

    fn touch(&mut self, expert: ExpertKey) {
        let index = self.index(expert);
        self.counts.useful_prefetches += u64::from(std::mem::take(&mut self.entries[index].unused_prefetch));
        self.policies.touch(expert);
    }

    /// Ends a read and returns its slot.
    fn end_read(&mut self, expert: ExpertKey) -> u32 {
        match self.entries[self.index(expert)].state {
            State::Reading(slot) | State::Prefetching(slot) => slot,
            State::Absent | State::Resident(_) => unreachable!("only an expert in flight can be reported"),
        }
    }

    /// A free slot, else a scratch slot if allowed, else that of a victim; `None` if no expert is evictable.
    fn find_slot(&mut self, row: MoeRow, scratch: bool, evicted: &mut Vec<ExpertKey>) -> Option<u32> {
        let pool = &mut self.pools[self.shape.pool(row)];
        if let Some(slot) = pool.free.pop() {
            return Some(slot);
        }
        if scratch && let Some(slot) = self.scratch.pop() {
            pool.borrowed_scratch += 1;
            return Some(slot);
        }
        self.evict(row, evicted)
    }

    /// Evicts an expert of the row's pool and returns its slot; `None` if no expert is evictable.
    fn evict(&mut self, row: MoeRow, evicted: &mut Vec<ExpertKey>) -> Option<u32> {
        let (entries, experts) = (&self.entries, self.shape.experts);
        let evictable = |expert: ExpertKey| {
            let entry = &entries[expert.index(experts)];
            !entry.pinned && matches!(entry.state, State::Resident(_))
        };
        let expert = self.policies.victim(row, evictable)?;
        let index = self.index(expert);
        let entry = &mut self.entries[index];
        let State::Resident(slot) = entry.state else {
            unreachable!("only residents are evictable");
        };
        (entry.state, entry.unused_prefetch) = (State::Absent, false);
        self.policies.forget(expert);
        evicted.push(expert);
        self.counts.evictions += 1;
        Some(slot)
    }

    fn index(&self, expert: ExpertKey) -> usize {
        expert.index(self.shape.experts)
    }
}

impl Residency for Ledger {
    fn presence(&self, expert: ExpertKey) -> Presence {
        match self.entries[self.index(expert)].state {
            State::Absent => Presence::Absent,
            State::Reading(_) | State::Prefetching(_) => Presence::InFlight,
            State::Resident(_) => Presence::Resident,
        }
    }
}

#[cfg(test)]
mod tests;
