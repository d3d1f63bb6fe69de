//! Speculation (speculative decoding): drafts the tokens that follow and computes several in one step. The sampler draws each
//! token from the logits that it would have without draft tokens, so that the text is the same; a token that differs from its draft
//! ends the step, and what was computed behind it is dropped.

mod lookup;
mod pace;

use std::time::Duration;

pub use pace::DRAFT_MAX;

use lookup::PromptLookup;
use pace::Pace;

/// Where draft tokens come from, and when they are made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Speculation {
    /// None.
    #[default]
    Off,
    /// Prompt lookup, always.
    Lookup,
    /// Prompt lookup, as long as a token takes less time with it than without.
    Auto,
}

/// Every kind of speculation with its name.
const KINDS: [(Speculation, &str); 3] =
    [(Speculation::Off, "off"), (Speculation::Lookup, "lookup"), (Speculation::Auto, "auto")];

/// Names no kind of speculation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be off, lookup or auto")]
pub struct SpeculationError;

impl std::str::FromStr for Speculation {
    type Err = SpeculationError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        KINDS.iter().find(|(_, name)| *name == text).map(|(kind, _)| *kind).ok_or(SpeculationError)
    }
}

impl std::fmt::Display for Speculation {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        let name = KINDS.iter().find(|(kind, _)| kind == self).map_or("", |(_, name)| *name);
        f.pad(name)
    }
}

/// How many tokens were drafted, and how many of them were accepted.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct DraftCounts {
    /// Steps with draft tokens.
    pub steps: usize,
    /// Tokens drafted.
    pub drafted: usize,
    /// Tokens of these that the text has.
    pub accepted: usize,
}

/// Drafts the tokens of one text.
pub struct Speculator {
    /// `None` if nothing is drafted.
    source: Option<(PromptLookup, Pace)>,
    counts: DraftCounts,
    /// Whether the time of the next step is no measure, because it computes older tokens again.
    untimed: bool,
}

impl Speculator {
    /// A speculator for a new text.
    pub fn new(speculation: Speculation) -> Self {
        let source = match speculation {
            Speculation::Off => None,
            Speculation::Lookup => Some(Pace::new(false)),
            Speculation::Auto => Some(Pace::new(true)),
        };
        let source = source.map(|pace| (PromptLookup::default(), pace));
        Speculator { source, counts: DraftCounts::default(), untimed: false }
    }

    /// Drafts at most `room` tokens behind the tokens `before` and the token `last`. They begin with those of the last call.
    pub fn draft(&mut self, before: &[u32], last: u32, room: usize) -> Vec<u32> {
        let Some((lookup, pace)) = &mut self.source else { return Vec::new() };
        let Some(place) = lookup.find(before, last).filter(|_| room > 0) else { return Vec::new() };
        // Short matches are often chance.
        let most = pace.next().min(place.matching).min(room);
        // What is repeated right now goes on in the same way.
        place.following.iter().cycle().take(most).copied().collect()
    }

    /// A step took `time` and had `drafts` draft tokens, of which `accepted` were accepted.
    pub fn stepped(&mut self, drafts: usize, accepted: usize, time: Duration) {
        let Some((_, pace)) = self.source.as_mut().filter(|_| !std::mem::take(&mut self.untimed)) else { return };
        match drafts {
            0 => pace.plain_step(time),
            _ => pace.drafted_step(drafts, accepted, time),
        }
        let DraftCounts { steps, drafted, accepted: all } = &mut self.counts;
        (*steps, *drafted, *all) = (*steps + usize::from(drafts > 0), *drafted + drafts, *all + accepted);
    }

    /// Takes note that tokens of the sequence were dropped.
    pub fn shifted(&mut self) {
        self.source.iter_mut().for_each(|(lookup, _)| lookup.clear());
        self.untimed = true;
    }

    /// All draft tokens so far.
    pub fn counts(&self) -> DraftCounts {
        self.counts
    }
}

/// The logits of a step: a row for its first token, and one for each draft behind that. A row is used when the draft tokens before
/// it are confirmed.
#[derive(Default)]
pub struct DraftedStep {
    logits: Vec<f32>,
    drafts: Vec<u32>,
    confirmed: usize,
}

impl DraftedStep {
    /// A step with these draft tokens and the logits `[1 + drafts, vocab]`.
    pub fn new(logits: Vec<f32>, drafts: Vec<u32>) -> Self {
        DraftedStep { logits, drafts, confirmed: 0 }
    }

    /// The logits behind the last token that is confirmed.
    pub fn row(&mut self) -> &mut [f32] {
        let vocab = self.logits.len() / (1 + self.drafts.len());
        &mut self.logits[self.confirmed * vocab..][..vocab]
    }

    /// Takes note of the next token of the text. Returns whether it was drafted, so that its logits are there.
    pub fn confirm(&mut self, id: u32) -> bool {
        let accepted = self.drafts.get(self.confirmed) == Some(&id);
        self.confirmed += usize::from(accepted);
        accepted
    }

    /// Tokens drafted.
    pub fn drafts(&self) -> usize {
        self.drafts.len()
    }

    /// Drafts that were accepted.
    pub fn accepted(&self) -> usize {
        self.confirmed
    }

    /// Drafts that are not confirmed, or wrong: the last tokens of the sequence.
    pub fn open(&self) -> usize {
        self.drafts.len() - self.confirmed
    }

    /// Whether there are no logits.
    pub fn is_empty(&self) -> bool {
        self.logits.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (kind, name) in KINDS {
            assert_eq!((name.parse(), kind.to_string()), (Ok(kind), name.to_owned()));
        }
        assert_eq!("mtp".parse::<Speculation>(), Err(SpeculationError));
    }

    #[test]
    fn rows_follow_confirmed_tokens() {
        let mut step = DraftedStep::new(vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5], vec![7, 8]);
        assert_eq!((step.row().to_vec(), step.open()), (vec![0.0, 0.5], 2));
        assert!(step.confirm(7));
        assert_eq!((step.row().to_vec(), step.open()), (vec![1.0, 1.5], 1));
        assert!(!step.confirm(9));
        assert_eq!((step.accepted(), step.open(), step.drafts()), (1, 1, 2));
        let mut plain = DraftedStep::new(vec![3.0], vec![]);
        assert_eq!((plain.row().to_vec(), plain.confirm(1), plain.open()), (vec![3.0], false, 0));
    }

    #[test]
    fn drafts_are_what_followed_and_stay_in_the_room() {
        let mut speculator = Speculator::new(Speculation::Lookup);
        assert_eq!(speculator.draft(&[1, 2, 3, 4, 5, 6, 1, 2], 3, 9), [4, 5]);
        assert_eq!(speculator.draft(&[1, 2, 3, 4, 5, 6, 1, 2, 3], 4, 1), [5]);
        speculator.stepped(2, 2, Duration::from_millis(1));
        assert_eq!(speculator.draft(&[1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 5, 9), [6, 1, 2, 3]);
        assert_eq!(speculator.counts(), DraftCounts { steps: 1, drafted: 2, accepted: 2 });
        speculator.shifted();
        assert!(speculator.draft(&[1, 2, 3], 4, 9).is_empty());
        assert!(Speculator::new(Speculation::Off).draft(&[1, 1, 1, 1], 1, 9).is_empty());
        let repeated = Speculator::new(Speculation::Lookup).draft(&[7, 8, 7, 8, 7, 8], 7, 9);
        assert_eq!(repeated, [8, 7]);
    }
}
