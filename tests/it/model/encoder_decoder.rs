//! Models with an encoder: the numbers of transformers, and the same bits whatever pieces, neighbours, caches and
//! detours.

use std::collections::BTreeMap;
use std::path::Path;

use larder_cache::CacheScope;
use larder_core::{LayerIdx, Rng};
use larder_engine::{CachedPath, Sampler, Sampling, Sequence, Session, StepPart, TokenInput, step};
use larder_model::{ComputeContext, Decoder, ExpertPath, LogitsFor, ModelError, Routed, Tap, TokenPhase};

use crate::cache::attention::{DeviceFaults, on_faulty_device};
use crate::support::encoder_decoders;
use crate::support::reference::{Bars, Loaded, Reference, furthest, load};
use crate::support::rig::{Model, model};

const ROOM: usize = 512;
const PROMPTS: [&[u32]; 4] =
    [&[5, 17, 3, 3, 60, 41, 8, 91, 7, 12, 90, 33, 1], &[9, 1], &[44, 2, 9, 77, 12, 5, 5, 1], &[1]];
const WRITTEN: [u32; 9] = [7, 30, 30, 4, 81, 0, 2, 55, 6];

/// Everything that one run shows, under the names of the reference.
struct Record {
    encoder_layers: usize,
    all: BTreeMap<String, Vec<f32>>,
    ids: BTreeMap<String, Vec<u32>>,
}

impl Record {
    fn add(&mut self, name: String, values: &[f32]) {
        self.all.entry(name).or_default().extend_from_slice(values);
    }
}

impl Tap for Record {
    fn wants_hidden(&self) -> bool {
        true
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        self.add(format!("hidden.{stage}"), x);
    }

    fn encoder_hidden(&mut self, stage: usize, x: &[f32]) {
        self.add(format!("encoder_hidden.{stage}"), x);
    }

    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        let layer = match layer.index().checked_sub(self.encoder_layers) {
            Some(layer) => format!("dec.{layer}"),
            None => format!("enc.{}", layer.index()),
        };
        self.add(format!("router_logits.{layer}"), logits);
        self.add(format!("topk_weights.{layer}"), &routed.weights);
        let ids = self.ids.entry(format!("topk_ids.{layer}")).or_default();
        ids.extend(routed.ids.iter().map(|id| u32::from(id.0)));
    }
}

/// Compares everything in the reference with a run that generates the greedy text.
pub fn check_encoder_decoder(folder: &Path, config: &str) {
    let reference = Reference::read(folder);
    let Loaded { decoder, mut experts, model_type } = load(folder, config);
    let (name, bars) = (format!("{} ({config})", folder.display()), Bars::of(&model_type));
    let mut record = Record { encoder_layers: decoder.encoder_layers(), all: BTreeMap::new(), ids: BTreeMap::new() };
    let mut session = Session::new(&decoder, &mut experts, ROOM);
    let mut sampler = Sampler::new(Sampling::default(), 0).unwrap();
    let mut logits = session.forward(&TokenInput::prompt(&reference.tokens("input_ids")), &mut record).unwrap();
    let want = reference.tokens("generated_ids");
    let mut got = Vec::new();
    for _ in &want {
        record.add("full_logits".into(), &logits);
        record.add("decode_logits".into(), &logits);
        got.push(sampler.sample(&mut logits, session.tokens()).unwrap());
        logits = session.forward(&TokenInput::decode(&got[got.len() - 1..]), &mut record).unwrap();
    }
    record.add("full_logits".into(), &logits);
    assert_eq!(got, want, "{name}: greedy ids");
    for what in reference.names() {
        let worst = furthest(&record.all[what], reference.floats(what));
        let most = if what.starts_with("topk_weights") { bars.weights } else { bars.logits };
        assert!(worst <= most, "{name}: {what} is {worst:e} off");
    }
    let routers: Vec<&String> = record.ids.keys().collect();
    assert!(routers.iter().any(|r| r.contains("enc")) && routers.iter().any(|r| r.contains("dec")), "{routers:?}");
    record.ids.iter().for_each(|(what, ids)| assert_eq!(*ids, reference.tokens(what), "{name}: {what}"));
}

#[test]
fn encoder_decoders_match_transformers() {
    for folder in encoder_decoders() {
        check_encoder_decoder(&folder, "config.json");
        check_encoder_decoder(&folder, "config.transformers5.json");
        let dropped = &Reference::read(&folder).json()["dropped_tokens"]["enc.1"];
        assert!(dropped.as_u64() > Some(0), "an expert overflows");
    }
}

/// The definition: a prompt at once, and the tokens behind it one by one; the logits of all of them.
fn alone(decoder: &Decoder, experts: &mut dyn ExpertPath, prompt: &[u32]) -> Vec<f32> {
    let mut sequence = Sequence::new(decoder, ROOM);
    let mut logits = sequence.forward(decoder, experts, &TokenInput::prompt(prompt), &mut ()).unwrap();
    for token in WRITTEN {
        logits.extend(sequence.forward(decoder, experts, &TokenInput::decode(&[token]), &mut ()).unwrap());
    }
    logits
}

/// The decoder on the CPU, and on devices that have the keys and values of no layer, one, and all.
fn decoders(model: &Model) -> Vec<Decoder> {
    let here = model.decoder_by(ComputeContext::new(2, false).unwrap());
    let there = [0, 1, usize::MAX].map(|kv_device_layers| {
        let (compute, _) = on_faulty_device(DeviceFaults::default());
        model.decoder_by(ComputeContext { kv_device_layers, ..compute })
    });
    [here].into_iter().chain(there).map(Result::unwrap).collect()
}

/// All prompts side by side: each step takes pieces of some sequences, at random, of prompts and of generated tokens.
fn together(decoder: &Decoder, experts: &mut dyn ExpertPath, rng: &mut Rng) -> Vec<Vec<f32>> {
    let mut sequences: Vec<Sequence> = PROMPTS.iter().map(|_| Sequence::new(decoder, ROOM)).collect();
    for (sequence, prompt) in sequences.iter_mut().zip(PROMPTS) {
        sequence.append(decoder, prompt, TokenPhase::Prefill).unwrap();
    }
    let mut logits = vec![Vec::new(); PROMPTS.len()];
    while sequences.iter().zip(PROMPTS).any(|(s, p)| s.pending() > 0 || s.tokens().len() < p.len() + WRITTEN.len()) {
        for (sequence, prompt) in sequences.iter_mut().zip(PROMPTS) {
            let done = sequence.tokens().len() - prompt.len();
            if sequence.pending() == 0 && done < WRITTEN.len() {
                // One token, or several as for the verification of draft tokens.
                let next = &WRITTEN[done..WRITTEN.len().min(done + 1 + rng.below(3))];
                sequence.append(decoder, next, TokenPhase::Decode).unwrap();
            }
        }
        let chosen: Vec<bool> = sequences.iter().map(|s| s.pending() > 0 && rng.below(3) > 0).collect();
        let parts = sequences.iter_mut().zip(PROMPTS).zip(&chosen).filter(|(_, chosen)| **chosen);
        let mut parts: Vec<StepPart> = parts
            .map(|((sequence, prompt), _)| {
                let in_prompt = sequence.pending() > 0 && sequence.tokens().len() == prompt.len();
                let logits_for = if in_prompt { LogitsFor::Last } else { LogitsFor::All };
                StepPart { sequence, most: 1 + rng.below(6), logits_for, best: None, draws: None }
            })
            .collect();
        if parts.is_empty() {
            continue;
        }
        let mut rows = step(decoder, experts, &mut parts, &mut ()).unwrap().into_iter();
        for (at, _) in chosen.iter().enumerate().filter(|(_, chosen)| **chosen) {
            logits[at].extend(rows.next().expect("each part has logits").into_all());
        }
    }
    logits
}

#[test]
fn pieces_neighbours_and_caches_change_no_bit() {
    let (mut hits, mut misses) = (0, 0);
    for folder in encoder_decoders() {
        let model = model(&folder);
        let decoder = &model.decoder;
        let mut rng = Rng::new(3);
        let want: Vec<Vec<f32>> = PROMPTS.iter().map(|p| alone(decoder, &mut model.resident(), p)).collect();
        assert!(want[0] != want[2]);
        for _ in 0..20 {
            assert!(together(decoder, &mut model.resident(), &mut rng) == want, "{}", folder.display());
        }
        for (which, decoder) in decoders(&model).iter().enumerate() {
            for _ in 0..10 {
                let got = together(decoder, &mut model.resident(), &mut rng);
                assert!(got == want, "{}, decoder {which}", folder.display());
            }
        }
        for reader in ["memory", "pread", "uring"] {
            for (slots, scope) in [(1, CacheScope::Layer), (2, CacheScope::Layer), (3, CacheScope::Global)] {
                let Some(mut path) = model.streaming_with(reader, slots, scope, slots % 2) else {
                    println!("skipped: the reader {reader} does not work here");
                    continue;
                };
                let got = together(decoder, &mut path, &mut rng);
                assert!(got == want, "{}, {slots} slots, {scope}, {reader}", folder.display());
                let counts = path.traffic().counts;
                (hits, misses) = (hits + counts.hits, misses + counts.misses);
            }
        }
    }
    assert!(hits > 100 && misses > 100, "{hits} hits, {misses} misses");
}

#[test]
fn a_sequence_that_goes_back_is_a_fresh_one() {
    for folder in encoder_decoders() {
        let model = model(&folder);
        decoders(&model).iter().for_each(|decoder| go_back(&model, decoder));
    }
}

fn go_back(model: &Model, decoder: &Decoder) {
    let (mut experts, mut others) = (model.resident(), model.resident());
    let (prompt, other) = (PROMPTS[0], PROMPTS[2]);
    let mut fresh = |tokens: &[u32]| {
        Session::new(&model.decoder, &mut others, ROOM).forward(&TokenInput::prompt(tokens), &mut ()).unwrap()
    };
    let lens = [0, 4, prompt.len(), prompt.len() + 2];
    let whole = [prompt, &WRITTEN[..3]].concat();
    let want: Vec<Vec<f32>> = lens.iter().map(|len| fresh(&[&whole[..*len], other].concat())).collect();
    let written = alone(&model.decoder, &mut others, prompt);
    let rows = |first: usize, count: usize| &written[first * decoder.vocab()..][..count * decoder.vocab()];
    let mut session = Session::new(decoder, &mut experts, ROOM);
    for (len, want) in lens.into_iter().zip(want) {
        session.rewind(0);
        session.forward(&TokenInput::prompt(prompt).in_chunks(5), &mut ()).unwrap();
        let got = session.forward(&TokenInput::decode(&WRITTEN[..3]).all_logits(), &mut ()).unwrap();
        assert!(got == rows(1, 3));
        // Back to generated text, and another token or the same one.
        session.rewind(prompt.len() + 1);
        session.forward(&TokenInput::decode(&[99]), &mut ()).unwrap();
        session.rewind(prompt.len() + 1);
        assert!(session.forward(&TokenInput::decode(&WRITTEN[1..3]), &mut ()).unwrap() == rows(3, 1));
        // Back anywhere, and a prompt: the encoder reads all of it.
        assert_eq!(session.rewind(len), len);
        assert!(session.forward(&TokenInput::prompt(other).in_chunks(3), &mut ()).unwrap() == want, "from {len} on");
    }
}

/// Ends a pass after some layers.
struct After(usize);

impl Tap for After {
    fn wants_more(&mut self) -> bool {
        self.0 = self.0.saturating_sub(1);
        self.0 > 0
    }
}

#[test]
fn a_cancelled_prompt_leaves_the_sequence_as_it_was() {
    for folder in encoder_decoders() {
        let model = model(&folder);
        decoders(&model).iter().for_each(|decoder| cancel(&model, decoder));
    }
}

fn cancel(model: &Model, decoder: &Decoder) {
    let mut experts = model.resident();
    let written = alone(&model.decoder, &mut model.resident(), PROMPTS[0]);
    let row = |at: usize| &written[at * decoder.vocab()..][..decoder.vocab()];
    let mut session = Session::new(decoder, &mut experts, ROOM);
    for layers in 1..decoder.encoder_layers() + 2 {
        let error = session.forward(&TokenInput::prompt(PROMPTS[0]), &mut After(layers)).unwrap_err();
        assert!(matches!(error, ModelError::Cancelled), "{error}");
    }
    session.forward(&TokenInput::prompt(PROMPTS[0]), &mut ()).unwrap();
    session.forward(&TokenInput::decode(&WRITTEN[..2]), &mut ()).unwrap();
    for layers in 1..decoder.encoder_layers() + 2 {
        let error = session.forward(&TokenInput::prompt(PROMPTS[2]), &mut After(layers)).unwrap_err();
        assert!(matches!(error, ModelError::Cancelled), "{error}");
    }
    assert_eq!(session.tokens(), [PROMPTS[0], &WRITTEN[..2]].concat());
    assert!(session.forward(&TokenInput::decode(&WRITTEN[2..3]), &mut ()).unwrap() == row(3));
}

/// A device whose attention fails or lacks memory for a while: each failure is an error, and the next try gives the
/// same logits.
#[test]
fn a_device_that_fails_is_an_error_and_nothing_is_lost() {
    for folder in encoder_decoders() {
        let model = model(&folder);
        let want = alone(&model.decoder, &mut model.resident(), PROMPTS[0]);
        for faults in
            [DeviceFaults { failing: 5, ..Default::default() }, DeviceFaults { refusing: 3, ..Default::default() }]
        {
            let decoder = model.decoder_by(on_faulty_device(faults).0).unwrap();
            let (mut experts, mut failures, mut got) = (model.resident(), 0, Vec::new());
            let mut session = Session::new(&decoder, &mut experts, ROOM);
            let mut go_on = |input: &TokenInput| loop {
                match session.forward(input, &mut ()) {
                    Ok(logits) => break got.extend(logits),
                    Err(error) => assert!(matches!(error, ModelError::Device(_)), "{error:?}"),
                }
                failures += 1;
                assert!(failures < 100);
            };
            go_on(&TokenInput::prompt(PROMPTS[0]));
            WRITTEN.iter().for_each(|token| go_on(&TokenInput::decode(&[*token])));
            assert!(got == want && failures > 0, "{failures} failures, {faults:?}");
        }
    }
}

#[test]
fn what_an_encoder_cannot_give_is_refused_in_a_sentence() {
    for folder in encoder_decoders() {
        let Loaded { decoder, mut experts, .. } = load(&folder, "config.json");
        let mut session = Session::new(&decoder, &mut experts, ROOM);
        let error = session.forward(&TokenInput::prompt(PROMPTS[0]).all_logits(), &mut ()).unwrap_err().to_string();
        assert!(error.contains("logits for the last token of a prompt only"), "{error}");
        let error = session.forward(&TokenInput::decode(&[5]), &mut ()).unwrap_err().to_string();
        assert!(error.contains("needs a prompt"), "{error}");
        let error = session.append_made_up(&[5, 6], 1).unwrap_err().to_string();
        assert!(error.contains("no made-up context"), "{error}");
        assert!(session.tokens().is_empty());
        session.forward(&TokenInput::prompt(PROMPTS[1]), &mut ()).unwrap();
    }
}
