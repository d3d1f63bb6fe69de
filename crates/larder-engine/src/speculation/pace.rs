//! How many tokens to draft: more while draft tokens are accepted, none while they cost more time than they save.

use std::time::Duration;

/// The most tokens that are drafted at once.
pub const DRAFT_MAX: usize = 16;

/// Tokens that are drafted at first, and after a pause.
const FIRST_DRAFT: usize = 2;
/// Steps without draft tokens that are measured before the first draft.
const PLAIN_STEPS: f64 = 2.0;
/// Steps with draft tokens after which their time is judged.
const TRIAL_STEPS: f64 = 3.0;
/// After this many steps with draft tokens comes one without, to measure what it takes now.
const STEPS_IN_A_ROW: usize = 32;
/// Opportunities that the first pause lets go by; each further pause is twice as long.
const FIRST_PAUSE: usize = 8;
const LONGEST_PAUSE: usize = 256;
/// What a measurement weighs after another one.
const DECAY: f64 = 0.85;

/// Chooses the number of draft tokens from the time that steps take and the tokens that they yield.
pub struct Pace {
    /// Whether the time decides as well; otherwise only how many draft tokens are accepted.
    timed: bool,
    drafts: usize,
    plain: Yield,
    drafted: Yield,
    in_a_row: usize,
    /// Opportunities to let go by.
    pause: usize,
    next_pause: usize,
}

/// Recent steps: their time and the tokens that they yielded.
#[derive(Clone, Copy, Default)]
struct Yield {
    steps: f64,
    seconds: f64,
    tokens: f64,
}

impl Yield {
    fn add(&mut self, tokens: usize, time: Duration) {
        self.steps = self.steps * DECAY + 1.0;
        self.seconds = self.seconds * DECAY + time.as_secs_f64();
        self.tokens = self.tokens * DECAY + tokens as f64;
    }

    fn seconds_per_token(&self) -> f64 {
        self.seconds / self.tokens
    }
}

impl Pace {
    /// Drafts as long as they save time if `timed`, else always.
    pub fn new(timed: bool) -> Self {
        let (plain, drafted) = (Yield::default(), Yield::default());
        Pace { timed, drafts: FIRST_DRAFT, plain, drafted, in_a_row: 0, pause: 0, next_pause: FIRST_PAUSE }
    }

    /// How many tokens the next step may draft; asked when there is something to draft.
    pub fn next(&mut self) -> usize {
        if self.timed && self.plain.steps < PLAIN_STEPS - 0.5 {
            return 0;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        if self.timed && self.in_a_row >= STEPS_IN_A_ROW { 0 } else { self.drafts }
    }

    /// A step without draft tokens took `time`.
    pub fn plain_step(&mut self, time: Duration) {
        self.plain.add(1, time);
        self.in_a_row = 0;
    }

    /// A step in which `accepted` of `drafts` draft tokens were accepted took `time`.
    pub fn drafted_step(&mut self, drafts: usize, accepted: usize, time: Duration) {
        self.in_a_row += 1;
        self.drafted.add(1 + accepted, time);
        if accepted == drafts {
            self.drafts = (self.drafts * 2).min(DRAFT_MAX);
        } else if accepted * 2 < drafts {
            self.drafts = (self.drafts / 2).max(1);
        }
        if !self.timed || self.drafted.steps < trial() {
            return;
        }
        if self.drafted.seconds_per_token() < self.plain.seconds_per_token() {
            self.next_pause = FIRST_PAUSE;
            return;
        }
        (self.pause, self.next_pause) = (self.next_pause, (self.next_pause * 2).min(LONGEST_PAUSE));
        (self.drafts, self.drafted, self.in_a_row) = (FIRST_DRAFT, Yield::default(), 0);
    }
}

/// What [`Yield::steps`] is after the steps of a trial.
fn trial() -> f64 {
    (1.0 - DECAY.powf(TRIAL_STEPS)) / (1.0 - DECAY) - 1e-9
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Runs `opportunities`; a step of n draft tokens takes `cost(n)` and has `accepts(n)` of them accepted. Returns the tokens drafted, those
    /// that were accepted, and all time.
    fn run(
        pace: &mut Pace,
        opportunities: usize,
        cost: impl Fn(usize) -> u32,
        accepts: impl Fn(usize) -> usize,
    ) -> (usize, usize, u32) {
        let (mut drafted, mut accepted, mut time) = (0, 0, 0);
        for _ in 0..opportunities {
            let drafts = pace.next();
            time += cost(drafts);
            match drafts {
                0 => pace.plain_step(cost(0) * MS),
                n => pace.drafted_step(n, accepts(n), cost(n) * MS),
            }
            drafted += drafts;
            accepted += if drafts > 0 { accepts(drafts) } else { 0 };
        }
        (drafted, accepted, time)
    }

    #[test]
    fn accepted_tokens_become_more_until_the_most() {
        let mut pace = Pace::new(true);
        let (_, accepted, time) = run(&mut pace, 100, |n| 10 + 2 * n as u32, |n| n);
        assert_eq!(pace.drafts, DRAFT_MAX);
        assert!(f64::from(time) / (100.0 + accepted as f64) < 0.3 * 10.0, "{accepted} in {time} ms");
    }

    #[test]
    fn rejected_tokens_nearly_end() {
        // Twice the time for nothing: an eternity of it costs a bounded part.
        let (drafted, _, time) = run(&mut Pace::new(true), 4096, |n| if n > 0 { 20 } else { 10 }, |_| 0);
        assert!(drafted > 0, "it tries again");
        assert!(f64::from(time) < 1.02 * 4096.0 * 10.0, "{time} ms");
    }

    #[test]
    fn accepted_tokens_that_save_no_time_nearly_end() {
        // From the SSD: every token reads its own experts.
        let (drafted, accepted, time) = run(&mut Pace::new(true), 4096, |n| 11 * (1 + n as u32), |n| n);
        assert!(drafted > 0 && drafted == accepted);
        assert!(f64::from(time) < 1.02 * 11.0 * (4096.0 + accepted as f64), "{time} ms, {accepted}");
    }

    #[test]
    fn what_begins_to_pay_is_found_again() {
        let mut pace = Pace::new(true);
        run(&mut pace, 500, |n| 10 * (1 + n as u32) + 1, |n| n);
        let (drafted, ..) = run(&mut pace, 600, |n| 10 + n as u32, |n| n);
        assert!(drafted > 1000, "{drafted}");
    }

    #[test]
    fn without_time_only_the_number_follows_the_right_ones() {
        let mut pace = Pace::new(false);
        assert_eq!(pace.next(), FIRST_DRAFT);
        run(&mut pace, 50, |_| 1000, |n| n);
        assert_eq!(pace.next(), DRAFT_MAX);
        run(&mut pace, 50, |_| 1000, |_| 0);
        assert_eq!(pace.next(), 1);
    }
}
