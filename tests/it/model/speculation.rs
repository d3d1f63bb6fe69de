//! Speculation changes no token: texts written with draft tokens are those written token by token, and so is what follows them.

use larder_cache::CacheScope;
use larder_engine::{
    DraftCounts, FinishReason, Generated, Listener, Request, Sampler, Sampling, Session, Speculation, StopMatcher,
    TokenInput, Tokenizer, TokenizerConfig, generate,
};
use larder_model::ExpertPath;

use crate::support::golden_models;
use crate::support::rig::{Model, model};

/// A prompt that repeats itself.
const PROMPT: [u32; 20] = [5, 17, 3, 3, 60, 41, 8, 101, 7, 12, 5, 17, 3, 3, 60, 41, 8, 101, 5, 17];
const CONTEXT: usize = 160;

/// Collects the text and the tokens of all steps.
#[derive(Default)]
struct Collect {
    text: String,
    steps: Vec<usize>,
    keep: Option<usize>,
    /// Cancels behind this many bytes of text.
    most: Option<usize>,
}

impl<P> Listener<P> for Collect {
    fn text(&mut self, piece: &str) -> bool {
        self.text.push_str(piece);
        self.most.is_none_or(|most| self.text.len() < most)
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
struct Way {
    sampling: Sampling,
    max_tokens: usize,
    stop: &'static str,
    keep: Option<usize>,
    most: Option<usize>,
}

fn ways() -> Vec<Way> {
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
type Written = (Vec<u32>, String, FinishReason, usize, Vec<u32>, Vec<f32>);

fn write<P: ExpertPath>(
    model: &Model,
    experts: &mut P,
    tokenizer: &Tokenizer,
    way: Way,
    speculation: Speculation,
) -> (Written, DraftCounts) {
    let mut session = Session::new(&model.decoder, experts, CONTEXT);
    let stop = if way.stop.is_empty() { vec![] } else { vec![way.stop.to_owned()] };
    let request = Request {
        prompt: &PROMPT,
        sampler: Sampler::new(way.sampling, 5).unwrap(),
        grammar: None,
        shown: &[],
        eos: &[],
        stop: StopMatcher::new(stop).unwrap(),
        max_tokens: way.max_tokens,
        speculation,
    };
    let mut listener = Collect { keep: way.keep, most: way.most, ..Collect::default() };
    let made = generate(&mut session, tokenizer, request, &mut listener).unwrap();
    let Generated { ids, finish, shifts, drafts, .. } = made;
    // The last token is not computed; those of the prompt are a step.
    assert_eq!(listener.steps.iter().sum::<usize>(), PROMPT.len() + ids.len() - 1);
    let tokens = session.tokens().to_vec();
    session.rewind(tokens.len().min(CONTEXT - 1));
    let after = session.forward(&TokenInput::decode(&[7]), &mut ()).unwrap();
    ((ids, listener.text, finish, shifts, tokens, after), drafts)
}

#[test]
fn drafts_change_neither_the_text_nor_what_follows() {
    let (mut all, mut ends) = (DraftCounts::default(), vec![]);
    for folder in golden_models() {
        let (name, model) = (folder.display(), model(&folder));
        let json = std::fs::read(folder.join("tokenizer.json")).expect("a tokenizer");
        let tokenizer = Tokenizer::from_bytes(&json, &TokenizerConfig::default()).unwrap();
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
