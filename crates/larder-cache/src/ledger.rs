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
    /// Experts that were wanted while they were being read on a guess: neither hits nor misses.
    pub awaited: u64,
    /// Experts read on a guess.
    pub guesses: u64,
    /// Guesses that were wanted before they left again.
    pub useful: u64,
}

impl Counts {
    /// Experts that were wanted.
    pub fn wanted(&self) -> u64 {
        self.hits + self.awaited + self.misses
    }
}

impl std::ops::Add for Counts {
    type Output = Counts;

    fn add(self, other: Counts) -> Counts {
        Counts {
            hits: self.hits + other.hits,
            misses: self.misses + other.misses,
            evictions: self.evictions + other.evictions,
            rereads: self.rereads + other.rereads,
            awaited: self.awaited + other.awaited,
            guesses: self.guesses + other.guesses,
            useful: self.useful + other.useful,
        }
    }
}

impl std::ops::Sub for Counts {
    type Output = Counts;

    /// What happened between two looks.
    fn sub(self, then: Counts) -> Counts {
        Counts {
            hits: self.hits - then.hits,
            misses: self.misses - then.misses,
            evictions: self.evictions - then.evictions,
            rereads: self.rereads - then.rereads,
            awaited: self.awaited - then.awaited,
            guesses: self.guesses - then.guesses,
            useful: self.useful - then.useful,
        }
    }
}

/// A slot, counted over all pools.
pub type SlotIndex = usize;

/// Experts of one layer that can be in memory together.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Wave {
    /// Experts that are there, in the order wanted.
    pub hits: Vec<(usize, SlotIndex)>,
    /// Experts that are being read on a guess, in the order wanted.
    pub awaited: Vec<(usize, SlotIndex)>,
    /// Experts that have to be read, in the order wanted, into the slots they were given.
    pub misses: Vec<(usize, SlotIndex)>,
}

impl Wave {
    /// How many experts it covers.
    pub fn len(&self) -> usize {
        self.hits.len() + self.awaited.len() + self.misses.len()
    }

    /// Whether it covers this expert.
    pub fn covers(&self, expert: usize) -> bool {
        self.hits.iter().chain(&self.awaited).chain(&self.misses).any(|(e, _)| *e == expert)
    }

    /// Whether it covers none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Absent,
    /// Being read because it is wanted.
    InFlight(SlotIndex),
    /// Being read on a guess.
    Guessed(SlotIndex),
    Resident(SlotIndex),
}

struct Entry {
    state: State,
    pinned: bool,
    seen: bool,
    /// Read on a guess and not wanted since.
    guessed: bool,
}

struct Pool {
    policy: Box<dyn Eviction>,
    free: Vec<SlotIndex>,
    /// Slots that a guess is being read into.
    guessing: usize,
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
        let pool = |p: usize| Pool {
            policy: (policy.make)(keys),
            free: (p * slots..(p + 1) * slots).rev().collect(),
            guessing: 0,
        };
        let entry = || Entry { state: State::Absent, pinned: false, seen: false, guessed: false };
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

    /// Whether an expert is neither in memory nor being read.
    pub fn is_absent(&self, layer: usize, expert: usize) -> bool {
        self.entries[self.at(layer, expert)].state == State::Absent
    }

    /// The slot that an expert is being read into.
    pub fn in_flight(&self, layer: usize, expert: usize) -> Option<SlotIndex> {
        match self.entries[self.at(layer, expert)].state {
            State::InFlight(slot) | State::Guessed(slot) => Some(slot),
            State::Absent | State::Resident(_) => None,
        }
    }

    /// Pins as many of the first of `wanted` (distinct, in order of rank) as fit, giving slots to those that are not
    /// there. The policy hears of them in this order. Covers nobody only if guesses are being read into all slots.
    ///
    /// The caller guarantees that no wave is open, reports each miss and each awaited expert by
    /// [`arrived`](Self::arrived) or [`failed`](Self::failed), and then closes the wave.
    pub fn open(&mut self, layer: usize, wanted: &[usize]) -> Wave {
        let wanted = &wanted[..self.fitting(layer, wanted)];
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
                    self.use_again(at);
                    wave.hits.push((*expert, slot));
                }
                State::InFlight(slot) | State::Guessed(slot) => {
                    self.counts.awaited += 1;
                    self.use_again(at);
                    wave.awaited.push((*expert, slot));
                }
                State::Absent => {
                    let slot = self.make_room(layer).expect("the wave fits, so somebody is not pinned");
                    self.counts.misses += 1;
                    self.counts.rereads += u64::from(self.entries[at].seen);
                    self.admit(at, State::InFlight(slot));
                    wave.misses.push((*expert, slot));
                }
            }
        }
        wave
    }

    /// A slot to read an absent expert into before anybody wants it, if one can be had. The caller reports it like a
    /// miss.
    pub fn guess(&mut self, layer: usize, expert: usize) -> Option<SlotIndex> {
        if !self.is_absent(layer, expert) {
            return None;
        }
        let at = self.at(layer, expert);
        let slot = self.make_room(layer)?;
        self.counts.guesses += 1;
        self.admit(at, State::Guessed(slot));
        self.entries[at].guessed = true;
        let pool = self.pool(at);
        self.pools[pool].guessing += 1;
        Some(slot)
    }

    /// An expert has been read.
    pub fn arrived(&mut self, layer: usize, expert: usize) {
        let at = self.at(layer, expert);
        let slot = self.land(at);
        self.entries[at].state = State::Resident(slot);
    }

    /// An expert could not be read: its slot is free again.
    pub fn failed(&mut self, layer: usize, expert: usize) {
        let at = self.at(layer, expert);
        let slot = self.land(at);
        let entry = &mut self.entries[at];
        (entry.state, entry.pinned, entry.guessed) = (State::Absent, false, false);
        self.tell(at, |policy, key| policy.forget(key));
        let pool = self.pool(at);
        self.pools[pool].free.push(slot);
    }

    /// Lets the experts of a wave go.
    pub fn close(&mut self, layer: usize, wave: &Wave) {
        for (expert, _) in wave.hits.iter().chain(&wave.awaited).chain(&wave.misses) {
            let at = self.at(layer, *expert);
            self.entries[at].pinned = false;
        }
    }

    /// How many of the first of `wanted` can be there together, beside guesses that nobody of them wanted.
    fn fitting(&self, layer: usize, wanted: &[usize]) -> usize {
        let pool = &self.pools[self.pool(self.at(layer, 0))];
        let guessing = |expert: &usize| self.in_flight(layer, *expert).is_some();
        let fits = |n: &usize| {
            let others = pool.guessing - wanted[..*n].iter().filter(|e| guessing(e)).count();
            n + others <= self.capacity
        };
        (0..=wanted.len()).rev().find(fits).unwrap_or(0)
    }

    fn admit(&mut self, at: usize, state: State) {
        self.entries[at].state = state;
        self.entries[at].seen = true;
        self.tell(at, |policy, key| policy.admit(key));
    }

    fn use_again(&mut self, at: usize) {
        self.counts.useful += u64::from(std::mem::take(&mut self.entries[at].guessed));
        self.tell(at, |policy, key| policy.touch(key));
    }

    /// The slot of a read that is over.
    fn land(&mut self, at: usize) -> SlotIndex {
        match self.entries[at].state {
            State::InFlight(slot) => slot,
            State::Guessed(slot) => {
                let pool = self.pool(at);
                self.pools[pool].guessing -= 1;
                slot
            }
            State::Absent | State::Resident(_) => unreachable!("only what is being read can be reported"),
        }
    }

    /// A free slot, or that of an expert which leaves, if anybody can.
    fn make_room(&mut self, layer: usize) -> Option<SlotIndex> {
        let at = self.at(layer, 0);
        let pool = self.pool(at);
        if let Some(slot) = self.pools[pool].free.pop() {
            return Some(slot);
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
        let victim = self.pools[pool].policy.victim(&evictable)?;
        let out = global(victim);
        let State::Resident(slot) = self.entries[out].state else {
            unreachable!("only residents are evictable");
        };
        self.entries[out].state = State::Absent;
        self.entries[out].guessed = false;
        self.pools[pool].policy.forget(victim);
        self.counts.evictions += 1;
        Some(slot)
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
