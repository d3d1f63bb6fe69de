//! How many bytes of reads the SSD likes in flight: a controller that watches the rate of the completions.
//!
//! Drives and virtual disks differ: some need dozens of reads in flight, some lose most of their rate beyond a few. So
//! the window is not a constant. While it holds reads back, the rate is sampled, and from time to time a sample is
//! taken with a larger or a smaller window. The other window is kept if it is clearly faster, and so on in the same
//! direction; else the controller returns to the old one, and waits longer before the next trial. A rate that falls by
//! itself starts a trial of a smaller window at once.
//!
//! Where the first reads matter ([`ReadGoal::Arrival`]), a smaller window is also kept if it is hardly slower: a drive
//! divides its rate between the reads in flight, so a large number of them all complete at the end, and few of them one
//! after the other.
//!
//! Reads that all fit into the window say nothing, and are not sampled: neither an idle reader nor a short burst moves
//! the window. The controller has no clock and does no I/O.

use std::time::Duration;

use super::ReadGoal;

/// Bytes in flight before anything is known: enough for most drives at the size of an expert, and too little for the
/// rate of any drive that was measured to collapse.
const START_BYTES: u64 = 24 << 20;
/// The same where the first reads matter: nearly enough for the rate of most drives, and few enough that the misses of
/// a token arrive one after the other.
const START_BYTES_FOR_ARRIVAL: u64 = 4 << 20;
/// The smallest window in bytes; a single read may be larger.
const FLOOR_BYTES: u64 = 2 << 20;
/// Fewest bytes of a sample, which is at least two windows long.
const SAMPLE_BYTES: u64 = 64 << 20;
/// Halvings of the window in one trial, at most.
const HALVINGS_MAX: u32 = 3;
/// A window is better than another if its rate is higher by this factor.
const GAIN: f64 = 1.08;
/// Where the first reads matter, a smaller window is kept if its rate is at least this share of that of the larger.
const KEPT: f64 = 0.97;
/// A sample below this share of the usual rate is a fall.
const FALL: f64 = 0.75;
/// A trial is given up when it has taken this many times as long as it would at the usual rate.
const TRIAL_TIMES_MAX: f64 = 2.0;
/// Samples between two trials: at first, and at most. The number doubles with each trial that fails.
const PATIENCE_MIN: u32 = 1;
const PATIENCE_MAX: u32 = 64;

/// The window, with what it has learnt.
#[derive(Debug)]
pub(super) struct ReadWindow {
    goal: ReadGoal,
    bytes: u64,
    /// Bytes of the last read. A larger window has room for one more.
    read_bytes: u64,
    /// The usual rate at this window, in bytes per second.
    rate: Option<f64>,
    sample: Sample,
    /// Bytes and time of all samples.
    sampled: (u64, Duration),
    trial: Option<Trial>,
    /// Direction of the next trial.
    direction: Direction,
    /// How often the next trial of a smaller window halves it: one such trial after the other halves once more, because
    /// the rate may be the same low one down to a fraction of the window.
    halvings: u32,
    /// Samples until the next trial.
    countdown: u32,
    /// Samples between trials.
    patience: u32,
}

/// A sample in progress.
#[derive(Debug, Default)]
struct Sample {
    /// Time since which reads were held back without a break.
    began: Option<Duration>,
    /// Bytes that completed since then. The first of them, as many as a window has, are those of the time before.
    bytes: u64,
    /// Time and bytes at which those had completed.
    settled: Option<(Duration, u64)>,
}

/// A sample with another window.
#[derive(Clone, Copy, Debug)]
struct Trial {
    /// The window before, and its usual rate.
    bytes: u64,
    rate: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    Larger,
    Smaller,
}

impl ReadWindow {
    /// A window for reads with this goal that has learnt nothing.
    pub fn new(goal: ReadGoal) -> Self {
        let bytes = match goal {
            ReadGoal::Throughput => START_BYTES,
            ReadGoal::Arrival => START_BYTES_FOR_ARRIVAL,
        };
        Self::starting_at(bytes, goal)
    }

    /// As [`new`](Self::new), with `bytes` bytes.
    pub fn starting_at(bytes: u64, goal: ReadGoal) -> Self {
        ReadWindow {
            goal,
            bytes,
            read_bytes: 0,
            rate: None,
            sample: Sample::default(),
            sampled: (0, Duration::ZERO),
            trial: None,
            direction: if goal == ReadGoal::Arrival { Direction::Larger } else { Direction::Smaller },
            halvings: 1,
            countdown: PATIENCE_MIN,
            patience: PATIENCE_MIN,
        }
    }

    /// Bytes that may be in flight.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The mean rate of all samples, in bytes per second; `None` before the first.
    pub fn mean_rate(&self) -> Option<f64> {
        let (bytes, time) = self.sampled;
        (bytes > 0).then(|| bytes as f64 / time.as_secs_f64().max(1e-9))
    }

    /// Whether a read of `len` bytes may start while reads of `in_flight` bytes are in flight. A read may always start
    /// alone.
    pub fn allows(&self, in_flight: u64, len: u64) -> bool {
        in_flight == 0 || in_flight.saturating_add(len) <= self.bytes
    }

    /// Learns that a read of `len` bytes completed at `now`, a time since any fixed one. `held_back` says whether the
    /// window kept reads from starting ever since the previous completion; `most` is what can be in flight at all, in
    /// bytes, which the window does not exceed.
    pub fn completed(&mut self, len: u64, now: Duration, held_back: bool, most: u64) {
        if !held_back {
            self.interrupted();
            return;
        }
        self.read_bytes = len;
        let settling = self.settling_bytes();
        let target = self.bytes.saturating_mul(2).max(SAMPLE_BYTES);
        let sample = &mut self.sample;
        let began = *sample.began.get_or_insert(now);
        sample.bytes = sample.bytes.saturating_add(len);
        let Some((since, before)) = sample.settled else {
            if sample.bytes >= settling {
                sample.settled = Some((now, sample.bytes));
            }
            self.give_up_slow_trial(settling.saturating_add(target), now.saturating_sub(began));
            return;
        };
        let (bytes, time) = (sample.bytes - before, now.saturating_sub(since));
        if bytes >= target {
            let rate = bytes as f64 / time.as_secs_f64().max(1e-9);
            self.sample = Sample::default();
            self.sampled = (self.sampled.0.saturating_add(bytes), self.sampled.1.saturating_add(time));
            self.judge(rate, most);
        } else {
            self.give_up_slow_trial(settling.saturating_add(target), now.saturating_sub(began));
        }
    }

    /// Bytes that complete before the rate is that of the window: those in flight when the sample began.
    fn settling_bytes(&self) -> u64 {
        self.trial.map_or(self.bytes, |trial| trial.bytes.max(self.bytes))
    }

    /// Nothing is known from a sample with a break; a trial is repeated later.
    fn interrupted(&mut self) {
        self.sample = Sample::default();
        if let Some(trial) = self.trial.take() {
            self.undo(trial);
        }
    }

    /// Returns to the window before a trial, and waits longer before the next.
    fn undo(&mut self, trial: Trial) {
        (self.bytes, self.rate, self.countdown) = (trial.bytes, Some(trial.rate), self.patience);
        self.patience = (2 * self.patience).min(PATIENCE_MAX);
    }

    /// Ends a trial of `bytes` that has taken far longer than usual, and so need not be finished.
    fn give_up_slow_trial(&mut self, bytes: u64, took: Duration) {
        if let Some(Trial { rate, .. }) = self.trial
            && took.as_secs_f64() > TRIAL_TIMES_MAX * bytes as f64 / rate
        {
            self.sample = Sample::default();
            self.judge(0.0, u64::MAX);
        }
    }

    /// Decides by the rate of a whole sample which window is next.
    fn judge(&mut self, rate: f64, most: u64) {
        match self.trial.take() {
            None => self.judge_usual(rate, most),
            Some(trial) if rate > trial.rate * self.least_gain() => {
                // On in the same direction, with the next sample. Small losses must not add up.
                let rate = rate.max(trial.rate);
                (self.rate, self.patience, self.halvings) = (Some(rate), PATIENCE_MIN, 1);
                self.begin_trial(most);
            }
            Some(trial) => {
                self.undo(trial);
                if self.direction == Direction::Smaller {
                    self.halvings = self.halvings % HALVINGS_MAX + 1;
                }
                self.direction = self.direction.other();
            }
        }
    }

    /// The rate of a trial, relative to the rate before, from which on its window is kept.
    fn least_gain(&self) -> f64 {
        match (self.goal, self.direction) {
            (ReadGoal::Arrival, Direction::Smaller) => KEPT,
            _ => GAIN,
        }
    }

    fn judge_usual(&mut self, rate: f64, most: u64) {
        let usual = self.rate.unwrap_or(rate);
        if rate < usual * FALL {
            // From here on this is the usual rate, unless a smaller window gives more.
            (self.rate, self.direction, self.patience) = (Some(rate), Direction::Smaller, PATIENCE_MIN);
            return self.begin_trial(most);
        }
        self.rate = Some((3.0 * usual + rate) / 4.0);
        self.countdown = self.countdown.saturating_sub(1);
        if self.countdown == 0 {
            self.begin_trial(most);
        }
    }

    fn begin_trial(&mut self, most: u64) {
        let most = most.max(FLOOR_BYTES);
        let bytes = match self.direction {
            Direction::Larger => {
                let bytes = self.bytes.max(self.read_bytes);
                let step = match self.goal {
                    ReadGoal::Throughput => bytes / 4,
                    ReadGoal::Arrival => bytes,
                };
                bytes.saturating_add(step.max(self.read_bytes)).min(most)
            }
            Direction::Smaller => (self.bytes >> self.halvings).max(FLOOR_BYTES).min(most),
        };
        if bytes == self.bytes {
            (self.direction, self.countdown) = (self.direction.other(), self.patience);
            return;
        }
        let rate = self.rate.expect("a trial follows a sample");
        self.trial = Some(Trial { bytes: self.bytes, rate });
        self.bytes = bytes;
    }
}

impl Direction {
    fn other(self) -> Self {
        match self {
            Direction::Larger => Direction::Smaller,
            Direction::Smaller => Direction::Larger,
        }
    }
}

#[cfg(test)]
mod tests;
