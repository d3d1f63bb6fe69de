//! The window on simulated drives.

use std::collections::VecDeque;

use larder_core::Rng;

use super::*;

const MB: u64 = 1 << 20;
const READ_BYTES: u64 = 7 * MB / 2;
/// What the queue of a reader holds.
const MOST: u64 = 64 * READ_BYTES;

/// A drive that completes reads in order, at a rate that depends on the time in seconds and on the bytes in flight.
struct Drive<F> {
    rate: F,
    window: ReadWindow,
    in_flight: VecDeque<u64>,
    now: f64,
    noise: Rng,
    largest_window: u64,
}

impl<F: Fn(f64, u64) -> f64> Drive<F> {
    fn new(rate: F, seed: u64) -> Self {
        Self::with(ReadGoal::Throughput, rate, seed)
    }

    fn with(goal: ReadGoal, rate: F, seed: u64) -> Self {
        let (window, noise) = (ReadWindow::new(goal), Rng::new(seed));
        Drive { rate, window, in_flight: VecDeque::new(), now: 0.0, noise, largest_window: 0 }
    }

    fn bytes_in_flight(&self) -> u64 {
        self.in_flight.iter().sum()
    }

    /// Reads `total` bytes in reads of `len`, as many at a time as the window allows, the rate varying by a tenth.
    /// Returns the mean rate.
    fn read(&mut self, total: u64, len: u64) -> f64 {
        let start = self.now;
        let mut left = total / len;
        let done = left * len;
        while left > 0 || !self.in_flight.is_empty() {
            while left > 0 && self.window.allows(self.bytes_in_flight(), len) {
                self.in_flight.push_back(len);
                left -= 1;
            }
            let in_flight = self.bytes_in_flight();
            assert!(in_flight <= self.window.bytes().max(len).max(self.largest_window));
            self.largest_window = self.largest_window.max(self.window.bytes());
            let rate = (self.rate)(self.now, in_flight) * (0.9 + 0.2 * self.noise.unit());
            let next = self.in_flight.pop_front().expect("a read may always start alone");
            self.now += next as f64 / rate;
            self.window.completed(next, Duration::from_secs_f64(self.now), left > 0, MOST);
            assert!((FLOOR_BYTES..=MOST).contains(&self.window.bytes()));
        }
        done as f64 / (self.now - start)
    }
}

/// 2.5 GB/s, from 8 MB in flight on, and a tenth of it beyond `above` bytes.
fn collapsing(above: u64) -> impl Fn(f64, u64) -> f64 {
    move |_, in_flight| {
        let rate = 2.5e9 * (in_flight as f64 / (8 * MB) as f64).min(1.0);
        if in_flight > above { rate / 10.0 } else { rate }
    }
}

#[test]
fn a_rate_that_collapses_above_a_depth_is_left_alone_there() {
    for seed in 0..20 {
        for (above, len) in [(4, MB), (5, 2 * MB), (8, MB), (10, 2 * MB)]
            .into_iter()
            .chain([12, 20, 30, 60, 120].map(|above| (above, READ_BYTES)))
        {
            let rate = collapsing(above * MB);
            let best = (1..64).map(|reads| rate(0.0, reads * len)).fold(0.0, f64::max);
            let mut drive = Drive::new(rate, seed);
            drive.read(4 << 30, len);
            let rate = drive.read(20 << 30, len);
            assert!(
                rate > 0.8 * best,
                "{rate:.3e} of {best:.3e}, reads of {len}, collapse above {above} MB, seed {seed}"
            );
        }
    }
}

#[test]
fn the_start_is_below_the_collapse_that_was_measured() {
    // 64 reads of 3.5 MB ran at a tenth of what 16 did; no byte is read beyond 56 MB in the first quarter of a GB.
    let mut drive = Drive::new(collapsing(56 * MB), 3);
    assert_eq!(drive.window.mean_rate(), None);
    assert!(drive.read(256 * MB, READ_BYTES) > 2.2e9);
    let mean = drive.window.mean_rate().unwrap();
    assert!((2.2e9..2.8e9).contains(&mean), "{mean:.3e}");
}

#[test]
fn a_drive_that_wants_depth_gets_it() {
    let deep = |_: f64, in_flight: u64| 7e9 * (in_flight as f64 / (160 * MB) as f64).min(1.0);
    for seed in 0..20 {
        let mut drive = Drive::new(deep, seed);
        drive.read(8 << 30, READ_BYTES);
        let rate = drive.read(8 << 30, READ_BYTES);
        assert!(rate > 0.8 * 7e9, "{rate:.3e}, window {}, seed {seed}", drive.window.bytes());
    }
}

#[test]
fn a_rate_that_drifts_does_not_move_the_window_far() {
    let knee = |in_flight: u64| (in_flight as f64 / (16 * MB) as f64).min(1.0);
    // Other guests take up to two thirds, within seconds.
    let drifting = |now: f64, in_flight: u64| knee(in_flight) * 2.5e9 * (0.67 + 0.33 * (now / 3.0).sin());
    for seed in 0..20 {
        let mut drive = Drive::new(drifting, seed);
        let start = drive.now;
        drive.read(40 << 30, READ_BYTES);
        let took = drive.now - start;
        let mut best = 0.0;
        let mut steps = 0;
        while start + (steps as f64) * 0.01 < start + took {
            best += 0.01 * drifting(start + steps as f64 * 0.01, MOST);
            steps += 1;
        }
        let share = (40u64 << 30) as f64 / best;
        assert!(share > 0.85, "{share} of the bytes that were possible, seed {seed}");
    }
}

#[test]
fn a_drive_that_halves_its_rate_for_good_keeps_the_window() {
    let halved = |now: f64, in_flight: u64| {
        let rate = 2.5e9 * (in_flight as f64 / (20 * MB) as f64).min(1.0);
        if now > 1.0 { rate / 2.0 } else { rate }
    };
    let mut drive = Drive::new(halved, 1);
    drive.read(10 << 30, READ_BYTES);
    let rate = drive.read(10 << 30, READ_BYTES);
    assert!(rate > 0.85 * 1.25e9, "{rate:.3e}, window {}", drive.window.bytes());
}

#[test]
fn reads_that_fit_into_the_window_do_not_move_it() {
    // A token's misses on a drive that collapses far below the window.
    let mut drive = Drive::new(collapsing(9 * MB), 1);
    for _ in 0..1000 {
        drive.read(6 * READ_BYTES, READ_BYTES);
        assert_eq!(drive.window.bytes(), START_BYTES);
    }
}

#[test]
fn an_interrupted_trial_is_undone() {
    let mut drive = Drive::new(collapsing(1 << 40), 1);
    for _ in 0..1000 {
        // Long enough for a trial to begin, and too short to finish it.
        drive.read(120 * MB, READ_BYTES);
        assert_eq!(drive.window.bytes(), START_BYTES);
    }
}

#[test]
fn one_read_always_starts_and_where_the_first_matter_few_go_at_a_time() {
    for (goal, reads) in [(ReadGoal::Throughput, 6), (ReadGoal::Arrival, 1)] {
        let window = ReadWindow::new(goal);
        let allowed = (0..64).take_while(|reads| window.allows(reads * READ_BYTES, READ_BYTES)).count();
        assert_eq!(allowed, reads, "{goal:?}");
        assert!(window.allows(0, u64::MAX) && !window.allows(1, u64::MAX) && !window.allows(START_BYTES, 1));
    }
}

#[test]
fn where_the_first_reads_matter_the_smallest_window_of_a_rate_is_found() {
    for (needed, start) in [(8, 100), (8, 4), (60, 4), (2, 4)] {
        for seed in 0..20 {
            let rate = |_: f64, in_flight: u64| 2.5e9 * (in_flight as f64 / (needed * MB) as f64).min(1.0);
            let mut drive = Drive::with(ReadGoal::Arrival, rate, seed);
            drive.window = ReadWindow::starting_at(start * MB, ReadGoal::Arrival);
            drive.read(20 << 30, READ_BYTES);
            assert!(drive.window.bytes() <= 4 * needed.max(2) * MB, "{needed}: {}", drive.window.bytes());
            let rate = drive.read(4 << 30, READ_BYTES);
            assert!(rate > 0.8 * 2.5e9, "{needed} MB from {start} MB: {rate:.3e}, seed {seed}");
        }
    }
}

#[test]
fn reads_larger_than_the_window_go_two_at_a_time_where_that_is_faster() {
    let most = 64 * 100 * MB;
    let rate = |in_flight: u64| 2e9 * (in_flight as f64 / (200 * MB) as f64).min(1.0);
    let (mut window, mut now, mut in_flight) = (ReadWindow::new(ReadGoal::Throughput), 0.0, VecDeque::new());
    for _ in 0..200 {
        while window.allows(in_flight.iter().sum(), 100 * MB) {
            in_flight.push_back(100 * MB);
        }
        now += (100 * MB) as f64 / rate(in_flight.iter().sum());
        let len = in_flight.pop_front().unwrap();
        window.completed(len, Duration::from_secs_f64(now), true, most);
    }
    assert!(window.bytes() >= 200 * MB, "{}", window.bytes());
}

#[test]
fn reads_of_any_size_keep_the_window_within_its_bounds() {
    let mut random = Rng::new(9);
    for seed in 0..50 {
        let rates: Vec<f64> = (0..64).map(|_| 1e8 + 5e9 * random.unit()).collect();
        let mut drive = Drive::new(|_, in_flight: u64| rates[(in_flight / (4 * MB)) as usize % 64], seed);
        for _ in 0..30 {
            let len = 4096 + random.bits() % (64 * MB);
            // `read` checks the bounds after each completion.
            drive.read(random.bits() % (1 << 30), len);
        }
    }
}

#[test]
fn completions_without_time_between_them_are_no_fault() {
    let mut window = ReadWindow::new(ReadGoal::Throughput);
    for _ in 0..100_000 {
        window.completed(READ_BYTES, Duration::ZERO, true, MOST);
        assert!((FLOOR_BYTES..=MOST).contains(&window.bytes()));
    }
    window.completed(u64::MAX / 4, Duration::ZERO, true, 0);
    assert!(window.bytes() >= FLOOR_BYTES);
}
