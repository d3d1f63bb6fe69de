//! Which expert is in which slot. A state machine without bytes, files or clocks: the simulator runs the same one.

mod counts;
mod wave;

use larder_core::{CacheScope, Presence, Residency};
use larder_policy::eviction::{CacheShape, Eviction, Key, LayerChoice};

pub use counts::CacheCounts;
pub use wave::{SlotIndex, Wave};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    /// Being read because it is wanted.
    Reading(u32),
    /// Being read on a guess.
    Prefetching(u32),
    Resident(u32),
}

#[derive(Clone)]
struct Entry {
    state: State,
    pinned: bool,
    seen: bool,
    /// Read on a guess and not wanted since.
    unused_prefetch: bool,
}

struct Pool {
    policy: Box<dyn Eviction>,
    free: Vec<u32>,
    /// Scratch slots that it holds.
    borrowed_scratch: usize,
    /// Slots that a guess is being read into.
    prefetching: usize,
}

/// Every expert of every row, and the slots they share.
pub struct Ledger {
    shape: CacheShape,
    entries: Vec<Entry>,
    pools: Vec<Pool>,
    /// Scratch slots that no pool holds: all of them while no wave is open.
    scratch: Vec<u32>,
    counts: CacheCounts,
}

impl Ledger {
    /// The caller guarantees one policy for each pool of `shape`, and at least one slot.
    pub fn new(shape: &CacheShape, policies: Vec<Box<dyn Eviction>>) -> Self {
        assert_eq!(policies.len(), shape.pools(), "one policy per pool");
        assert!(shape.slots > 0, "a pool without slots");
        let descending = |from: usize, count: usize| (from as u32..(from + count) as u32).rev().collect();
        let pool = |(p, policy)| Pool {
            policy,
            free: descending(p * shape.slots, shape.slots),
            borrowed_scratch: 0,
            prefetching: 0,
        };
        let entry = Entry { state: State::Absent, pinned: false, seen: false, unused_prefetch: false };
        Ledger {
            shape: *shape,
            entries: vec![entry; shape.rows * shape.experts],
            pools: policies.into_iter().enumerate().map(pool).collect(),
            scratch: descending(shape.pools() * shape.slots, shape.scratch),
            counts: CacheCounts::default(),
        }
    }

    /// How many experts of one layer can be in memory together.
    pub fn capacity(&self) -> usize {
        self.shape.slots + self.shape.scratch
    }

    /// What it was made for.
    pub fn shape(&self) -> &CacheShape {
        &self.shape
    }

    /// What happened so far.
    pub fn counts(&self) -> CacheCounts {
        self.counts
    }

    /// Whether an expert is in memory.
    pub fn is_resident(&self, row: usize, expert: usize) -> bool {
        self.presence(row, expert) == Presence::Resident
    }

    /// Whether an expert is neither in memory nor being read.
    pub fn is_absent(&self, row: usize, expert: usize) -> bool {
        self.presence(row, expert) == Presence::Absent
    }

    /// Slots of a row's pool that nobody has ever needed, or that a failed read left.
    pub fn free_slots(&self, row: usize) -> usize {
        self.pools[self.shape.pool(row)].free.len()
    }

    /// The slot that an expert is being read into.
    pub fn in_flight(&self, row: usize, expert: usize) -> Option<SlotIndex> {
        match self.entries[self.index(row, expert)].state {
            State::Reading(slot) | State::Prefetching(slot) => Some(slot as usize),
            State::Absent | State::Resident(_) => None,
        }
    }

    /// Lets other policies say who leaves from now on. They hear of who is there in the order in which those before
    /// them would have let go.
    ///
    /// The caller guarantees one policy for each pool, and that no wave is open.
    pub fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        assert_eq!(policies.len(), self.pools.len(), "one policy per pool");
        for (pool, policy) in self.pools.iter_mut().zip(policies) {
            let mut old = std::mem::replace(&mut pool.policy, policy);
            while let Some(key) = old.victim(&|_| true) {
                old.forget(key);
                pool.policy.admit(key);
            }
        }
    }

    /// What comes has nothing to do with what was.
    pub fn new_sequence(&mut self) {
        self.pools.iter_mut().for_each(|pool| pool.policy.new_sequence());
    }

    /// A layer has chosen: `wanted` are distinct and in order of rank, `logits` are those of its one token or empty.
    /// Comes before the waves that bring them in.
    pub fn begin(&mut self, row: usize, wanted: &[usize], logits: &[f32]) {
        let pool = self.shape.pool(row);
        self.pools[pool].policy.begin(&LayerChoice { row, wanted, logits });
    }

    /// If not all of `wanted` fit together, those that are there go first, before others take their slots.
    pub fn residents_first(&self, row: usize, wanted: &mut [usize]) {
        if wanted.len() > self.capacity() {
            wanted.sort_by_key(|e| !self.is_resident(row, *e));
        }
    }

    /// Pins as many of the first of `wanted` (distinct, in order of rank) as fit, giving slots to those that are not
    /// there, and writes them to `wave`. The policy hears of them in this order. Covers nobody only if guesses are
    /// being read into all slots.
    ///
    /// A miss gets a free slot, else a scratch slot, else that of an expert which leaves.
    ///
    /// The caller guarantees that no wave is open, reports each miss and each awaited expert by
    /// [`arrived`](Self::arrived) or [`failed`](Self::failed), and then closes the wave.
    pub fn open(&mut self, row: usize, wanted: &[usize], wave: &mut Wave) {
        wave.clear();
        let wanted = &wanted[..self.fitting(row, wanted)];
        let first = self.index(row, 0);
        for expert in wanted {
            self.entries[first + expert].pinned = true;
        }
        for &expert in wanted {
            match self.entries[first + expert].state {
                State::Resident(slot) => {
                    self.counts.hits += 1;
                    self.touch(row, expert);
                    wave.hits.push((expert, slot as usize));
                }
                State::Reading(slot) | State::Prefetching(slot) => {
                    self.counts.in_flight_hits += 1;
                    self.touch(row, expert);
                    wave.in_flight.push((expert, slot as usize));
                }
                State::Absent => {
                    let slot = self.find_slot(row, true, &mut wave.evicted);
                    let slot = slot.expect("the wave fits, so somebody is not pinned");
                    self.counts.misses += 1;
                    self.counts.rereads += u64::from(self.entries[first + expert].seen);
                    self.admit(row, expert, State::Reading(slot));
                    wave.misses.push((expert, slot as usize));
                }
            }
        }
    }

    /// A slot to read an absent expert into before anybody wants it, if one can be had. The caller reports it like a
    /// miss.
    pub fn prefetch(&mut self, row: usize, expert: usize) -> Option<SlotIndex> {
        if !self.is_absent(row, expert) {
            return None;
        }
        let slot = self.find_slot(row, false, &mut Vec::new())?;
        self.counts.prefetches += 1;
        self.admit(row, expert, State::Prefetching(slot));
        let index = self.index(row, expert);
        self.entries[index].unused_prefetch = true;
        self.pools[self.shape.pool(row)].prefetching += 1;
        Some(slot as usize)
    }

    /// An expert has been read.
    pub fn arrived(&mut self, row: usize, expert: usize) {
        let slot = self.end_read(row, expert);
        let index = self.index(row, expert);
        self.entries[index].state = State::Resident(slot);
    }

    /// An expert could not be read: its slot is free again.
    pub fn failed(&mut self, row: usize, expert: usize) {
        let slot = self.end_read(row, expert);
        let index = self.index(row, expert);
        let entry = &mut self.entries[index];
        (entry.state, entry.pinned, entry.unused_prefetch) = (State::Absent, false, false);
        let key = self.shape.key(row, expert);
        let pool = &mut self.pools[self.shape.pool(row)];
        pool.policy.forget(key);
        if pool.borrowed_scratch > 0 {
            pool.borrowed_scratch -= 1;
            self.scratch.push(slot);
        } else {
            pool.free.push(slot);
        }
    }

    /// Lets the experts of a wave go. If it took scratch slots, as many experts leave, which may be its own.
    pub fn close(&mut self, row: usize, wave: &mut Wave) {
        let first = self.index(row, 0);
        for expert in wave.experts() {
            self.entries[first + expert].pinned = false;
        }
        let pool = self.shape.pool(row);
        while self.pools[pool].borrowed_scratch > 0 {
            let slot = self.evict(row, &mut wave.evicted).expect("guesses never take scratch slots");
            self.pools[pool].borrowed_scratch -= 1;
            self.scratch.push(slot);
        }
    }

    /// How many of the first of `wanted` can be there together, beside guesses that nobody of them wanted.
    fn fitting(&self, row: usize, wanted: &[usize]) -> usize {
        let prefetching = self.pools[self.shape.pool(row)].prefetching;
        if prefetching == 0 {
            return wanted.len().min(self.capacity());
        }
        let mut others = prefetching;
        let mut fits = 0;
        for (i, expert) in wanted.iter().enumerate() {
            others -= usize::from(self.in_flight(row, *expert).is_some());
            if i + 1 + others <= self.capacity() {
                fits = i + 1;
            }
        }
        fits
    }

    fn admit(&mut self, row: usize, expert: usize, state: State) {
        let index = self.index(row, expert);
        self.entries[index].state = state;
        self.entries[index].seen = true;
        self.pools[self.shape.pool(row)].policy.admit(self.shape.key(row, expert));
    }

    fn touch(&mut self, row: usize, expert: usize) {
        let index = self.index(row, expert);
        self.counts.useful_prefetches += u64::from(std::mem::take(&mut self.entries[index].unused_prefetch));
        self.pools[self.shape.pool(row)].policy.touch(self.shape.key(row, expert));
    }

    /// The slot of a read that is over.
    fn end_read(&mut self, row: usize, expert: usize) -> u32 {
        match self.entries[self.index(row, expert)].state {
            State::Reading(slot) => slot,
            State::Prefetching(slot) => {
                self.pools[self.shape.pool(row)].prefetching -= 1;
                slot
            }
            State::Absent | State::Resident(_) => unreachable!("only what is being read can be reported"),
        }
    }

    /// A free slot, or that of an expert which leaves, if anybody can.
    fn find_slot(&mut self, row: usize, scratch: bool, evicted: &mut Vec<(usize, usize)>) -> Option<u32> {
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

    /// The slot of an expert of the row's pool that leaves, if anybody can.
    fn evict(&mut self, row: usize, evicted: &mut Vec<(usize, usize)>) -> Option<u32> {
        let entries = &mut self.entries;
        let first = match self.shape.scope {
            CacheScope::Layer => row * self.shape.experts,
            CacheScope::Global => 0,
        };
        let evictable = |key: Key| {
            let entry = &entries[first + key.index()];
            !entry.pinned && matches!(entry.state, State::Resident(_))
        };
        let pool = self.shape.pool(row);
        let policy = &mut self.pools[pool].policy;
        let victim = policy.victim(&evictable)?;
        let entry = &mut entries[first + victim.index()];
        let State::Resident(slot) = entry.state else {
            unreachable!("only residents are evictable");
        };
        (entry.state, entry.unused_prefetch) = (State::Absent, false);
        policy.forget(victim);
        evicted.push(self.shape.row_and_expert(pool, victim));
        self.counts.evictions += 1;
        Some(slot)
    }

    fn index(&self, row: usize, expert: usize) -> usize {
        row * self.shape.experts + expert
    }
}

impl Residency for Ledger {
    fn presence(&self, row: usize, expert: usize) -> Presence {
        match self.entries[self.index(row, expert)].state {
            State::Absent => Presence::Absent,
            State::Reading(_) | State::Prefetching(_) => Presence::InFlight,
            State::Resident(_) => Presence::Resident,
        }
    }
}

#[cfg(test)]
mod tests;
