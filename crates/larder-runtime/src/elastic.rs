//! `--cache-mem auto`: the number of slots in use follows the memory that is available.
//!
//! Capacity changes between steps alone. It never exceeds the ceiling of the printed plan, and never falls below what one token
//! uses. It falls at once when memory gets scarce, and rises by half of what is free after memory has been free for a while, so
//! that two programs that do the same do not take turns.

use std::time::{Duration, Instant};

use anyhow::Result;
use larder_core::LayerIdx;
use larder_engine::StreamingPath;
use larder_store::reader::Arena;

use crate::machine::budget::{MemoryBudget, MemoryLease, MemoryUse};
use crate::machine::{group, memory};
use crate::plan::ElasticPlan;

/// Time between looks at the memory. A look reads a few files of the kernel, some hundred microseconds.
const INTERVAL: Duration = Duration::from_millis(250);
/// Time that memory has to be free without a break before slots are added.
const FREE_FOR: Duration = Duration::from_secs(2);
/// Time after slots were given back in which none are added.
const REST: Duration = Duration::from_secs(10);
/// Share of time in which tasks waited for memory, above which slots are given back even if some memory is left.
const PRESSURE_HIGH: f64 = 0.1;
/// Of how many slots one is given back under pressure, each time.
const PRESSED_SHARE: usize = 16;

/// What a look at the memory finds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Bytes beyond what is taken and the reserve; negative if the reserve is touched.
    headroom: i64,
    /// Whether less than the reserve is left, and tasks wait for memory or a control group has reached its limit since the last
    /// look.
    pressed: bool,
}

/// Decides the number of slots. It reads no clock and no file.
struct CapacityControl {
    slots: usize,
    least: usize,
    most: usize,
    /// Bytes of one slot more in each pool.
    step_bytes: u64,
    /// Bytes that have to be free beyond the next slot, and are freed beyond what is missing.
    margin: u64,
    /// Since when enough memory is free for another slot.
    free_since: Option<Duration>,
    /// No slots are added before.
    rest_until: Duration,
}

impl CapacityControl {
    /// The number of slots from now on, if it changes.
    fn decide(&mut self, now: Duration, sample: Sample) -> Option<usize> {
        let Sample { headroom, pressed } = sample;
        let before = self.slots;
        let step = self.step_bytes.max(1);
        if headroom < 0 || pressed {
            let missing = headroom.min(0).unsigned_abs() + self.margin;
            let pressure = if pressed { before.div_ceil(PRESSED_SHARE) as u64 } else { 0 };
            let fewer = missing.div_ceil(step).max(pressure);
            self.slots =
                before.saturating_sub(usize::try_from(fewer).unwrap_or(usize::MAX)).max(self.least.min(before));
            self.free_since = None;
            if self.slots < before {
                self.rest_until = now + REST;
            }
        } else if (headroom as u64) < step + self.margin {
            self.free_since = None;
        } else if *self.free_since.get_or_insert(now) + FREE_FOR <= now && self.rest_until <= now {
            let more = ((headroom as u64 - self.margin) / step).div_ceil(2);
            self.slots = before.saturating_add(usize::try_from(more).unwrap_or(usize::MAX)).min(self.most.max(before));
            self.free_since = Some(now);
        }
        (self.slots != before).then_some(self.slots)
    }
}

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
    /// The slots of `plan` in `arena`, of which as many are in use as the plan begins with. Fails if the budget has not enough.
    pub fn new(plan: ElasticPlan, arena: Arena, first: LayerIdx, budget: &MemoryBudget) -> Result<Self> {
        let ElasticPlan { slots, least, most, reserve, .. } = plan;
        Ok(ElasticSlots {
            control: CapacityControl {
                slots,
                least,
                most,
                step_bytes: plan.slot_bytes,
                margin: reserve / 4,
                free_since: None,
                rest_until: Duration::ZERO,
            },
            lease: budget.take(MemoryUse::Experts, plan.bytes_of(slots) + plan.scratch_bytes)?,
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

    /// Looks at the memory if it is time to, between steps or before the layer that a step visits first, and changes the capacity
    /// of `path` if that is called for. Returns the number of slots if it has changed.
    pub fn follow(&mut self, moment: StepMoment, path: &mut StreamingPath) -> Option<usize> {
        let now = self.started.elapsed();
        if now < self.next_look || !matches!(moment, StepMoment::Between) && moment != StepMoment::Before(self.first) {
            return None;
        }
        self.next_look = now + INTERVAL;
        let sample = self.look()?;
        let before = self.control.slots;
        let slots = self.control.decide(now, sample)?;
        match slots > before {
            true => self.grow(before, slots, path),
            false => self.shrink(slots, path),
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
        // Memory that is taken and not touched yet is not available; memory of the process beyond its account is not free.
        let headroom = (used as i64 - taken).min(0) + available - reserve;
        let limits_reached = group::limits_reached();
        let waits = || group::pressure().is_some_and(|share| share > PRESSURE_HIGH);
        // Less is left than shall stay unused, although the account is in order: something has grown that it does not know.
        let pressed = available < reserve && (limits_reached > self.limits_reached || waits());
        self.limits_reached = limits_reached;
        Some(Sample { headroom, pressed })
    }

    fn grow(&mut self, before: usize, slots: usize, path: &mut StreamingPath) {
        let more = self.plan.bytes_of(slots) - self.plan.bytes_of(before);
        // Another program may have been faster.
        let Ok(more) = self.budget.take(MemoryUse::Experts, more) else {
            self.control.slots = before;
            return;
        };
        self.lease.join(more);
        path.set_capacity(slots);
    }

    fn shrink(&mut self, slots: usize, path: &mut StreamingPath) {
        self.arena.stop_touching();
        path.set_capacity(slots);
        self.lease.keep(self.plan.bytes_of(slots) + self.plan.scratch_bytes);
    }
}

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::*;

    const MEGA: u64 = 1 << 20;

    fn control(slots: usize) -> CapacityControl {
        let (free_since, rest_until) = (None, Duration::ZERO);
        CapacityControl { slots, least: 8, most: 64, step_bytes: 10 * MEGA, margin: 16 * MEGA, free_since, rest_until }
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn mega(headroom: i64) -> Sample {
        Sample { headroom: headroom * MEGA as i64, pressed: false }
    }

    #[test]
    fn scarce_memory_is_given_back_at_once_and_not_below_the_floor() {
        let mut control = control(32);
        assert_eq!(control.decide(seconds(1.0), mega(0)), None);
        assert_eq!(control.decide(seconds(2.0), mega(-1)), Some(30), "17 MB are two slots");
        assert_eq!(control.decide(seconds(2.25), mega(-100)), Some(18));
        assert_eq!(control.decide(seconds(2.5), mega(-1000)), Some(8));
        assert_eq!(control.decide(seconds(2.75), mega(-1000)), None);
        assert_eq!(control.rest_until, seconds(12.5), "nothing was given back by the last look");
        assert_eq!(control.decide(seconds(2.75), Sample { headroom: i64::MIN, pressed: true }), None);
    }

    #[test]
    fn pressure_takes_a_share() {
        let pressed = Sample { headroom: 0, pressed: true };
        assert_eq!(control(64).decide(seconds(1.0), pressed), Some(60));
        assert_eq!(control(10).decide(seconds(1.0), pressed), Some(8));
    }

    #[test]
    fn slots_are_added_by_halves_after_memory_was_free_for_a_while() {
        let mut control = control(10);
        assert_eq!(control.decide(seconds(1.0), mega(116)), None);
        assert_eq!(control.decide(seconds(2.0), mega(20)), None, "not free any more");
        assert_eq!(control.decide(seconds(3.0), mega(116)), None);
        assert_eq!(control.decide(seconds(4.9), mega(116)), None);
        assert_eq!(control.decide(seconds(5.0), mega(116)), Some(15));
        assert_eq!(control.decide(seconds(6.0), mega(66)), None);
        assert_eq!(control.decide(seconds(7.0), mega(66)), Some(18));
        assert_eq!(control.decide(seconds(9.0), mega(36)), Some(19));
        assert_eq!(control.decide(seconds(11.0), mega(26)), Some(20));
        assert_eq!(control.decide(seconds(13.0), mega(16)), None);
        // Not soon after some were given back.
        assert_eq!(control.decide(seconds(14.0), mega(-1)), Some(18));
        assert_eq!(control.decide(seconds(15.0), mega(5000)), None);
        assert_eq!(control.decide(seconds(20.0), mega(5000)), None);
        assert_eq!(control.decide(seconds(24.0), mega(5000)), Some(64));
        assert_eq!(control.decide(seconds(30.0), mega(5000)), None, "the ceiling");
    }

    /// A machine whose other programs take and give back memory at random: the reserve is touched only until the next look,
    /// the number of slots stays between floor and ceiling, and comes to rest when the others do.
    #[test]
    fn other_programs_get_their_memory_and_the_number_comes_to_rest() {
        for seed in 0..200 {
            let (mut random, mut control) = (Rng::new(seed), control(20));
            let (mut others, total) = (0i64, 900 * MEGA as i64);
            let used = |slots: usize| slots as i64 * 10 * MEGA as i64;
            let mut changes = 0;
            for look in 0..4000 {
                if look < 2000 && random.below(40) == 0 {
                    others = (random.below(820) as i64) * MEGA as i64;
                }
                let headroom = total - others - used(control.slots);
                let changed = control.decide(INTERVAL * look, Sample { headroom, pressed: false });
                assert!((8..=64).contains(&control.slots));
                let left = total - others - used(control.slots);
                assert!(left >= 0 || control.slots == 8, "seed {seed}: {left} bytes left at look {look}");
                changes += u32::from(look >= 2500 && changed.is_some());
            }
            assert_eq!(changes, 0, "seed {seed}: the number does not come to rest");
        }
    }
}
