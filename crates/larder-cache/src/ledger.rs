//! Which expert is in which slot. A state machine without bytes, files or clocks: the simulator runs the same one.

mod counts;
mod wave;

use larder_core::{CacheScope, Presence, Residency};
use larder_policy::eviction::{Eviction, Key, Setting, Step};

pub use counts::Counts;
pub use wave::{SlotIndex, Wave};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    /// Being read because it is wanted.
    InFlight(u32),
    /// Being read on a guess.
    Guessed(u32),
    Resident(u32),
}

#[derive(Clone)]
struct Entry {
    state: State,
    pinned: bool,
    seen: bool,
    /// Read on a guess and not wanted since.
    guessed: bool,
}

struct Pool {
    policy: Box<dyn Eviction>,
    free: Vec<u32>,
    /// Scratch slots that it holds.
    borrowed: usize,
    /// Slots that a guess is being read into.
    guessing: usize,
}

/// Every expert of every row, and the slots they share.
pub struct Ledger {
    setting: Setting,
    entries: Vec<Entry>,
    pools: Vec<Pool>,
    /// Scratch slots that no pool holds: all of them while no wave is open.
    scratch: Vec<u32>,
    counts: Counts,
}

impl Ledger {
    /// The caller guarantees one policy for each pool of `setting`, and at least one slot.
    pub fn new(setting: &Setting, policies: Vec<Box<dyn Eviction>>) -> Self {
        assert_eq!(policies.len(), setting.pools(), "one policy per pool");
        assert!(setting.slots > 0, "a pool without slots");
        let descending = |from: usize, count: usize| (from as u32..(from + count) as u32).rev().collect();
        let pool =
            |(p, policy)| Pool { policy, free: descending(p * setting.slots, setting.slots), borrowed: 0, guessing: 0 };
        let entry = Entry { state: State::Absent, pinned: false, seen: false, guessed: false };
        Ledger {
            setting: *setting,
            entries: vec![entry; setting.rows * setting.experts],
            pools: policies.into_iter().enumerate().map(pool).collect(),
            scratch: descending(setting.pools() * setting.slots, setting.scratch),
            counts: Counts::default(),
        }
    }

    /// How many experts of one layer can be in memory together.
    pub fn capacity(&self) -> usize {
        self.setting.slots + self.setting.scratch
    }

    /// What it was made for.
    pub fn setting(&self) -> &Setting {
        &self.setting
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
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
        self.pools[self.setting.pool(row)].free.len()
    }

    /// The slot that an expert is being read into.
    pub fn in_flight(&self, row: usize, expert: usize) -> Option<SlotIndex> {
        match self.entries[self.at(row, expert)].state {
            State::InFlight(slot) | State::Guessed(slot) => Some(slot as usize),
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
        let pool = self.setting.pool(row);
        self.pools[pool].policy.begin(&Step { row, wanted, logits });
    }

    /// If not all of `wanted` fit together, those that are there go first, before others take their slots.
    pub fn put_in_order(&self, row: usize, wanted: &mut [usize]) {
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
        let first = self.at(row, 0);
        for expert in wanted {
            self.entries[first + expert].pinned = true;
        }
        for &expert in wanted {
            match self.entries[first + expert].state {
                State::Resident(slot) => {
                    self.counts.hits += 1;
                    self.use_again(row, expert);
                    wave.hits.push((expert, slot as usize));
                }
                State::InFlight(slot) | State::Guessed(slot) => {
                    self.counts.awaited += 1;
                    self.use_again(row, expert);
                    wave.awaited.push((expert, slot as usize));
                }
                State::Absent => {
                    let slot = self.make_room(row, true, &mut wave.evicted);
                    let slot = slot.expect("the wave fits, so somebody is not pinned");
                    self.counts.misses += 1;
                    self.counts.rereads += u64::from(self.entries[first + expert].seen);
                    self.admit(row, expert, State::InFlight(slot));
                    wave.misses.push((expert, slot as usize));
                }
            }
        }
    }

    /// A slot to read an absent expert into before anybody wants it, if one can be had. The caller reports it like a
    /// miss.
    pub fn guess(&mut self, row: usize, expert: usize) -> Option<SlotIndex> {
        if !self.is_absent(row, expert) {
            return None;
        }
        let slot = self.make_room(row, false, &mut Vec::new())?;
        self.counts.guesses += 1;
        self.admit(row, expert, State::Guessed(slot));
        let at = self.at(row, expert);
        self.entries[at].guessed = true;
        self.pools[self.setting.pool(row)].guessing += 1;
        Some(slot as usize)
    }

    /// An expert has been read.
    pub fn arrived(&mut self, row: usize, expert: usize) {
        let slot = self.land(row, expert);
        let at = self.at(row, expert);
        self.entries[at].state = State::Resident(slot);
    }

    /// An expert could not be read: its slot is free again.
    pub fn failed(&mut self, row: usize, expert: usize) {
        let slot = self.land(row, expert);
        let at = self.at(row, expert);
        let entry = &mut self.entries[at];
        (entry.state, entry.pinned, entry.guessed) = (State::Absent, false, false);
        let key = self.setting.key(row, expert);
        let pool = &mut self.pools[self.setting.pool(row)];
        pool.policy.forget(key);
        if pool.borrowed > 0 {
            pool.borrowed -= 1;
            self.scratch.push(slot);
        } else {
            pool.free.push(slot);
        }
    }

    /// Lets the experts of a wave go. If it took scratch slots, as many experts leave, which may be its own.
    pub fn close(&mut self, row: usize, wave: &mut Wave) {
        let first = self.at(row, 0);
        for expert in wave.experts() {
            self.entries[first + expert].pinned = false;
        }
        let pool = self.setting.pool(row);
        while self.pools[pool].borrowed > 0 {
            let slot = self.evict(row, &mut wave.evicted).expect("guesses never take scratch slots");
            self.pools[pool].borrowed -= 1;
            self.scratch.push(slot);
        }
    }

    /// How many of the first of `wanted` can be there together, beside guesses that nobody of them wanted.
    fn fitting(&self, row: usize, wanted: &[usize]) -> usize {
        let guessing = self.pools[self.setting.pool(row)].guessing;
        if guessing == 0 {
            return wanted.len().min(self.capacity());
        }
        let mut others = guessing;
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
        let at = self.at(row, expert);
        self.entries[at].state = state;
        self.entries[at].seen = true;
        self.pools[self.setting.pool(row)].policy.admit(self.setting.key(row, expert));
    }

    fn use_again(&mut self, row: usize, expert: usize) {
        let at = self.at(row, expert);
        self.counts.useful += u64::from(std::mem::take(&mut self.entries[at].guessed));
        self.pools[self.setting.pool(row)].policy.touch(self.setting.key(row, expert));
    }

    /// The slot of a read that is over.
    fn land(&mut self, row: usize, expert: usize) -> u32 {
        match self.entries[self.at(row, expert)].state {
            State::InFlight(slot) => slot,
            State::Guessed(slot) => {
                self.pools[self.setting.pool(row)].guessing -= 1;
                slot
            }
            State::Absent | State::Resident(_) => unreachable!("only what is being read can be reported"),
        }
    }

    /// A free slot, or that of an expert which leaves, if anybody can.
    fn make_room(&mut self, row: usize, scratch: bool, evicted: &mut Vec<(usize, usize)>) -> Option<u32> {
        let pool = &mut self.pools[self.setting.pool(row)];
        if let Some(slot) = pool.free.pop() {
            return Some(slot);
        }
        if scratch && let Some(slot) = self.scratch.pop() {
            pool.borrowed += 1;
            return Some(slot);
        }
        self.evict(row, evicted)
    }

    /// The slot of an expert of the row's pool that leaves, if anybody can.
    fn evict(&mut self, row: usize, evicted: &mut Vec<(usize, usize)>) -> Option<u32> {
        let entries = &mut self.entries;
        let first = match self.setting.scope {
            CacheScope::Layer => row * self.setting.experts,
            CacheScope::Global => 0,
        };
        let evictable = |key: Key| {
            let entry = &entries[first + key.index()];
            !entry.pinned && matches!(entry.state, State::Resident(_))
        };
        let pool = self.setting.pool(row);
        let policy = &mut self.pools[pool].policy;
        let victim = policy.victim(&evictable)?;
        let entry = &mut entries[first + victim.index()];
        let State::Resident(slot) = entry.state else {
            unreachable!("only residents are evictable");
        };
        (entry.state, entry.guessed) = (State::Absent, false);
        policy.forget(victim);
        evicted.push(self.setting.at(pool, victim));
        self.counts.evictions += 1;
        Some(slot)
    }

    fn at(&self, row: usize, expert: usize) -> usize {
        row * self.setting.experts + expert
    }
}

impl Residency for Ledger {
    fn presence(&self, row: usize, expert: usize) -> Presence {
        match self.entries[self.at(row, expert)].state {
            State::Absent => Presence::Absent,
            State::InFlight(_) | State::Guessed(_) => Presence::InFlight,
            State::Resident(_) => Presence::Resident,
        }
    }
}

#[cfg(test)]
mod tests;
