//! Speculation (speculative decoding): drafts the tokens that follow and computes several in one step. The sampler
//! draws each token from the logits that it would have without draft tokens, so that the text is the same; a token that
//! differs from its draft ends the step, and what was computed behind it is dropped.

mod draft_model;
mod lookup;
mod mtp;
mod pace;
mod source;

use std::time::Duration;

use larder_model::{Logits, LogitsRow, ModelError, Tap};

pub use draft_model::DraftModel;
pub use source::{Draft, DraftSource, SharedSource, TextSoFar};

use lookup::{NGRAM, PromptLookup};
use mtp::MtpSource;
use pace::{Pace, PlainSteps};

use crate::sequence::{DRAFT_MAX, OwnLayer};

/// How many tokens must have occurred earlier for prompt lookup to go before other sources.
const SURE_MATCH: usize = 8;
/// A source that had not seen more tokens than these was behind: the time of the step is no measure of the next ones.
const UNSEEN_MAX: usize = DRAFT_MAX + 1;

/// Where draft tokens come from, and when they are made.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum Speculation {
    /// None.
    #[default]
    Off,
    /// Prompt lookup, always.
    Lookup,
    /// A draft model, always.
    Draft,
    /// The model's own layer for multi-token prediction, always.
    Mtp,
    /// Prompt lookup, and that layer and a draft model if there are any, each as long as a token takes less time with
    /// it than without.
    Auto,
}

/// Every kind of speculation with its name.
const KINDS: [(Speculation, &str); 5] = [
    (Speculation::Off, "off"),
    (Speculation::Lookup, "lookup"),
    (Speculation::Draft, "draft"),
    (Speculation::Mtp, "mtp"),
    (Speculation::Auto, "auto"),
];

/// Names no kind of speculation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be off, lookup, draft, mtp or auto")]
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

/// How the tokens of a text are drafted.
#[derive(Clone, Default)]
pub struct Drafting {
    /// Where they come from, and when.
    pub speculation: Speculation,
    /// The draft model, if there is one.
    pub model: Option<SharedSource>,
    /// Whether the model is used with its layer for multi-token prediction.
    pub mtp: bool,
}

impl From<Speculation> for Drafting {
    /// Without a draft model and without multi-token prediction.
    fn from(speculation: Speculation) -> Self {
        Drafting { speculation, model: None, mtp: false }
    }
}

impl Drafting {
    /// The sources, in the order in which they are asked.
    fn sources(&self) -> Vec<Box<dyn DraftSource>> {
        let lookup = |least| Box::new(PromptLookup::new(least)) as Box<dyn DraftSource>;
        let own = self.mtp.then(|| Box::new(MtpSource) as Box<dyn DraftSource>);
        let model = self.model.clone().map(|model| Box::new(model) as Box<dyn DraftSource>);
        match self.speculation {
            Speculation::Off => vec![],
            Speculation::Lookup => vec![lookup(NGRAM)],
            Speculation::Draft => model.into_iter().collect(),
            Speculation::Mtp => own.into_iter().collect(),
            Speculation::Auto => {
                let least = if own.is_none() && model.is_none() { NGRAM } else { SURE_MATCH };
                [lookup(least)].into_iter().chain(own).chain(model).collect()
            }
        }
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
    /// In the order in which they are asked.
    sources: Vec<(Box<dyn DraftSource>, Pace)>,
    plain: PlainSteps,
    /// The source that was asked for the draft tokens of the next step.
    asked: Option<usize>,
    counts: DraftCounts,
    /// Whether the time of the next step is no measure, because older tokens are computed again or a source was behind.
    untimed: bool,
}

impl Speculator {
    /// A speculator for a new text.
    pub fn new(drafting: &Drafting) -> Self {
        let sources = drafting.sources().into_iter().map(|source| (source, Pace::default())).collect();
        let plain = PlainSteps::new(drafting.speculation == Speculation::Auto);
        Speculator { sources, plain, asked: None, counts: DraftCounts::default(), untimed: false }
    }

    /// Drafts at most `room` tokens behind `text`, which begins with that of the last call. `own` is the model's layer
    /// for multi-token prediction, if it is used. It and a draft model ask `tap` whether they may go on.
    pub fn draft(
        &mut self,
        text: TextSoFar,
        room: usize,
        mut own: Option<OwnLayer>,
        tap: &mut dyn Tap,
    ) -> Result<Vec<u32>, ModelError> {
        self.asked = None;
        let plain = self.plain.is_due();
        for (at, (source, pace)) in self.sources.iter_mut().enumerate() {
            let most = source.at_hand(text, own.as_ref()).min(room);
            let most = if most > 0 && !plain { pace.next().min(most) } else { 0 };
            if most > 0 {
                let draft = source.draft(text, most, own.as_mut(), tap)?;
                self.asked = Some(at);
                self.untimed |= draft.unseen > UNSEEN_MAX;
                return Ok(draft.tokens);
            }
        }
        Ok(Vec::new())
    }

    /// Whether there is something to draft behind `text`, for a step that has no draft tokens because it was begun
    /// before its token was known.
    pub fn could_draft(&mut self, text: TextSoFar, room: usize, own: Option<OwnLayer>) -> bool {
        self.asked = None;
        let plain = self.plain.is_due();
        let could = |(source, pace): &mut (Box<dyn DraftSource>, Pace)| {
            source.at_hand(text, own.as_ref()).min(room) > 0 && !plain && pace.next() > 0
        };
        self.sources.iter_mut().any(could)
    }

    /// A step took `time`, with the drafting before it, and had `drafts` draft tokens, of which `accepted` were
    /// accepted.
    pub fn stepped(&mut self, drafts: usize, accepted: usize, time: Duration) {
        let DraftCounts { steps, drafted, accepted: all } = &mut self.counts;
        (*steps, *drafted, *all) = (*steps + usize::from(drafts > 0), *drafted + drafts, *all + accepted);
        if std::mem::take(&mut self.untimed) {
            return;
        }
        match self.asked {
            None => self.plain.step(time),
            Some(at) => self.sources[at].1.drafted_step(drafts, accepted, time, &mut self.plain),
        }
    }

    /// Takes note that tokens of the sequence were dropped.
    pub fn shifted(&mut self) {
        self.sources.iter_mut().for_each(|(source, _)| source.shifted());
        self.untimed = true;
    }

    /// All draft tokens so far.
    pub fn counts(&self) -> DraftCounts {
        self.counts
    }
}

/// The logits of a step: a row for its first token, and one for each draft behind that. A row is used when the draft
/// tokens before it are confirmed.
#[derive(Default)]
pub struct DraftedStep {
    logits: Logits,
    drafts: Vec<u32>,
    confirmed: usize,
}

impl DraftedStep {
    /// A step with these draft tokens and the logits of `1 + drafts` rows.
    pub fn new(logits: impl Into<Logits>, drafts: Vec<u32>) -> Self {
        DraftedStep { logits: logits.into(), drafts, confirmed: 0 }
    }

    /// The logits behind the last token that is confirmed.
    pub fn row(&mut self) -> LogitsRow<'_> {
        self.logits.row(self.confirmed, 1 + self.drafts.len())
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for (kind, name) in KINDS {
            assert_eq!((name.parse(), kind.to_string()), (Ok(kind), name.to_owned()));
        }
        assert_eq!("always".parse::<Speculation>(), Err(SpeculationError));
    }

    #[test]
    fn rows_follow_confirmed_tokens() {
        let mut step = DraftedStep::new(vec![0.0, 0.5, 1.0, 1.5, 2.0, 2.5], vec![7, 8]);
        assert_eq!(step.row(), LogitsRow::All(&mut [0.0, 0.5]));
        assert_eq!(step.open(), 2);
        assert!(step.confirm(7));
        assert_eq!(step.row(), LogitsRow::All(&mut [1.0, 1.5]));
        assert_eq!(step.open(), 1);
        assert!(!step.confirm(9));
        assert_eq!((step.accepted(), step.open(), step.drafts()), (1, 1, 2));
        let mut plain = DraftedStep::new(vec![3.0], vec![]);
        assert_eq!(plain.row(), LogitsRow::All(&mut [3.0]));
        assert_eq!((plain.confirm(1), plain.open()), (false, 0));
    }

    fn draft(speculator: &mut Speculator, before: &[u32], last: u32, room: usize) -> Vec<u32> {
        speculator.draft(TextSoFar { before, last }, room, None, &mut ()).unwrap()
    }

    #[test]
    fn drafts_are_what_followed_and_stay_in_the_room() {
        let new = |speculation: Speculation| Speculator::new(&speculation.into());
        let mut speculator = new(Speculation::Lookup);
        assert_eq!(draft(&mut speculator, &[1, 2, 3, 4, 5, 6, 1, 2], 3, 9), [4, 5]);
        assert_eq!(draft(&mut speculator, &[1, 2, 3, 4, 5, 6, 1, 2, 3], 4, 1), [5]);
        speculator.stepped(2, 2, Duration::from_millis(1));
        assert_eq!(draft(&mut speculator, &[1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 5, 9), [6, 1, 2, 3]);
        assert_eq!(speculator.counts(), DraftCounts { steps: 1, drafted: 2, accepted: 2 });
        speculator.shifted();
        assert!(draft(&mut speculator, &[1, 2, 3], 4, 9).is_empty());
        assert!(draft(&mut new(Speculation::Off), &[1, 1, 1, 1], 1, 9).is_empty());
        assert!(draft(&mut new(Speculation::Draft), &[1, 1, 1, 1], 1, 9).is_empty());
        let repeated = draft(&mut new(Speculation::Lookup), &[7, 8, 7, 8, 7, 8], 7, 9);
        assert_eq!(repeated, [8, 7]);
    }

    /// Drafts the number of tokens before it, and was always behind by `unseen` tokens.
    struct Counting {
        unseen: usize,
    }

    impl DraftSource for Counting {
        fn at_hand(&mut self, _: TextSoFar, _: Option<&OwnLayer>) -> usize {
            4
        }

        fn draft(
            &mut self,
            text: TextSoFar,
            most: usize,
            _: Option<&mut OwnLayer>,
            _: &mut dyn Tap,
        ) -> Result<Draft, ModelError> {
            Ok(Draft { tokens: vec![text.before.len() as u32; most], unseen: self.unseen })
        }
    }

    fn with_model(speculation: Speculation, unseen: usize) -> Speculator {
        let model: SharedSource = std::sync::Arc::new(parking_lot::Mutex::new(Counting { unseen }));
        Speculator::new(&Drafting { speculation, model: Some(model), mtp: false })
    }

    #[test]
    fn a_long_match_goes_before_the_draft_model() {
        let (ms, long) = (Duration::from_millis(1), [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]);
        let text: Vec<u32> = long.iter().chain(&long).copied().collect();
        let mut auto = with_model(Speculation::Auto, 1);
        // Steps without draft tokens are measured first.
        assert!(draft(&mut auto, &text[..12], text[12], 9).is_empty());
        auto.stepped(0, 0, 10 * ms);
        assert!(draft(&mut auto, &text[..13], text[13], 9).is_empty());
        auto.stepped(0, 0, 10 * ms);
        assert_eq!(draft(&mut auto, &text[..14], text[14], 9), [14, 14], "four tokens match");
        auto.stepped(2, 0, 30 * ms);
        assert_eq!(draft(&mut auto, &text[..18], text[18], 9), [9, 10], "eight tokens match");
        auto.stepped(2, 2, 10 * ms);
        let other = |more: u32| [&text[..20], &(20..20 + more).collect::<Vec<_>>()].concat();
        for more in 1..3 {
            assert_eq!(draft(&mut auto, &other(more), 99, 9), [20 + more], "nothing matches");
            auto.stepped(1, 0, 30 * ms);
        }
        assert!(draft(&mut auto, &other(3), 99, 9).is_empty(), "the draft model is paused");
        assert_eq!(auto.counts(), DraftCounts { steps: 4, drafted: 6, accepted: 2 });
    }

    #[test]
    fn the_time_of_a_step_whose_source_was_behind_is_no_measure() {
        let ms = Duration::from_millis(1);
        let drafts = |unseen| {
            let mut auto = with_model(Speculation::Auto, unseen);
            auto.stepped(0, 0, ms);
            auto.stepped(0, 0, ms);
            let (text, mut made) = ((0..20).collect::<Vec<_>>(), 0);
            for len in 0..20 {
                let drafts = draft(&mut auto, &text[..len], len as u32, 9).len();
                auto.stepped(drafts, 0, if drafts > 0 { ms * 3 } else { ms });
                made += usize::from(drafts > 0);
            }
            made
        };
        assert_eq!((drafts(UNSEEN_MAX), drafts(UNSEEN_MAX + 1)), (6, 20));
        let always = with_model(Speculation::Draft, 1);
        assert_eq!(always.sources.len(), 1);
    }
}
