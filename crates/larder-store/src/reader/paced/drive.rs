//! One drive: its window, its rate, and whether it can be trusted.

use std::{path::Path, time::Duration};

use super::super::{ReadGoal, window::ReadWindow};
use crate::error::StoreError;

/// Busy time after which what was seen of the rate counts half as much.
const HALF_LIFE: Duration = Duration::from_millis(150);
/// What a failed read adds to the score of a drive, from which a read that succeeds takes one.
const FAILURE: u32 = 4;
/// Score at which a drive is set aside: three failures in a row, or most reads with wrong bytes.
const SET_ASIDE: u32 = 3 * FAILURE - 1;
/// A drive that was not read from while as many bytes were read from others is tried again.
const TRIAL_BYTES: u64 = 1 << 30;
/// Time until a drive that was set aside is tried again; doubled each time that it fails then.
const PAUSE_MIN: Duration = Duration::from_secs(60);
const PAUSE_MAX: Duration = Duration::from_secs(3600);

/// A drive with the reads that are in flight on it.
pub(super) struct Drive {
    /// The window of reads that shall all have been read soon.
    throughput: ReadWindow,
    /// The window of those of which the first matter.
    arrival: ReadWindow,
    /// Time in which reads of the second kind were held back, and the last moment up to which it is counted.
    arrival_time: (Duration, Duration),
    in_flight_bytes: u64,
    /// Whether the window held reads back when reads were last started.
    pub held_back: bool,
    /// Bytes in flight and planned, while reads are being started.
    planned: u64,
    rate: DriveRate,
    /// Rate when reads were last started.
    rate_now: Option<f64>,
    /// The most that it can have been then.
    rate_most: f64,
    /// Bytes that were begun on other drives since the last read of this one.
    pub passed_over: u64,
    trust: Trust,
}

/// The rate while reads are in flight: bytes over busy time, of which earlier ones count less.
#[derive(Default)]
struct DriveRate {
    bytes: f64,
    seconds: f64,
    /// Start of the busy time that is not counted yet; `None` if nothing is in flight.
    since: Option<Duration>,
}

/// How often reads have failed that another drive has a copy of.
struct Trust {
    score: u32,
    /// Time until which it is not read from.
    set_aside: Option<Duration>,
    pause: Duration,
    has_failed: bool,
    was_set_aside: bool,
}

/// Something about a drive that has not been said before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum DriveFailure {
    /// A first read has failed.
    First,
    /// It is not read from any more.
    SetAside,
}

impl Drive {
    /// A drive with nothing in flight.
    pub fn new(window: impl Fn(ReadGoal) -> ReadWindow) -> Self {
        let trust = Trust { score: 0, set_aside: None, pause: PAUSE_MIN, has_failed: false, was_set_aside: false };
        Drive {
            throughput: window(ReadGoal::Throughput),
            arrival: window(ReadGoal::Arrival),
            arrival_time: Default::default(),
            in_flight_bytes: 0,
            held_back: false,
            planned: 0,
            rate: DriveRate::default(),
            rate_now: None,
            rate_most: f64::INFINITY,
            passed_over: 0,
            trust,
        }
    }

    /// The window of reads with this goal.
    pub fn window(&self, goal: ReadGoal) -> &ReadWindow {
        match goal {
            ReadGoal::Throughput => &self.throughput,
            ReadGoal::Arrival => &self.arrival,
        }
    }

    /// Bytes in flight.
    #[cfg(test)]
    pub fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    /// Bytes per second when reads were last started; `None` if it has not been read from.
    pub fn rate(&self) -> Option<f64> {
        self.rate_now.map(|rate| rate.min(self.rate_most))
    }

    /// Reads are being started now.
    pub fn begin_round(&mut self, now: Duration) {
        (self.held_back, self.planned) = (false, self.in_flight_bytes);
        (self.rate_now, self.rate_most) = (self.rate.known(), self.rate.most(now, self.in_flight_bytes));
    }

    /// Plans a read of `len` bytes; it is held back if the window does not allow it, or another before it.
    pub fn plan(&mut self, len: u64, goal: ReadGoal) {
        self.held_back |= !self.window(goal).allows(self.in_flight_bytes, len);
        self.planned += len;
    }

    /// Seconds until it would have read `len` bytes behind what is planned; a drive that is not known yet is taken to
    /// be as fast as the fastest.
    pub fn finish(&self, len: u64, fastest: f64) -> f64 {
        (self.planned + len) as f64 / self.rate_now.unwrap_or(fastest).min(self.rate_most).max(1.0)
    }

    /// Whether it has not been read from for long, so that it may have become faster.
    pub fn is_due(&self) -> bool {
        self.in_flight_bytes == 0 && self.passed_over >= TRIAL_BYTES
    }

    /// A read of `len` bytes starts.
    pub fn started(&mut self, len: u64, now: Duration) {
        if self.in_flight_bytes == 0 {
            self.arrival_time.1 = now;
        }
        if self.is_due() {
            // Its rate then says little about now.
            self.rate = DriveRate::default();
        }
        self.in_flight_bytes += len;
        self.passed_over = 0;
        self.rate.since.get_or_insert(now);
    }

    /// A read of `len` bytes has completed; `most` bytes can be in flight at all.
    pub fn completed(&mut self, len: u64, goal: ReadGoal, now: Duration, succeeded: bool, most: u64) {
        self.in_flight_bytes -= len;
        // A failed read says nothing about the rate.
        let counts = self.held_back && succeeded;
        match goal {
            ReadGoal::Throughput => self.throughput.completed(len, now, counts, most),
            // These come in bursts, too short to be sampled alone: their times are put together.
            ReadGoal::Arrival if counts => {
                let (time, since) = &mut self.arrival_time;
                *time += now.saturating_sub(*since);
                self.arrival.completed(len, *time, true, most);
            }
            ReadGoal::Arrival => {}
        }
        self.arrival_time.1 = now;
        let is_busy = self.in_flight_bytes > 0;
        if succeeded {
            self.rate.completed(len, now, is_busy);
            self.trust.succeeded(now);
        } else {
            self.rate.since = is_busy.then_some(now);
        }
    }

    /// A read has failed; returns what is to be said about that.
    pub fn failed(&mut self, now: Duration) -> Option<DriveFailure> {
        self.trust.failed(now)
    }

    /// Whether it is not to be read from.
    pub fn is_set_aside(&self, now: Duration) -> bool {
        self.trust.set_aside.is_some_and(|until| now < until)
    }
}

impl DriveRate {
    fn completed(&mut self, bytes: u64, now: Duration, is_busy: bool) {
        let seconds = self.since.map_or(Duration::ZERO, |since| now.saturating_sub(since)).as_secs_f64();
        let kept = (-seconds / HALF_LIFE.as_secs_f64()).exp2();
        (self.bytes, self.seconds) = (self.bytes * kept + bytes as f64, self.seconds * kept + seconds);
        self.since = is_busy.then_some(now);
    }

    fn known(&self) -> Option<f64> {
        (self.seconds > 0.0).then(|| self.bytes / self.seconds)
    }

    /// What the rate is at most: as if all that is in flight completed now. So it falls while nothing completes.
    fn most(&self, now: Duration, in_flight: u64) -> f64 {
        let waited = self.since.map_or(0.0, |since| now.saturating_sub(since).as_secs_f64());
        if waited > 0.0 { (self.bytes + in_flight as f64) / (self.seconds + waited) } else { f64::INFINITY }
    }
}

impl Trust {
    fn succeeded(&mut self, now: Duration) {
        self.score = self.score.saturating_sub(1);
        if self.set_aside.is_some_and(|until| until <= now) {
            self.set_aside = None;
        }
    }

    fn failed(&mut self, now: Duration) -> Option<DriveFailure> {
        let first = !std::mem::replace(&mut self.has_failed, true);
        self.score = (self.score + FAILURE).min(SET_ASIDE);
        let is_set_aside = self.set_aside.is_some_and(|until| now < until);
        if self.score == SET_ASIDE && !is_set_aside {
            self.set_aside = Some(now + self.pause);
            self.pause = (2 * self.pause).min(PAUSE_MAX);
            let again = std::mem::replace(&mut self.was_set_aside, true);
            return (!again).then_some(DriveFailure::SetAside);
        }
        first.then_some(DriveFailure::First)
    }
}

impl DriveFailure {
    /// A sentence for the user.
    pub fn describe(self, folder: &Path, error: &StoreError) -> String {
        let folder = folder.display();
        match self {
            DriveFailure::First => {
                format!("a read from {folder} failed, and was repeated from the other copy: {error}")
            }
            DriveFailure::SetAside => {
                let minutes = PAUSE_MIN.as_secs() / 60;
                format!(
                    "reads from {folder} keep failing; the other copies are read instead, and it is tried again rarely, first in \
                     {minutes} min: {error}"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_drive_that_keeps_failing_is_set_aside_and_tried_again_rarely() {
        let mut drive = Drive::new(ReadWindow::new);
        let said: Vec<_> = (0..3).map(|_| drive.failed(seconds(0))).collect();
        assert_eq!(said, [Some(DriveFailure::First), None, Some(DriveFailure::SetAside)]);
        assert!(drive.is_set_aside(seconds(59)) && !drive.is_set_aside(seconds(60)));
        // One more failure is enough then, and nothing is said again.
        assert_eq!(drive.failed(seconds(60)), None);
        assert!(drive.is_set_aside(seconds(179)) && !drive.is_set_aside(seconds(180)));
        drive.trust.succeeded(seconds(180));
        assert_eq!(drive.trust.set_aside, None);
    }

    #[test]
    fn single_failures_are_forgiven_and_wrong_bytes_are_not() {
        let mut drive = Drive::new(ReadWindow::new);
        for _ in 0..10 {
            drive.failed(seconds(0));
            (0..4).for_each(|_| drive.trust.succeeded(seconds(0)));
        }
        assert!(!drive.is_set_aside(seconds(0)));
        for _ in 0..4 {
            // The read succeeds, and then its bytes are wrong.
            drive.trust.succeeded(seconds(0));
            drive.failed(seconds(0));
        }
        assert!(drive.is_set_aside(seconds(0)));
    }

    #[test]
    fn a_rate_follows_the_drive_and_falls_while_nothing_completes() {
        let mut rate = DriveRate::default();
        assert_eq!((rate.known(), rate.most(seconds(5), 0)), (None, f64::INFINITY));
        let step = Duration::from_millis(10);
        let mut now = Duration::ZERO;
        let mut read = |rate: &mut DriveRate, bytes, times| {
            for _ in 0..times {
                rate.since.get_or_insert(now);
                now += step;
                rate.completed(bytes, now, true);
            }
            now
        };
        let now = read(&mut rate, 10_000_000, 100);
        assert!((rate.known().unwrap() / 1e9 - 1.0).abs() < 0.01);
        assert!(rate.most(now + seconds(1), 10_000_000) < 0.3e9);
        read(&mut rate, 1_000_000, 60);
        assert!(rate.known().unwrap() < 0.17e9);
    }
}
