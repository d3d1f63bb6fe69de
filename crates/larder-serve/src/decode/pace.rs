//! The pace of prompts beside requests that decode.
//!
//! A step with prompt tokens takes a time that hardly depends on their number, in which the experts of all of them are
//! read, and some time for each of them. So prompts join in chunks that are worth the first: a chunk takes the step
//! time, or twice that fixed time if that is more. Then as much time belongs to the requests that decode alone.

use std::time::Duration;

/// Prompts with no more tokens to compute do not wait for a chunk.
pub const SHORT_PROMPT_TOKENS: usize = 64;
/// Tokens of a chunk before any was measured, and the fewest.
const FIRST_CHUNK_TOKENS: usize = 64;
const LEAST_CHUNK_TOKENS: usize = 16;
/// The most, which no step holds.
const TOKENS_MAX: usize = 1 << 20;
/// Steps between two chunks that take more than twice the step time: so 95 of 100 tokens wait for less than that.
const LONG_CHUNK_STEPS: usize = 20;
/// The weight of earlier measurements when another one comes.
const KEPT_WEIGHT: f64 = 0.9;

/// How many prompt tokens join a step of decoding requests.
pub struct PromptPace {
    step_time: Duration,
    tokens: usize,
    /// Whether the next chunk has only two thirds of the tokens: chunks of one size alone do not tell what each costs.
    is_short: bool,
    cost: ChunkCost,
    /// Time, and steps, of the requests that decode before the next chunk.
    owed: Duration,
    owed_steps: usize,
}

impl PromptPace {
    /// For steps of `step_time`.
    pub fn new(step_time: Duration) -> Self {
        let (cost, tokens) = (ChunkCost::default(), FIRST_CHUNK_TOKENS);
        PromptPace { step_time, tokens, is_short: false, cost, owed: Duration::ZERO, owed_steps: 0 }
    }

    /// Takes the time of a step in which requests decoded, with `prompt_tokens` tokens of prompts.
    pub fn measured(&mut self, prompt_tokens: usize, took: Duration) {
        if prompt_tokens == 0 {
            self.owed = self.owed.saturating_sub(took);
            self.owed_steps = self.owed_steps.saturating_sub(1);
            return;
        }
        self.owed += took;
        if took > 2 * self.step_time {
            self.owed_steps = LONG_CHUNK_STEPS;
        }
        self.is_short = !self.is_short;
        self.cost.add(prompt_tokens as f64, took.as_secs_f64());
        if let Some((fixed, each)) = self.cost.line() {
            let time = self.step_time.as_secs_f64().max(2.0 * fixed);
            let worth = ((time - fixed) / each.max(f64::MIN_POSITIVE)) as usize;
            let worth = worth.clamp(self.tokens * 3 / 4, (self.tokens * 3 / 2).min(TOKENS_MAX));
            self.tokens = worth.max(LEAST_CHUNK_TOKENS);
        }
    }

    /// Prompt tokens of a step with `decoding` requests that decode, and at most `most` tokens in all, beside those of
    /// short prompts.
    pub fn room(&self, decoding: usize, most: usize) -> usize {
        let tokens = if self.is_short { self.tokens * 2 / 3 } else { self.tokens };
        match decoding {
            0 => most,
            _ if self.owed > Duration::ZERO || self.owed_steps > 0 => 0,
            _ => tokens.min(most - decoding),
        }
    }
}

/// Times of chunks, of which later ones count more.
#[derive(Default)]
struct ChunkCost {
    weight: f64,
    tokens: f64,
    time: f64,
    tokens_squared: f64,
    tokens_time: f64,
}

impl ChunkCost {
    fn add(&mut self, tokens: f64, time: f64) {
        let add = |sum: &mut f64, value: f64| *sum = *sum * KEPT_WEIGHT + value;
        add(&mut self.weight, 1.0);
        add(&mut self.tokens, tokens);
        add(&mut self.time, time);
        add(&mut self.tokens_squared, tokens * tokens);
        add(&mut self.tokens_time, tokens * time);
    }

    /// The line through them: a fixed time and one for each token, in seconds. `None` if they are of one size.
    fn line(&self) -> Option<(f64, f64)> {
        let [mean, mean_time] = [self.tokens, self.time].map(|sum| sum / self.weight);
        let variance = self.tokens_squared / self.weight - mean * mean;
        let each = (self.tokens_time / self.weight - mean * mean_time) / variance;
        let each = each.clamp(0.0, mean_time / mean);
        (variance > 0.01 * mean * mean).then_some((mean_time - each * mean, each))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP_TIME: Duration = Duration::from_millis(250);

    /// A server that decodes beside a long prompt, with steps that take `fixed` and `each` for a token of the prompt,
    /// by a factor that changes: tokens of the longest of the last two chunks, and the share of the time of chunks.
    fn settled(fixed: Duration, each: Duration, factor: impl Fn(usize) -> f64) -> (usize, f64) {
        let mut pace = PromptPace::new(STEP_TIME);
        let (mut chunks, mut prompts, mut all) = ([0; 2], 0.0, 0.0);
        for step in 0..4000 {
            let tokens = pace.room(1, 4096);
            let took = if tokens == 0 { Duration::from_millis(20) } else { fixed + each * tokens as u32 };
            let took = took.mul_f64(factor(step));
            pace.measured(tokens, took);
            all += took.as_secs_f64();
            if tokens > 0 {
                (chunks, prompts) = ([chunks[1], tokens], prompts + took.as_secs_f64());
            }
        }
        (chunks[0].max(chunks[1]), prompts / all)
    }

    #[test]
    fn a_chunk_takes_the_step_time_or_twice_what_is_fixed() {
        let millis = Duration::from_millis;
        let noise = |step: usize| 1.0 + 0.2 * ((step * 7919 % 13) as f64 / 6.0 - 1.0);
        for (fixed, each, want) in [
            (millis(50), millis(1), 200),
            (millis(200), millis(1), 200),
            (millis(400), millis(2), 200),
            (millis(2000), millis(1), 2000),
            (millis(0), millis(1), 250),
            (millis(10), millis(50), LEAST_CHUNK_TOKENS),
        ] {
            let (tokens, share) = settled(fixed, each, |_| 1.0);
            assert!(
                tokens.abs_diff(want) <= want / 20,
                "{tokens} tokens, {want} are worth {fixed:?} and {each:?} each"
            );
            assert!((0.4..0.6).contains(&share), "{share}");
            let (tokens, share) = settled(fixed, each, noise);
            assert!((want / 2..=2 * want).contains(&tokens), "{tokens} tokens with noise, not about {want}");
            assert!((0.4..0.6).contains(&share), "{share}");
        }
        assert_eq!(settled(millis(1), Duration::ZERO, |_| 1.0).0, 4095, "all that a step holds");
    }

    #[test]
    fn ninety_five_of_a_hundred_tokens_wait_for_less_than_two_step_times() {
        let mut pace = PromptPace::new(STEP_TIME);
        let mut gaps: Vec<Duration> = Vec::new();
        for _ in 0..2000 {
            let tokens = pace.room(1, 4096);
            // Reads of all experts take a second, and those of a token 200 ms.
            let took =
                if tokens == 0 { Duration::from_millis(200) } else { Duration::from_millis(1000 + tokens as u64) };
            pace.measured(tokens, took);
            gaps.push(took);
        }
        gaps.sort_unstable();
        assert!(gaps[gaps.len() * 95 / 100] <= 2 * STEP_TIME);
        assert!(gaps[gaps.len() - 1] > 2 * STEP_TIME, "chunks that are worth their reads are longer");
    }

    #[test]
    fn few_tokens_do_not_show_that_more_would_fit_and_one_slow_step_does_not_stay() {
        let mut pace = PromptPace::new(STEP_TIME);
        pace.measured(3, Duration::from_millis(1));
        pace.measured(0, Duration::from_secs(1));
        assert_eq!((pace.room(1, 512), pace.room(4, 16), pace.room(0, 512)), (42, 12, 512));
        let slow = |step: usize| if step == 300 { 40.0 } else { 1.0 };
        let (tokens, _) = settled(Duration::from_millis(50), Duration::from_millis(1), slow);
        assert!((180..=220).contains(&tokens), "{tokens}");
    }
}
