//! `--cache auto`: the number of slots in use follows the memory that is available.
//!
//! Capacity changes between steps alone. It never exceeds the ceiling of the printed plan, and never falls below what
//! one token uses. It falls at once when memory gets scarce, but not again for what was given back and is not reported
//! as free yet. It rises by half of what is free after memory has been free for a while, so that two programs that do
//! the same do not take turns.

mod control;

use std::time::{Duration, Instant};

use anyhow::Result;
use larder_core::LayerIdx;
use larder_engine::StreamingPath;
use larder_store::reader::{Arena, TouchPace};

use self::control::{CapacityControl, Sample};
use crate::machine::budget::{MemoryBudget, MemoryLease, MemoryUse};
use crate::plan::ElasticPlan;
use larder_os::{group, memory};

/// Time between looks at the memory. A look reads a few files of the kernel, some hundred microseconds.
const INTERVAL: Duration = Duration::from_millis(250);

/// Share of time in which tasks waited for memory, above which slots are given back even if some memory is left.
const PRESSURE_HIGH: f64 = 0.1;

/// When the memory is looked at.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum StepMoment {
    /// While no step is computed.
    Between,
    /// In a step, before the experts of this layer.
    Before(LayerIdx),
}

/// The slots of a cache whose number follows the available memory.
pub(crate) struct ElasticSlots {
    control: CapacityControl,
    plan: ElasticPlan,
    budget: MemoryBudget,
    /// Of the slots in use.
    lease: MemoryLease,
    arena: Arena,
    /// The layer that a step visits first.
    first: LayerIdx,
    started: Instant,
    next_look: Duration,
    limits_reached: u64,
    changes: CapacityChanges,
}

/// How the number of slots has changed so far.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct CapacityChanges {
    /// Slots of each pool in use: per layer or, in global scope, in total.
    pub slots: usize,
    /// The fewest so far.
    pub least: usize,
    /// The most so far.
    pub most: usize,
    /// How often slots were added.
    pub grown: u64,
    /// How often slots were given back.
    pub shrunk: u64,
}

impl CapacityChanges {
    /// As JSON.
    pub fn json(&self) -> serde_json::Value {
        let CapacityChanges { slots, least, most, grown, shrunk } = self;
        serde_json::json!({ "slots": slots, "least": least, "most": most, "grown": grown, "shrunk": shrunk })
    }
}

/// One line.
impl std::fmt::Display for CapacityChanges {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let CapacityChanges { slots, least, most, grown, shrunk } = self;
        write!(f, "slots: {slots}, from {least} to {most}; grown {grown} times, given back {shrunk} times")
    }
}

impl ElasticSlots {
    /// The slots of `path` in `arena`, of which as many are in use as `plan` begins with. Fails if the budget has not
    /// enough.
    pub fn new(
        plan: ElasticPlan,
        path: &mut StreamingPath,
        arena: Arena,
        first: LayerIdx,
        budget: &MemoryBudget,
    ) -> Result<Self> {
        let slots = plan.slots;
        path.set_capacity(slots);
        let in_use = path.memory_in_use();
        arena.use_huge_pages_if(|slot| in_use[slot]);
        Ok(ElasticSlots {
            control: CapacityControl::new(&plan),
            lease: budget.take(MemoryUse::Experts, plan.leased_bytes(slots, 0))?,
            plan,
            budget: budget.clone(),
            arena,
            first,
            started: Instant::now(),
            next_look: INTERVAL,
            limits_reached: group::limits_reached(),
            changes: CapacityChanges { slots, least: slots, most: slots, ..CapacityChanges::default() },
        })
    }

    /// How the number of slots has changed so far.
    pub fn changes(&self) -> CapacityChanges {
        self.changes
    }

    /// Looks at the memory if it is time to, between steps or before the layer that a step visits first, and changes
    /// the capacity of `path` if that is called for. Returns the number of slots if it has changed.
    pub fn follow(&mut self, moment: StepMoment, path: &mut StreamingPath) -> Option<usize> {
        let now = self.started.elapsed();
        if now < self.next_look || !matches!(moment, StepMoment::Between) && moment != StepMoment::Before(self.first) {
            return None;
        }
        self.next_look = now + INTERVAL;
        let sample = self.look()?;
        let before = self.control.slots;
        let slots = self.control.decide(now, sample)?;
        if slots > before {
            self.grow(before, slots, path)
        } else {
            self.shrink(slots, path)
        }
        let CapacityChanges { least, most, grown, shrunk, .. } = self.changes;
        let slots = self.control.slots;
        let (grown, shrunk) = (grown + u64::from(slots > before), shrunk + u64::from(slots < before));
        self.changes = CapacityChanges { slots, least: least.min(slots), most: most.max(slots), grown, shrunk };
        (slots != before).then_some(slots)
    }

    /// The memory as it is now. What is taken and not touched yet counts as used.
    fn look(&mut self) -> Option<Sample> {
        let (used, available) = (memory::current()?, memory::headroom()?);
        let (taken, reserve) = (self.budget.taken_bytes() as i64, self.plan.reserve as i64);
        // Memory that is taken and not touched yet is not available; memory of the process beyond its account is not
        // free.
        let headroom = (used as i64 - taken).min(0) + available - reserve;
        let limits_reached = group::limits_reached();
        let waits = || group::pressure().is_some_and(|share| share > PRESSURE_HIGH);
        // Less is left than shall stay unused, although the account is in order: something has grown that it does not
        // know.
        let at_limit = available < reserve && limits_reached > self.limits_reached;
        let waiting = available < reserve && waits();
        self.limits_reached = limits_reached;
        Some(Sample { headroom, at_limit, waiting })
    }

    fn grow(&mut self, before: usize, slots: usize, path: &mut StreamingPath) {
        // Which of the slots that kept their memory are used again is known afterwards.
        let most = self.plan.leased_bytes(slots, path.kept_bytes()).min(self.plan.leased_bytes(self.plan.most, 0));
        // Another program may have been faster.
        let Ok(more) = self.budget.take(MemoryUse::Experts, most.saturating_sub(self.lease.bytes())) else {
            self.control.slots = before;
            return;
        };
        self.lease.join(more);
        path.set_capacity(slots);
        self.lease.keep(self.plan.leased_bytes(slots, path.kept_bytes()));
        let in_use = path.memory_in_use();
        self.arena.use_huge_pages_if(|slot| in_use[slot]);
        // Pages that were touched before take no time.
        self.arena.touch_ahead_if(TouchPace::Background, |slot| in_use[slot]);
    }

    fn shrink(&mut self, slots: usize, path: &mut StreamingPath) {
        self.arena.stop_touching();
        path.set_capacity(slots);
        let in_use = path.memory_in_use();
        self.arena.use_huge_pages_if(|slot| in_use[slot]);
        self.lease.keep(self.plan.leased_bytes(slots, path.kept_bytes()));
    }
}

#[cfg(test)]
mod tests;
