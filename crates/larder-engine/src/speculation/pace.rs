//! How many tokens to draft: more while draft tokens are accepted, none while they cost more time than they save.

use std::time::Duration;

use crate::sequence::DRAFT_MAX;

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

/// Steps without draft tokens, which those of every source are compared with.
pub struct PlainSteps {
    /// Whether the time decides; otherwise only how many draft tokens are accepted.
    timed: bool,
    recent: Yield,
    /// Steps with draft tokens since the last one.
    drafted: usize,
}

/// Chooses the number of draft tokens of one source from the time that steps take and the tokens that they yield.
pub struct Pace {
    drafts: usize,
    drafted: Yield,
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

impl PlainSteps {
    /// Drafts are made as long as they save time if `timed`, else always.
    pub fn new(timed: bool) -> Self {
        PlainSteps { timed, recent: Yield::default(), drafted: 0 }
    }

    /// Whether the next step has to be one of them, so that it is known what they take now.
    pub fn is_due(&self) -> bool {
        self.timed && (self.recent.steps < PLAIN_STEPS - 0.5 || self.drafted >= STEPS_IN_A_ROW)
    }

    /// One of them took `time`.
    pub fn step(&mut self, time: Duration) {
        self.recent.add(1, time);
        self.drafted = 0;
    }
}

impl Default for Pace {
    fn default() -> Self {
        Pace { drafts: FIRST_DRAFT, drafted: Yield::default(), pause: 0, next_pause: FIRST_PAUSE }
    }
}

impl Pace {
    /// How many tokens the next step may draft; asked when the source has something at hand.
    pub fn next(&mut self) -> usize {
        if self.pause > 0 {
            self.pause -= 1;
            return 0;
        }
        self.drafts
    }

    /// A step in which `accepted` of `drafts` draft tokens of the source were accepted took `time`, with the drafting;
    /// of those asked for, the source may have drafted none.
    pub fn drafted_step(&mut self, drafts: usize, accepted: usize, time: Duration, plain: &mut PlainSteps) {
        plain.drafted += 1;
        self.drafted.add(1 + accepted, time);
        if drafts > 0 && accepted == drafts {
            self.drafts = (self.drafts * 2).min(DRAFT_MAX);
        } else if accepted * 2 < drafts {
            self.drafts = (self.drafts / 2).max(1);
        }
        if !plain.timed || self.drafted.steps < trial() {
            return;
        }
        if self.drafted.seconds_per_token() < plain.recent.seconds_per_token() {
            self.next_pause = FIRST_PAUSE;
            return;
        }
        (self.pause, self.next_pause) = (self.next_pause, (self.next_pause * 2).min(LONGEST_PAUSE));
        (self.drafts, self.drafted) = (FIRST_DRAFT, Yield::default());
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

    /// Runs `opportunities`; a step of n draft tokens takes `cost(n)` and has `accepts(n)` of them accepted. Returns
    /// the tokens drafted, those that were accepted, and all time.
    fn run(
        (plain, pace): &mut (PlainSteps, Pace),
        opportunities: usize,
        cost: impl Fn(usize) -> u32,
        accepts: impl Fn(usize) -> usize,
    ) -> (usize, usize, u32) {
        let (mut drafted, mut accepted, mut time) = (0, 0, 0);
        for _ in 0..opportunities {
            let drafts = if plain.is_due() { 0 } else { pace.next() };
            time += cost(drafts);
            match drafts {
                0 => plain.step(cost(0) * MS),
                n => pace.drafted_step(n, accepts(n), cost(n) * MS, plain),
            }
            drafted += drafts;
            accepted += if drafts > 0 { accepts(drafts) } else { 0 };
        }
        (drafted, accepted, time)
    }

    fn new(timed: bool) -> (PlainSteps, Pace) {
        (PlainSteps::new(timed), Pace::default())
    }

    #[test]
    fn accepted_tokens_become_more_until_the_most() {
        let mut pace = new(true);
        let (_, accepted, time) = run(&mut pace, 100, |n| 10 + 2 * n as u32, |n| n);
        assert_eq!(pace.1.drafts, DRAFT_MAX);
        assert!(f64::from(time) / (100.0 + accepted as f64) < 0.3 * 10.0, "{accepted} in {time} ms");
    }

    #[test]
    fn rejected_tokens_nearly_end() {
        // Twice the time for nothing: an eternity of it costs a bounded part.
        let (drafted, _, time) = run(&mut new(true), 4096, |n| if n > 0 { 20 } else { 10 }, |_| 0);
        assert!(drafted > 0, "it tries again");
        assert!(f64::from(time) < 1.02 * 4096.0 * 10.0, "{time} ms");
    }

    #[test]
    fn accepted_tokens_that_save_no_time_nearly_end() {
        // From the SSD: every token reads its own experts.
        let (drafted, accepted, time) = run(&mut new(true), 4096, |n| 11 * (1 + n as u32), |n| n);
        assert!(drafted > 0 && drafted == accepted);
        assert!(f64::from(time) < 1.02 * 11.0 * (4096.0 + accepted as f64), "{time} ms, {accepted}");
    }

    #[test]
    fn what_begins_to_pay_is_found_again() {
        let mut pace = new(true);
        run(&mut pace, 500, |n| 10 * (1 + n as u32) + 1, |n| n);
        let (drafted, ..) = run(&mut pace, 600, |n| 10 + n as u32, |n| n);
        assert!(drafted > 1000, "{drafted}");
    }

    #[test]
    fn without_time_only_the_number_follows_the_right_ones() {
        let mut pace = new(false);
        assert_eq!(pace.1.next(), FIRST_DRAFT);
        run(&mut pace, 50, |_| 1000, |n| n);
        assert_eq!(pace.1.next(), DRAFT_MAX);
        run(&mut pace, 50, |_| 1000, |_| 0);
        assert_eq!(pace.1.next(), 1);
    }

    #[test]
    fn a_source_that_drafts_nothing_is_paused_for_its_time() {
        let (mut plain, mut pace) = new(true);
        (0..2).for_each(|_| plain.step(10 * MS));
        assert_eq!(pace.next(), FIRST_DRAFT);
        (0..3).for_each(|_| pace.drafted_step(0, 0, 12 * MS, &mut plain));
        assert_eq!((pace.next(), pace.drafts), (0, FIRST_DRAFT));
    }

    #[test]
    fn each_source_is_compared_with_the_same_plain_steps() {
        let (mut plain, mut slow, mut fast) = (PlainSteps::new(true), Pace::default(), Pace::default());
        let mut tokens = [0; 3];
        for _ in 0..400 {
            // The slow source is asked first, as long as it is not paused.
            let due = plain.is_due();
            let of_slow = if due { 0 } else { slow.next() };
            let of_fast = if due || of_slow > 0 { 0 } else { fast.next() };
            match (of_slow, of_fast) {
                (0, 0) => plain.step(10 * MS),
                (0, n) => fast.drafted_step(n, n, (10 + n as u32) * MS, &mut plain),
                (n, _) => slow.drafted_step(n, n, (12 + 10 * n as u32) * MS, &mut plain),
            }
            tokens = [tokens[0] + of_slow, tokens[1] + of_fast, tokens[2] + usize::from(of_slow + of_fast == 0)];
        }
        let [of_slow, of_fast, plain] = tokens;
        assert!(of_fast > 4000 && of_slow < 200 && (12..30).contains(&plain), "{tokens:?}");
    }
}
