//! Notices about memory while a model runs: other programs need it, or it is available again.

use std::time::{Duration, Instant};

use crate::notices::{Notice, Notices};
use larder_os::group;

/// Time without a change of the number of slots after which it is said.
const SETTLED: Duration = Duration::from_secs(2);
/// Changes by less than this share of the slots are not said.
const SAID_SHARE: usize = 8;
/// Time between looks at the memory pressure, where the number of slots is fixed.
const INTERVAL: Duration = Duration::from_secs(2);
/// Shares of time in which tasks waited for memory from which pressure is said, and below which it is over.
const PRESSURE: (f64, f64) = (0.1, 0.01);

/// Decides what is said. It reads no clock and no file.
#[derive(Default)]
pub(crate) struct MemoryNotes {
    /// The number of slots that is known to the user.
    said: Option<usize>,
    /// The number of slots, and since when.
    now: Option<(usize, Duration)>,
    next_look: Duration,
    is_pressed: bool,
}

/// [`MemoryNotes`] with clock and receiver.
pub(crate) struct MemoryWatch {
    notes: MemoryNotes,
    started: Instant,
    notices: Notices,
}

impl MemoryWatch {
    /// Says nothing yet.
    pub fn new(notices: Notices) -> Self {
        MemoryWatch { notes: MemoryNotes::default(), started: Instant::now(), notices }
    }

    /// The number of slots of each pool is this, and follows the available memory.
    pub fn slots(&mut self, slots: usize) {
        let note = self.notes.slots(self.started.elapsed(), slots);
        note.into_iter().for_each(|note| self.notices.send(note));
    }

    /// The number of slots is fixed: looks at the memory pressure now and then.
    pub fn fixed(&mut self) {
        let note = self.notes.fixed(self.started.elapsed(), group::pressure);
        note.into_iter().for_each(|note| self.notices.send(note));
    }
}

impl MemoryNotes {
    fn slots(&mut self, now: Duration, slots: usize) -> Option<Notice> {
        let said = *self.said.get_or_insert(slots);
        let since = match self.now {
            Some((same, since)) if same == slots => since,
            _ => now,
        };
        self.now = Some((slots, since));
        if now < since + SETTLED || said.abs_diff(slots) < said.div_ceil(SAID_SHARE) {
            return None;
        }
        self.said = Some(slots);
        Some(Notice::Capacity { before: said, slots })
    }

    fn fixed(&mut self, now: Duration, pressure: impl FnOnce() -> Option<f64>) -> Option<Notice> {
        if now < self.next_look {
            return None;
        }
        self.next_look = now + INTERVAL;
        let share = pressure()?;
        let was_pressed = self.is_pressed;
        self.is_pressed = share > if was_pressed { PRESSURE.1 } else { PRESSURE.0 };
        (self.is_pressed && !was_pressed).then_some(Notice::MemoryPressure(share))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds)
    }

    #[test]
    fn a_number_of_slots_is_said_once_it_has_settled() {
        let mut notes = MemoryNotes::default();
        let mut said = |at: f64, slots: usize| notes.slots(seconds(at), slots).map(|note| note.to_string());
        assert_eq!(said(0.0, 32), None);
        assert_eq!([said(1.0, 20), said(1.3, 12), said(3.0, 12)], [None, None, None]);
        let less = "memory: other programs need it; 12 slots are left of 32";
        assert_eq!(said(3.4, 12).as_deref(), Some(less));
        assert_eq!([said(9.0, 12), said(20.0, 13), said(30.0, 13)], [None, None, None]);
        assert_eq!([said(31.0, 22), said(33.5, 22)], [None, Some("memory: available again; 22 slots after 12".into())]);
    }

    #[test]
    fn pressure_is_said_once_until_it_is_over() {
        let mut notes = MemoryNotes::default();
        let mut looks = 0;
        let mut said = |at: f64, share: f64| {
            let note = notes.fixed(seconds(at), || {
                looks += 1;
                Some(share)
            });
            note.is_some()
        };
        assert!(!said(0.0, 0.02) && !said(1.0, 0.9), "not looked at yet");
        assert!(said(2.0, 0.2));
        assert!(!said(4.0, 0.3) && !said(6.0, 0.05) && !said(8.0, 0.3));
        assert!(!said(10.0, 0.0) && said(12.0, 0.12));
        assert_eq!(looks, 7);
    }
}
