//! Decides how many slots are in use, from what looks at the memory find.

use std::time::Duration;

use crate::plan::ElasticPlan;

/// Time that memory has to be free without a break before slots are added.
const FREE_FOR: Duration = Duration::from_secs(2);
/// Time after slots were given back in which none are added.
const REST: Duration = Duration::from_secs(10);
/// Time in which memory that was given back is expected to be reported as free: the kernel may count pages that were
/// pinned, or are part of a huge page, for a while.
const SETTLE: Duration = Duration::from_secs(1);
/// Of how many slots one is given back under pressure, each time.
const PRESSED_SHARE: usize = 16;

/// What a look at the memory finds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sample {
    /// Bytes beyond what is taken and the reserve; negative if the reserve is touched.
    pub headroom: i64,
    /// Whether less than the reserve is left, and a control group has reached its limit since the last look.
    pub at_limit: bool,
    /// Whether less than the reserve is left, and tasks have waited for memory in the last ten seconds.
    pub waiting: bool,
}

/// Memory that was given back and may not be reported as free yet.
struct Returning {
    bytes: u64,
    /// The headroom before it was given back.
    before: i64,
    /// When what is not reported by then is not expected any more.
    until: Duration,
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
    returning: Option<Returning>,
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
            returning: None,
        }
    }

    /// Bytes that were given back and are not in this headroom, as far as that is known: other programs may have taken
    /// them.
    fn returning_bytes(&mut self, now: Duration, headroom: i64) -> u64 {
        let Some(Returning { bytes, before, until }) = self.returning else { return 0 };
        let reported = headroom.saturating_sub(before).max(0) as u64;
        let left = if now < until { bytes.saturating_sub(reported) } else { 0 };
        if left == 0 {
            self.returning = None;
        }
        left
    }

    /// The number of slots from now on, if it changes.
    pub fn decide(&mut self, now: Duration, sample: Sample) -> Option<usize> {
        let Sample { headroom, at_limit, waiting } = sample;
        let before = self.slots;
        let step = self.step_bytes.max(1);
        let returning = self.returning_bytes(now, headroom);
        let expected = headroom.saturating_add_unsigned(returning);
        // That tasks waited is an average, which says nothing of what was given back since.
        let pressed = at_limit || waiting && returning == 0;
        if expected < 0 || pressed {
            let missing = expected.min(0).unsigned_abs() + if returning == 0 || expected < 0 { self.margin } else { 0 };
            let pressure = if pressed { before.div_ceil(PRESSED_SHARE) as u64 } else { 0 };
            let fewer = missing.div_ceil(step).max(pressure);
            self.slots =
                before.saturating_sub(usize::try_from(fewer).unwrap_or(usize::MAX)).max(self.least.min(before));
            self.free_since = None;
            if self.slots < before {
                self.rest_until = now + REST;
                let bytes = returning + (before - self.slots) as u64 * step;
                self.returning = Some(Returning { bytes, before: headroom, until: now + SETTLE });
            }
        } else if headroom < 0 || (headroom as u64) < step + self.margin {
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
        CapacityControl {
            slots,
            least: 8,
            most: 64,
            step_bytes: 10 * MEGA,
            margin: 16 * MEGA,
            free_since: None,
            rest_until: Duration::ZERO,
            returning: None,
        }
    }

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    fn mega(headroom: i64) -> Sample {
        Sample { headroom: headroom * MEGA as i64, at_limit: false, waiting: false }
    }

    #[test]
    fn scarce_memory_is_given_back_at_once_and_not_below_the_floor() {
        let mut control = control(32);
        assert_eq!(control.decide(seconds(1.0), mega(0)), None);
        assert_eq!(control.decide(seconds(2.0), mega(-1)), Some(30), "17 MB are two slots");
        assert_eq!(control.decide(seconds(2.25), mega(-100)), Some(20), "20 MB of the 100 are on their way");
        assert_eq!(control.decide(seconds(2.5), mega(-1000)), Some(8));
        assert_eq!(control.decide(seconds(3.75), mega(-1000)), None);
        assert_eq!(control.rest_until, seconds(12.5), "nothing was given back by the last look");
        assert_eq!(control.decide(seconds(3.75), Sample { headroom: i64::MIN, at_limit: true, waiting: true }), None);
    }

    #[test]
    fn pressure_takes_a_share() {
        for (at_limit, waiting) in [(true, false), (false, true)] {
            let pressed = Sample { headroom: 0, at_limit, waiting };
            assert_eq!(control(64).decide(seconds(1.0), pressed), Some(60));
            assert_eq!(control(10).decide(seconds(1.0), pressed), Some(8));
        }
    }

    #[test]
    fn memory_on_its_way_back_is_waited_for_unless_the_limit_is_reached() {
        let mut control = control(64);
        assert_eq!(control.decide(seconds(1.0), mega(-84)), Some(54));
        // Nothing has come back, then some, and others have taken 30 MB.
        assert_eq!(control.decide(seconds(1.25), Sample { waiting: true, ..mega(-84) }), None);
        assert_eq!(control.decide(seconds(1.5), mega(-40)), None);
        assert_eq!(control.decide(seconds(1.75), mega(-114)), Some(51), "14 MB beyond the 100 on their way");
        assert_eq!(control.decide(seconds(2.0), Sample { at_limit: true, ..mega(-114) }), Some(47), "a sixteenth");
        // What is not back after a second does not come.
        assert_eq!(control.decide(seconds(2.75), mega(-114)), None);
        assert_eq!(control.decide(seconds(3.0), mega(-114)), Some(34));
        // All is back: the next lack counts in full.
        assert_eq!(control.decide(seconds(3.25), mega(16)), None);
        assert_eq!(control.decide(seconds(3.5), mega(-1)), Some(32));
    }

    /// A machine that reports memory as free only some time after it was given back, while other programs take more and
    /// more.
    #[test]
    fn no_more_is_given_back_than_needed_where_memory_comes_back_late() {
        for seed in 0..200 {
            let (mut random, mut control) = (Rng::new(seed), control(64));
            let (mut others, total) = (0i64, 900 * MEGA as i64);
            // Bytes that were given back, and when they are reported.
            let mut late: Vec<(Duration, i64)> = Vec::new();
            let mut last_change = 0;
            for look in 0..400u32 {
                let now = INTERVAL * look;
                if look < 300 && random.below(20) == 0 {
                    others = (others + random.below(200) as i64 * MEGA as i64).min(700 * MEGA as i64);
                    last_change = look;
                }
                late.retain(|(reported, _)| *reported > now);
                let free = |slots: usize| total - others - slots as i64 * 10 * MEGA as i64;
                let not_reported: i64 = late.iter().map(|(_, bytes)| bytes).sum();
                let (before, headroom) = (control.slots, free(control.slots) - not_reported);
                // What has to be free in the end, which rounding up to slots may exceed by less than one.
                let needed = (8..=before).rev().find(|slots| free(*slots) >= 16 * MEGA as i64).unwrap_or(8);
                let _ = control.decide(now, Sample { headroom, at_limit: false, waiting: not_reported > 0 });
                assert!(control.slots >= needed, "seed {seed}: {} slots of {needed} at look {look}", control.slots);
                if control.slots < before {
                    let bytes = (before - control.slots) as i64 * 10 * MEGA as i64;
                    late.push((now + Duration::from_millis(random.below(900) as u64), bytes));
                }
                let settled = look > last_change + 8;
                assert!(
                    !settled || free(control.slots) >= 0 || control.slots == 8,
                    "seed {seed}: short at look {look}"
                );
            }
        }
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

    /// A machine whose other programs take and give back memory at random: the reserve is touched only until the next
    /// look, the number of slots stays between floor and ceiling, and comes to rest when the others do.
    #[test]
    fn other_programs_get_their_memory_and_the_number_comes_to_rest() {
        for seed in 0..200 {
            let (mut random, mut control) = (Rng::new(seed), control(20));
            let (mut others, total) = (0i64, 900 * MEGA as i64);
            let used = |slots: usize| slots as i64 * 10 * MEGA as i64;
            let (mut changes, mut last_change, mut settles_until) = (0, 0, 0);
            for look in 0..4000 {
                if look < 2000 && random.below(40) == 0 {
                    others = (random.below(820) as i64) * MEGA as i64;
                    // Soon after slots were given back, what is missing may be on its way.
                    settles_until = if look - last_change < 8 { look + 5 } else { look };
                    last_change = look;
                }
                let headroom = total - others - used(control.slots);
                let changed = control.decide(INTERVAL * look, Sample { headroom, at_limit: false, waiting: false });
                assert!((8..=64).contains(&control.slots));
                let left = total - others - used(control.slots);
                let in_time = left >= 0 || control.slots == 8 || look < settles_until;
                assert!(in_time, "seed {seed}: {left} bytes left at look {look}");
                changes += u32::from(look >= 2500 && changed.is_some());
            }
            assert_eq!(changes, 0, "seed {seed}: the number does not come to rest");
        }
    }
}
