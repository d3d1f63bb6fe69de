//! One step over a ragged batch: any pieces of any sequences beside each other give the logits of each sequence alone,
//! token by token, bit for bit.

use larder_cache::CacheScope;
use larder_core::Rng;
use larder_engine::{CachedPath, Recorder, Sequence, StepPart, TokenInput, step};
use larder_lab::{InitialCache, replay};
use larder_model::{Decoder, ExpertPath, KvFormat, LogitsFor, TokenPhase};
use larder_policy::eviction::{CacheShape, EvictionSpec, PolicyInputs};

use crate::support::rig::{Model, Recorded, model};
use crate::support::{fixture, golden_models};

/// Tokens of a long and of short sequences. The long one is read in pieces of up to [`PIECE`] tokens.
const LONG: usize = 600;
const SHORT: usize = 40;
const PIECE: usize = 512;

/// `count` sequences of token ids, the first of which is long.
fn texts(count: usize, decoder: &Decoder, rng: &mut Rng) -> Vec<Vec<u32>> {
    let longest = |i| if i == 0 { LONG } else { SHORT };
    let text = |i: usize| {
        let len = 1 + rng.below(longest(i).min(decoder.context() - 8));
        (0..len).map(|_| rng.below(decoder.vocab().min(100)) as u32).collect()
    };
    (0..count).map(text).collect()
}

/// The definition: each sequence alone, one token after the other.
fn alone(decoder: &Decoder, experts: &mut dyn ExpertPath, texts: &[Vec<u32>]) -> Vec<Vec<f32>> {
    let read = |text: &Vec<u32>| {
        let mut sequence = Sequence::new(decoder, text.len());
        sequence.plan_len(text.len());
        let token = |token: &u32| {
            sequence.forward(decoder, experts, &TokenInput::decode(&[*token]), &mut ()).expect("a token is computed")
        };
        text.iter().flat_map(token).collect()
    };
    texts.iter().map(read).collect()
}

/// The size of a piece: usually small, sometimes as large as allowed.
fn piece(rng: &mut Rng) -> usize {
    match rng.below(4) {
        0 => 1 + rng.below(PIECE),
        1 => 1 + rng.below(20),
        _ => 1,
    }
}

/// All sequences side by side: each step takes pieces of some of them, at random. Now and then a sequence guesses
/// tokens that are then dropped, or drops its last tokens and reads them again.
fn together(decoder: &Decoder, experts: &mut dyn ExpertPath, texts: &[Vec<u32>], rng: &mut Rng) -> Vec<Vec<f32>> {
    let vocab = decoder.vocab();
    let mut logits = vec![Vec::new(); texts.len()];
    let mut sequences: Vec<Sequence> = texts.iter().map(|text| Sequence::new(decoder, text.len() + 8)).collect();
    for (sequence, text) in sequences.iter_mut().zip(texts) {
        sequence.append(decoder, text, TokenPhase::Prefill).unwrap();
    }
    while sequences.iter().any(|sequence| sequence.pending() > 0) {
        let all = rng.below(2) == 0;
        let chosen: Vec<bool> = sequences.iter().map(|s| s.pending() > 0 && (all || rng.below(2) == 0)).collect();
        let parts = sequences.iter_mut().zip(&chosen).filter(|(_, chosen)| **chosen);
        let mut parts: Vec<StepPart> = parts
            .map(|(sequence, _)| StepPart {
                sequence,
                most: piece(rng),
                logits_for: LogitsFor::All,
                best: None,
                draws: None,
            })
            .collect();
        if parts.is_empty() {
            continue;
        }
        let mut rows = step(decoder, experts, &mut parts, &mut ()).unwrap().into_iter();
        for (at, _) in chosen.iter().enumerate().filter(|(_, chosen)| **chosen) {
            logits[at].extend(rows.next().expect("each part has logits").into_all());
        }
        let at = rng.below(texts.len());
        if rng.below(3) == 0 && sequences[at].pending() == 0 {
            guess(decoder, experts, &mut sequences[at], &texts[at], rng);
            logits[at].truncate((texts[at].len() - sequences[at].pending()) * vocab);
        }
    }
    logits
}

/// Verifies guessed tokens after the end of a sequence and drops them, or drops the last tokens and appends them again.
fn guess(decoder: &Decoder, experts: &mut dyn ExpertPath, sequence: &mut Sequence, text: &[u32], rng: &mut Rng) {
    let guesses = [7, 8, 9, 1, 2];
    let some = &guesses[..1 + rng.below(5)];
    let checked = sequence.forward(decoder, experts, &TokenInput::decode(some).all_logits(), &mut ()).unwrap();
    assert_eq!(checked.len(), some.len() * decoder.vocab());
    let back = text.len().saturating_sub(rng.below(3));
    sequence.rewind(back);
    sequence.plan_len(text.len());
    sequence.append(decoder, &text[back..], TokenPhase::Decode).unwrap();
}

fn check(name: &str, want: &[Vec<f32>], got: &[Vec<f32>], vocab: usize) {
    for (at, (want, got)) in want.iter().zip(got).enumerate() {
        assert_eq!(want.len(), got.len(), "{name}: sequence {at} of {}", want.len() / vocab);
        let wrong = want.iter().zip(got).position(|(want, got)| want.to_bits() != got.to_bits());
        assert_eq!(wrong.map(|i| i / vocab), None, "{name}: sequence {at}: first wrong token");
    }
}

#[test]
fn neighbours_and_pieces_change_no_bit() {
    for folder in golden_models() {
        let model = model(&folder);
        let mut rng = Rng::new(folder.as_os_str().len() as u64);
        for (count, format) in [(1, KvFormat::F32), (2, KvFormat::F16), (7, KvFormat::F32), (16, KvFormat::F16)] {
            let decoder = model.decoder_remembering(format, None);
            let texts = texts(count, &decoder, &mut rng);
            let name = format!("{}, {count} sequences", folder.display());
            let want = alone(&decoder, &mut model.resident(), &texts);
            let got = together(&decoder, &mut model.resident(), &texts, &mut rng);
            check(&name, &want, &got, decoder.vocab());
        }
    }
}

#[test]
fn neighbours_and_pieces_change_no_bit_while_experts_stream() {
    for folder in golden_models() {
        let model = model(&folder);
        let decoder = &model.decoder;
        let mut rng = Rng::new(5 + folder.as_os_str().len() as u64);
        let texts = texts(7, decoder, &mut rng);
        let want = alone(decoder, &mut model.resident(), &texts);
        let (top_k, layers) = (decoder.geometry().top_k, decoder.geometry().moe_layers.len());
        let (mut hits, mut misses) = (0, 0);
        for (slots, scope) in [
            (1, CacheScope::Layer),
            (top_k + 1, CacheScope::Layer),
            (1, CacheScope::Global),
            ((top_k + 1) * layers, CacheScope::Global),
        ] {
            for reader in ["memory", "pread", "uring"] {
                let Some(mut path) = model.streaming_with(reader, slots, scope, slots % 2) else {
                    println!("skipped: the reader {reader} does not work here");
                    continue;
                };
                let got = together(decoder, &mut path, &texts, &mut rng);
                check(&format!("{}, {slots} slots, {scope}, {reader}", folder.display()), &want, &got, decoder.vocab());
                let counts = path.traffic().counts;
                (hits, misses) = (hits + counts.hits, misses + counts.misses);
            }
        }
        assert!(hits > 100 && misses > 100, "{}: {hits} hits, {misses} misses", folder.display());
    }
}

#[test]
fn a_replay_of_a_batched_run_gives_the_engines_counts() {
    let model: Model = model(&fixture("golden/qwen3_moe"));
    let geometry = model.decoder.geometry();
    let mut rng = Rng::new(11);
    let texts = texts(7, &model.decoder, &mut rng);
    for policy in ["lru", "lfu", "arc", "llru", "s3fifo"] {
        for (slots, scope) in [(1, CacheScope::Layer), (3, CacheScope::Layer), (3, CacheScope::Global)] {
            let of_pool = if scope == CacheScope::Global { slots * geometry.moe_layers.len() } else { slots };
            let path = model.evicting(policy, &CacheShape::new(geometry, of_pool, scope), 0, model.memory());
            let mut recorded = Recorded { path, recorder: Recorder::new(geometry, false) };
            together(&model.decoder, &mut recorded, &texts, &mut rng);
            let trace = recorded.recorder.into_trace().unwrap();
            trace.check().unwrap();
            let spec: EvictionSpec = policy.parse().unwrap();
            let again = replay(&trace, (slots, scope, 0), &spec, &PolicyInputs::default(), InitialCache::Carried);
            assert_eq!(again.unwrap().counts, recorded.path.traffic().counts, "{policy} {slots} {scope}");
            // Steps hold tokens of several sequences, prompts and generated tokens beside each other.
            assert_eq!(trace.origins.iter().map(|o| o.sequence).max(), Some(6));
            assert!(trace.passes.len() * 2 < trace.tokens() && trace.origins.iter().any(|o| o.decode));
        }
    }
}
