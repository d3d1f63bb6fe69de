//! Speculation changes no token: texts written with draft tokens are those written token by token, and so is what
//! follows them.

use std::sync::Arc;

use larder_cache::CacheScope;
use larder_engine::{
    DraftCounts, DraftModel, Drafting, FinishReason, Generated, Listener, Request, Sampler, Sampling, Session,
    SharedSource, Speculation, TokenInput, generate,
};
use larder_model::{ComputeContext, ExpertPath};
use larder_text::{StopMatcher, Tokenizer, TokenizerConfig};
use parking_lot::Mutex;

use crate::support::golden_models;
use crate::support::rig::{Model, model};

/// A prompt that repeats itself.
pub(super) const PROMPT: [u32; 20] = [5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 5, 17, 3, 3, 60, 41, 8, 101, 5, 17];
pub(super) const CONTEXT: usize = 160;

/// Collects the text and the tokens of all steps.
#[derive(Default)]
struct Collect {
    text: String,
    steps: Vec<usize>,
    prefilled: Vec<usize>,
    keep: Option<usize>,
    /// Cancels behind this many bytes of text.
    most: Option<usize>,
    /// Cancels when it is asked once more than this number of times.
    patience: Option<usize>,
}

impl<P> Listener<P> for Collect {
    fn text(&mut self, piece: &str) -> bool {
        self.text.push_str(piece);
        self.most.is_none_or(|most| self.text.len() < most)
    }

    fn wants_more(&mut self) -> bool {
        let Some(left) = &mut self.patience else { return true };
        let wants = *left > 0;
        *left = left.saturating_sub(1);
        wants
    }

    fn prefilled(&mut self, tokens: usize) {
        self.prefilled.push(tokens);
    }

    fn context_full(&mut self) -> Option<usize> {
        self.keep.take()
    }

    fn step(&mut self, step: &larder_engine::StepStats, _: &P) {
        self.steps.push(step.tokens);
    }
}

/// One way to write a text.
#[derive(Clone, Copy)]
pub(super) struct Way {
    pub(super) sampling: Sampling,
    max_tokens: usize,
    stop: &'static str,
    keep: Option<usize>,
    most: Option<usize>,
}

pub(super) fn ways() -> Vec<Way> {
    let drawn = |temperature| Sampling { temperature, top_k: 3, ..Sampling::default() };
    let plain = Way { sampling: Sampling::default(), max_tokens: 100, stop: "", keep: None, most: None };
    vec![
        plain,
        Way { sampling: drawn(0.01), ..plain },
        Way { sampling: drawn(0.3), ..plain },
        Way { sampling: Sampling { frequency_penalty: 0.05, repetition_penalty: 1.01, ..drawn(0.05) }, ..plain },
        Way { max_tokens: 7, ..plain },
        Way { max_tokens: 1000, ..plain },
        Way { max_tokens: 200, keep: Some(9), ..plain },
        Way { stop: "e", ..plain },
        Way { most: Some(5), ..plain },
    ]
}

/// The text, the logits behind it and everything that can be seen of it, draft tokens aside.
pub(super) type Written = (Vec<u32>, String, FinishReason, usize, Vec<u32>, Vec<f32>);

pub(super) fn write<P: ExpertPath>(
    model: &Model,
    experts: &mut P,
    tokenizer: &Tokenizer,
    way: Way,
    drafting: impl Into<Drafting>,
) -> (Written, DraftCounts) {
    let mut session = Session::new(&model.decoder, experts, CONTEXT);
    write_in(&mut session, tokenizer, way, drafting)
}

pub(super) fn write_in<P: ExpertPath>(
    session: &mut Session<P>,
    tokenizer: &Tokenizer,
    way: Way,
    drafting: impl Into<Drafting>,
) -> (Written, DraftCounts) {
    let stop = if way.stop.is_empty() { vec![] } else { vec![way.stop.to_owned()] };
    let request = Request {
        prompt: &PROMPT,
        sampler: Sampler::new(way.sampling, 5).unwrap(),
        grammar: None,
        shown: &[],
        eos: &[],
        stop: StopMatcher::new(stop).unwrap(),
        max_tokens: way.max_tokens,
        drafting: drafting.into(),
    };
    let mut listener = Collect { keep: way.keep, most: way.most, ..Collect::default() };
    let made = generate(session, tokenizer, request, &mut listener).unwrap();
    let Generated { ids, finish, shifts, drafts, .. } = made;
    // The last token is not computed; those of the prompt are a step.
    assert_eq!(listener.steps.iter().sum::<usize>(), PROMPT.len() + ids.len() - 1);
    let prefilled = &listener.prefilled;
    assert!(prefilled.is_sorted() && prefilled[0] == 0 && prefilled.last() < Some(&PROMPT.len()), "{prefilled:?}");
    if shifts == 0 {
        // A step that was begun with the last token may have ended with it.
        session.rewind(PROMPT.len() + ids.len() - 1);
    }
    let tokens = session.tokens().to_vec();
    session.rewind(tokens.len().min(CONTEXT - 1));
    let after = session.forward(&TokenInput::decode(&[7]), &mut ()).unwrap();
    ((ids, listener.text, finish, shifts, tokens, after), drafts)
}

pub(super) fn tokenizer(folder: &std::path::Path) -> Tokenizer {
    let json = std::fs::read(folder.join("tokenizer.json")).expect("a tokenizer");
    Tokenizer::from_bytes(&json, &TokenizerConfig::default()).unwrap()
}

#[test]
fn drafts_change_neither_the_text_nor_what_follows() {
    let (mut all, mut ends) = (DraftCounts::default(), vec![]);
    for folder in golden_models() {
        let (name, model) = (folder.display(), model(&folder));
        let tokenizer = tokenizer(&folder);
        for (at, way) in ways().into_iter().enumerate() {
            let (want, none) = write(&model, &mut model.resident(), &tokenizer, way, Speculation::Off);
            assert_eq!(none, DraftCounts::default());
            let (got, drafts) = write(&model, &mut model.resident(), &tokenizer, way, Speculation::Lookup);
            assert_eq!(got, want, "{name}: way {at} in memory");
            let mut few = model.streaming(3, CacheScope::Layer, 0, model.memory());
            let (got, streamed) = write(&model, &mut few, &tokenizer, way, Speculation::Lookup);
            assert_eq!((got, streamed), (want.clone(), drafts), "{name}: way {at} through three slots");
            let (got, _) = write(&model, &mut model.resident(), &tokenizer, way, Speculation::Auto);
            assert_eq!(got, want, "{name}: way {at} by time");
            assert_eq!(drafts.drafted > 0, drafts.steps > 0);
            if !model.decoder.rewinds_freely() {
                assert_eq!(drafts, DraftCounts::default(), "{name}");
            }
            all.steps += drafts.steps;
            all.drafted += drafts.drafted;
            all.accepted += drafts.accepted;
            ends.push((want.2, want.3 > 0));
        }
    }
    println!("{all:?}");
    assert!(all.accepted > 1000 && all.drafted - all.accepted > 1000, "{all:?}");
    for end in [FinishReason::Length, FinishReason::Context, FinishReason::StopString, FinishReason::Cancelled] {
        assert!(ends.iter().any(|(finish, _)| *finish == end), "no text ended with {end:?}");
    }
    assert!(ends.iter().any(|(_, shifted)| *shifted), "no context was shifted");
}

/// A model as a draft model for texts of `vocab` tokens; random weights are sure of nothing.
fn draft_model(model: &Model, vocab: usize, least_probability: f32) -> SharedSource {
    let decoder = model.decoder_by(ComputeContext::new(2, false).unwrap()).unwrap();
    let draft = DraftModel::new(decoder, model.resident(), CONTEXT, 16, vocab);
    Arc::new(Mutex::new(draft.with_least_probability(least_probability)))
}

fn drafting(speculation: Speculation, model: &SharedSource) -> Drafting {
    Drafting { speculation, model: Some(model.clone()), mtp: false }
}

#[test]
fn a_draft_model_changes_neither_the_text_nor_what_follows() {
    let folders: Vec<_> = golden_models().into_iter().filter(|folder| model(folder).decoder.rewinds_freely()).collect();
    let (mut own, mut other) = (DraftCounts::default(), DraftCounts::default());
    let mut last = model(folders.last().unwrap());
    for folder in &folders {
        let (name, model, tokenizer) = (folder.display(), model(folder), tokenizer(folder));
        let vocab = model.decoder.vocab();
        // Both follow one text after the other.
        let (same, stranger) = (draft_model(&model, vocab, 0.0), draft_model(&last, vocab, 0.02));
        for (at, way) in ways().into_iter().enumerate() {
            let (want, _) = write(&model, &mut model.resident(), &tokenizer, way, Speculation::Off);
            let draft = drafting(Speculation::Draft, &same);
            let (got, drafts) = write(&model, &mut model.resident(), &tokenizer, way, draft);
            assert_eq!(got, want, "{name}: way {at} in memory, drafted by itself");
            if at == 0 {
                assert!(drafts.accepted == drafts.drafted && drafts.accepted > 60, "{name}: {drafts:?}");
            }
            add(&mut own, drafts);
            let mut few = model.streaming(3, CacheScope::Layer, 0, model.memory());
            let draft = drafting(Speculation::Draft, &stranger);
            let (got, drafts) = write(&model, &mut few, &tokenizer, way, draft);
            assert_eq!(got, want, "{name}: way {at} through three slots, drafted by another");
            add(&mut other, drafts);
            let (got, _) = write(&model, &mut model.resident(), &tokenizer, way, drafting(Speculation::Auto, &same));
            assert_eq!(got, want, "{name}: way {at} by time");
        }
        last = model;
    }
    println!("{own:?} {other:?}");
    assert!(own.accepted > 5000 && own.drafted - own.accepted > 1000, "{own:?}");
    assert!(other.drafted > 1000 && other.accepted * 4 < other.drafted, "{other:?}");
}

fn add(all: &mut DraftCounts, more: DraftCounts) {
    all.steps += more.steps;
    all.drafted += more.drafted;
    all.accepted += more.accepted;
}

#[test]
fn a_draft_that_is_cancelled_leaves_both_sequences_whole() {
    let folder = golden_models().into_iter().find(|folder| folder.ends_with("olmoe")).expect("there is an OLMoE");
    let (model, tokenizer) = (model(&folder), tokenizer(&folder));
    let same = draft_model(&model, model.decoder.vocab(), 0.0);
    let way = ways()[0];
    let (want, _) = write(&model, &mut model.resident(), &tokenizer, way, Speculation::Off);
    let mut lengths = vec![];
    for patience in 0..60 {
        let mut experts = model.resident();
        let mut session = Session::new(&model.decoder, &mut experts, CONTEXT);
        let request = Request {
            prompt: &PROMPT,
            sampler: Sampler::new(way.sampling, 5).unwrap(),
            grammar: None,
            shown: &[],
            eos: &[],
            stop: StopMatcher::new(vec![]).unwrap(),
            max_tokens: way.max_tokens,
            drafting: drafting(Speculation::Draft, &same),
        };
        let mut listener = Collect { patience: Some(patience), ..Collect::default() };
        let made = generate(&mut session, &tokenizer, request, &mut listener).unwrap();
        assert_eq!(made.finish, FinishReason::Cancelled);
        assert_eq!(made.ids, want.0[..made.ids.len()], "{patience}");
        lengths.push(made.ids.len());
        session.rewind(0);
        let (again, _) = write_in(&mut session, &tokenizer, way, drafting(Speculation::Draft, &same));
        assert_eq!(again, want, "after {patience} layers");
    }
    assert!(lengths.iter().filter(|len| **len == 1).count() > 2 && lengths.last() > Some(&1), "{lengths:?}");
}

#[test]
fn a_draft_model_of_another_size_stays_within_its_vocabulary_and_context() {
    let folder = golden_models().into_iter().find(|folder| folder.ends_with("olmoe")).expect("there is an OLMoE");
    let (model, tokenizer) = (model(&folder), tokenizer(&folder));
    let way = ways()[0];
    let (want, _) = write(&model, &mut model.resident(), &tokenizer, way, Speculation::Off);
    // A target with 50 tokens, of which none beyond are drafted; and a draft model whose context ends at 60 tokens.
    for (vocab, context) in [(50, CONTEXT), (model.decoder.vocab(), 60)] {
        let decoder = model.decoder_by(ComputeContext::new(1, false).unwrap()).unwrap();
        let draft = DraftModel::new(decoder, model.resident(), context, 16, vocab).with_least_probability(0.0);
        let draft: SharedSource = Arc::new(Mutex::new(draft));
        let (got, drafts) = write(&model, &mut model.resident(), &tokenizer, way, drafting(Speculation::Draft, &draft));
        assert_eq!(got, want);
        let most = if context < CONTEXT { context - PROMPT.len() } else { way.max_tokens - 1 };
        assert!(drafts.drafted > 10 && drafts.accepted <= most, "{drafts:?}");
    }
}
