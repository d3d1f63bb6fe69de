//! Which expert is in which slot. A state machine without bytes, files or clocks: the simulator runs the same one.

use larder_policy::eviction::{Eviction, Key, Policy};

/// What shares one set of slots.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scope {
    /// The experts of one layer.
    Layer,
    /// All experts.
    Global,
}

/// What happened so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Counts {
    /// Experts that were in memory when they were wanted.
    pub hits: u64,
    /// Experts that had to be read.
    pub misses: u64,
    /// Experts that left to make room.
    pub evictions: u64,
    /// Misses of experts that had been in memory before.
    pub rereads: u64,
}

/// A slot, counted over all pools.
pub type SlotIndex = usize;

/// Experts of one layer that can be in memory together.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Wave {
    /// Experts that are there, in the order wanted.
    pub hits: Vec<(usize, SlotIndex)>,
    /// Experts that have to be read, in the order wanted, into the slots they were given.
    pub misses: Vec<(usize, SlotIndex)>,
}

impl Wave {
    /// How many experts it covers.
    pub fn len(&self) -> usize {
        self.hits.len() + self.misses.len()
    }

    /// Whether it covers none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    InFlight(SlotIndex),
    Resident(SlotIndex),
}

struct Entry {
    state: State,
    pinned: bool,
    seen: bool,
}

struct Pool {
    policy: Box<dyn Eviction>,
    free: Vec<SlotIndex>,
}

/// Experts of `layers` rows of `experts` each, and the slots they share.
pub struct Ledger {
    experts: usize,
    scope: Scope,
    capacity: usize,
    entries: Vec<Entry>,
    pools: Vec<Pool>,
    counts: Counts,
}

impl Ledger {
    /// `slots` per layer or, for [`Scope::Global`], in all. The caller guarantees at least one.
    pub fn new(layers: usize, experts: usize, slots: usize, scope: Scope, policy: &Policy) -> Self {
        let (pools, keys) = match scope {
            Scope::Layer => (layers, experts),
            Scope::Global => (1, layers * experts),
        };
        let pool = |p: usize| Pool { policy: (policy.make)(keys), free: (p * slots..(p + 1) * slots).rev().collect() };
        let entry = || Entry { state: State::Absent, pinned: false, seen: false };
        Ledger {
            experts,
            scope,
            capacity: slots,
            entries: (0..layers * experts).map(|_| entry()).collect(),
            pools: (0..pools).map(pool).collect(),
            counts: Counts::default(),
        }
    }

    /// How many experts of one layer can be in memory together.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// What happened so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Whether an expert is in memory.
    pub fn is_resident(&self, layer: usize, expert: usize) -> bool {
        matches!(self.entries[self.at(layer, expert)].state, State::Resident(_))
    }

    /// Pins as many of the first of `wanted` (distinct, in order of rank) as fit, giving slots to those that are not
    /// there. The policy hears of them in this order.
    ///
    /// The caller guarantees that no wave is open, and reports each miss by [`arrived`](Self::arrived) or
    /// [`failed`](Self::failed) and then closes the wave.
    pub fn open(&mut self, layer: usize, wanted: &[usize]) -> Wave {
        let wanted = &wanted[..wanted.len().min(self.capacity)];
        for expert in wanted {
            let at = self.at(layer, *expert);
            self.entries[at].pinned = true;
        }
        let mut wave = Wave::default();
        for expert in wanted {
            let at = self.at(layer, *expert);
            match self.entries[at].state {
                State::Resident(slot) => {
                    self.counts.hits += 1;
                    self.tell(at, |policy, key| policy.touch(key));
                    wave.hits.push((*expert, slot));
                }
                _ => {
                    let slot = self.make_room(layer);
                    self.counts.misses += 1;
                    self.counts.rereads += u64::from(self.entries[at].seen);
                    self.entries[at].state = State::InFlight(slot);
                    self.entries[at].seen = true;
                    self.tell(at, |policy, key| policy.admit(key));
                    wave.misses.push((*expert, slot));
                }
            }
        }
        wave
    }

    /// A miss has been read.
    pub fn arrived(&mut self, layer: usize, expert: usize) {
        let at = self.at(layer, expert);
        if let State::InFlight(slot) = self.entries[at].state {
            self.entries[at].state = State::Resident(slot);
        }
    }

    /// A miss could not be read: its slot is free again.
    pub fn failed(&mut self, layer: usize, expert: usize) {
        let at = self.at(layer, expert);
        if let State::InFlight(slot) = self.entries[at].state {
            self.entries[at].state = State::Absent;
            self.entries[at].pinned = false;
            self.tell(at, |policy, key| policy.forget(key));
            let pool = self.pool(at);
            self.pools[pool].free.push(slot);
        }
    }

    /// Lets the experts of a wave go.
    pub fn close(&mut self, layer: usize, wave: &Wave) {
        for (expert, _) in wave.hits.iter().chain(&wave.misses) {
            let at = self.at(layer, *expert);
            self.entries[at].pinned = false;
        }
    }

    /// A free slot, or that of an expert which leaves.
    fn make_room(&mut self, layer: usize) -> SlotIndex {
        let at = self.at(layer, 0);
        let pool = self.pool(at);
        if let Some(slot) = self.pools[pool].free.pop() {
            return slot;
        }
        let (entries, scope, experts) = (&self.entries, self.scope, self.experts);
        let global = |key: Key| match scope {
            Scope::Layer => layer * experts + key.index(),
            Scope::Global => key.index(),
        };
        let evictable = |key: Key| {
            let entry = &entries[global(key)];
            !entry.pinned && matches!(entry.state, State::Resident(_))
        };
        let victim = self.pools[pool].policy.victim(&evictable);
        let victim = victim.expect("a wave is no larger than its pool, so somebody is not pinned");
        let out = global(victim);
        let State::Resident(slot) = self.entries[out].state else {
            unreachable!("only residents are evictable");
        };
        self.entries[out].state = State::Absent;
        self.pools[pool].policy.forget(victim);
        self.counts.evictions += 1;
        slot
    }

    fn at(&self, layer: usize, expert: usize) -> usize {
        layer * self.experts + expert
    }

    fn pool(&self, at: usize) -> usize {
        match self.scope {
            Scope::Layer => at / self.experts,
            Scope::Global => 0,
        }
    }

    fn tell(&mut self, at: usize, what: impl FnOnce(&mut dyn Eviction, Key)) {
        let key = match self.scope {
            Scope::Layer => at % self.experts,
            Scope::Global => at,
        };
        let pool = self.pool(at);
        what(self.pools[pool].policy.as_mut(), Key(key as u32));
    }
}

#[cfg(test)]
mod tests;
