//! Decides how many slots are in use, from what looks at the memory find.

use std::time::Duration;

use crate::plan::ElasticPlan;

/// Time that memory has to be free without a break before slots are added.
const FREE_FOR: Duration = Duration::from_secs(2);
/// Time after slots were given back in which none are added.
const REST: Duration = Duration::from_secs(10);
/// Of how many slots one is given back under pressure, each time.
const PRESSED_SHARE: usize = 16;

/// What a look at the memory finds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Bytes beyond what is taken and the reserve; negative if the reserve is touched.
    pub headroom: i64,
    /// Whether less than the reserve is left, and tasks wait for memory or a control group has reached its limit since the last
    /// look.
    pub pressed: bool,
}

/// Decides the number of slots. It reads no clock and no file.
pub(super) struct CapacityControl {
    /// Slots in use.
    pub slots: usize,
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
    /// The control of the slots of a plan, of which as many are in use as it begins with.
    pub fn new(plan: &ElasticPlan) -> Self {
        CapacityControl {
            slots: plan.slots,
            least: plan.least,
            most: plan.most,
            step_bytes: plan.slot_bytes,
            margin: plan.reserve / 4,
            free_since: None,
            rest_until: Duration::ZERO,
        }
    }

    /// The number of slots from now on, if it changes.
    pub fn decide(&mut self, now: Duration, sample: Sample) -> Option<usize> {
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

#[cfg(test)]
mod tests {
    use larder_core::Rng;

    use super::super::INTERVAL;
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
