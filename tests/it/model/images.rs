//! Prompts with images: logits and text of transformers, and the same bits however a prompt is divided, wherever a
//! sequence comes from, and whatever is computed beside it.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_cache::CacheScope;
use larder_core::{FIRST_IMAGE_ID, Rng};
use larder_engine::{
    Generated, Images, Listener, Picture, Request, Sampler, Sampling, Sequence, SequenceOrigin, Session, Speculation,
    StepPart, TokenInput, generate, step,
};
use larder_model::{ComputeContext, Decoder, ExpertPath, FakeAttention, KvFormat, LogitsFor, TokenPhase};
use larder_text::StopMatcher;

use super::run_ahead::OnFake;
use super::speculation::tokenizer;
use crate::cache::attention::{DeviceFaults, on_faulty_device};
use crate::support::fixture;
use crate::support::reference::{furthest, load};
use crate::support::rig::{Model, model};
use crate::support::vision::{VisionPrompt, prompts, vision_models};

const ROOM: usize = 4096;
/// The largest difference of a logit from that of transformers.
const BAR: f32 = 1e-3;

/// An empty sequence that knows the pictures of a prompt.
fn sequence(decoder: &Decoder, prompt: &VisionPrompt) -> Sequence {
    let mut sequence = Sequence::new(decoder, ROOM);
    sequence.show(&prompt.pictures);
    sequence
}

/// The logits of all tokens of a prompt in chunks, then of those that are written behind it, one by one.
fn read_and_write(
    sequence: &mut Sequence,
    decoder: &Decoder,
    experts: &mut dyn ExpertPath,
    prompt: &VisionPrompt,
    chunk: usize,
) -> Vec<f32> {
    let rest = &prompt.tokens[sequence.tokens().len()..];
    let input = TokenInput::prompt(rest).in_chunks(chunk).all_logits();
    let mut logits = sequence.forward(decoder, experts, &input, &mut ()).unwrap();
    for id in &prompt.generated {
        logits.extend(sequence.forward(decoder, experts, &TokenInput::decode(&[*id]), &mut ()).unwrap());
    }
    logits
}

/// Every model with its prompts.
fn each(mut check: impl FnMut(&Path, &Model, &[VisionPrompt])) {
    let folders = vision_models();
    assert!(folders.len() >= 4, "{folders:?}");
    for folder in folders {
        check(&folder, &model(&folder), &prompts(&folder, &Images::default()));
    }
}

/// Compares logits and greedy text with those of transformers. Returns how far logits are off.
fn check_reference(folder: &Path) -> f32 {
    let mut loaded = load(folder, "config.json");
    let (vocab, mut worst) = (loaded.decoder.vocab(), 0f32);
    for prompt in prompts(folder, &Images::default()) {
        let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM);
        session.show(&prompt.pictures);
        let input = TokenInput::prompt(&prompt.tokens).in_chunks(usize::MAX).all_logits();
        let mut logits = session.forward(&input, &mut ()).unwrap();
        let rows = prompt.logit_rows.iter().flat_map(|row| &logits[row * vocab..][..vocab]);
        worst = worst.max(furthest(&rows.copied().collect::<Vec<_>>(), &prompt.logits));
        let mut sampler = Sampler::new(Sampling::default(), 0).unwrap();
        logits.drain(..logits.len() - vocab);
        for (want, of_want) in prompt.generated.iter().zip(prompt.decode_logits.chunks_exact(vocab)) {
            worst = worst.max(furthest(&logits, of_want));
            assert_eq!(sampler.sample(&mut logits, session.tokens()).unwrap(), *want, "{}", prompt.name);
            logits = session.forward(&TokenInput::decode(&[*want]), &mut ()).unwrap();
        }
    }
    worst
}

#[test]
fn logits_and_text_are_those_of_transformers() {
    let folders = vision_models();
    assert!(folders.len() >= 4, "{folders:?}");
    for folder in folders {
        let worst = check_reference(&folder);
        println!("{}: {worst:e} off", folder.display());
        assert!(worst <= BAR, "{}: {worst:e} off", folder.display());
    }
}

/// The same for a folder of other references: `LARDER_VISION_REFERENCE`.
#[test]
fn references_with_pictures_are_matched() {
    let Some(all) = std::env::var_os("LARDER_VISION_REFERENCE").map(PathBuf::from) else {
        return println!("skipped: LARDER_VISION_REFERENCE names no folder");
    };
    let folders = crate::support::folders(&all).into_iter().filter(|folder| folder.join("reference.json").exists());
    for folder in folders {
        let worst = check_reference(&folder);
        println!("{}: {worst:e} off", folder.display());
        assert!(worst <= BAR, "{}: {worst:e} off", folder.display());
    }
}

#[test]
fn chunks_of_any_size_change_no_bit() {
    each(|_, model, prompts| {
        for prompt in prompts {
            let read = |chunk| {
                let mut sequence = sequence(&model.decoder, prompt);
                read_and_write(&mut sequence, &model.decoder, &mut model.resident(), prompt, chunk)
            };
            let whole = read(usize::MAX);
            for chunk in [1, 2, 3, 5, 7, 16, 64] {
                assert!(read(chunk) == whole, "{}: chunks of {chunk}", prompt.name);
            }
        }
    });
}

#[test]
fn experts_that_stream_and_a_device_change_no_bit() {
    each(|_, model, prompts| {
        let there = model.decoder_remembering(KvFormat::F16, Some(Arc::new(FakeAttention::new(1 << 30))));
        let here = model.decoder_remembering(KvFormat::F16, None);
        for prompt in prompts {
            let read = |decoder: &Decoder, experts: &mut dyn ExpertPath| {
                read_and_write(&mut sequence(decoder, prompt), decoder, experts, prompt, 9)
            };
            let want = read(&model.decoder, &mut model.resident());
            for (slots, scope, prefetch) in [(1, CacheScope::Layer, 0), (3, CacheScope::Global, 2)] {
                let mut streaming = model.streaming(slots, scope, prefetch, model.memory());
                assert!(read(&model.decoder, &mut streaming) == want, "{}: {slots} slots", prompt.name);
            }
            let [here, there] = [&here, &there].map(|decoder| read(decoder, &mut model.resident()));
            assert!(here == there, "{}: on a device", prompt.name);
        }
    });
}

#[test]
fn a_sequence_that_goes_back_or_is_restored_is_a_fresh_one() {
    each(|_, model, prompts| {
        let (decoder, origin) = (&model.decoder, SequenceOrigin::new("vision", "original"));
        for (prompt, other) in prompts.iter().zip(prompts.iter().cycle().skip(1)) {
            let mut experts = model.resident();
            let want = read_and_write(&mut sequence(decoder, prompt), decoder, &mut experts, prompt, 16);
            let vocab = decoder.vocab();
            let mut warm = sequence(decoder, other);
            read_and_write(&mut warm, decoder, &mut experts, other, 16);
            // What both have in common, and then every place of its own prompt, those in images too.
            let places = std::iter::once(warm.common_prefix(&prompt.tokens)).chain((0..prompt.tokens.len()).step_by(3));
            for kept in places {
                warm.rewind(kept);
                let mut branch = warm.branch();
                let mut bytes = Vec::new();
                branch.save(&origin, b"", &mut bytes).unwrap();
                // Another process, which has seen another picture before.
                let images = Images::default();
                images.picture([1; 32], prompt.pictures.first().map_or(NO_GRID, |picture| picture.grid)).unwrap();
                let (mut restored, _) =
                    Sequence::restore(decoder, ROOM, &origin, &images, bytes.len() as u64, &mut &bytes[..]).unwrap();
                let again = renumbered(prompt, &images);
                assert_eq!(restored.tokens(), &again.tokens[..restored.tokens().len()], "{}", prompt.name);
                for (sequence, prompt) in [(&mut warm, prompt), (&mut branch, prompt), (&mut restored, &again)] {
                    let at = sequence.tokens().len();
                    sequence.show(&prompt.pictures);
                    let got = read_and_write(sequence, decoder, &mut experts, prompt, 16);
                    assert!(got == want[at * vocab..], "{}: {kept} tokens kept", prompt.name);
                }
            }
        }
    });
}

const NO_GRID: larder_core::ImageGrid = larder_core::ImageGrid { rows: 1, columns: 1 };

/// A prompt as a process with these pictures has it.
fn renumbered(prompt: &VisionPrompt, images: &Images) -> VisionPrompt {
    let other = |picture: &Picture| {
        let encoded = picture.encoded.as_deref().unwrap().clone();
        images.encoded(picture.hash, encoded).unwrap()
    };
    let pictures: Vec<Picture> = prompt.pictures.iter().map(other).collect();
    let id = |id: &u32| {
        let at = prompt.pictures.iter().position(|picture| picture.id() == *id);
        at.map_or(*id, |at| pictures[at].id())
    };
    VisionPrompt {
        name: prompt.name.clone(),
        tokens: prompt.tokens.iter().map(id).collect(),
        logit_rows: vec![],
        logits: vec![],
        generated: prompt.generated.clone(),
        decode_logits: vec![],
        pictures,
    }
}

#[test]
fn prompts_beside_each_other_are_as_alone() {
    each(|_, model, prompts| {
        let (decoder, mut rng) = (&model.decoder, Rng::new(3));
        let all: Vec<&VisionPrompt> = prompts.iter().chain(prompts).collect();
        let alone = |prompt: &&VisionPrompt| {
            let mut alone = sequence(decoder, prompt);
            let input = TokenInput::prompt(&prompt.tokens).in_chunks(1).all_logits();
            alone.forward(decoder, &mut model.resident(), &input, &mut ()).unwrap()
        };
        let want: Vec<Vec<f32>> = all.iter().map(alone).collect();
        let mut sequences: Vec<Sequence> = all.iter().map(|prompt| sequence(decoder, prompt)).collect();
        for (sequence, prompt) in sequences.iter_mut().zip(&all) {
            sequence.append(decoder, &prompt.tokens, TokenPhase::Prefill).unwrap();
        }
        let (mut got, mut experts) = (vec![Vec::new(); all.len()], model.resident());
        while sequences.iter().any(|sequence| sequence.pending() > 0) {
            let mut chosen = Vec::new();
            let pending = sequences.iter_mut().enumerate().filter(|(_, sequence)| sequence.pending() > 0);
            let mut parts: Vec<StepPart> = pending
                .map(|(at, sequence)| (at, sequence, rng.below(18)))
                .filter(|(.., most)| *most > 0 && *most <= 12)
                .map(|(at, sequence, most)| {
                    chosen.push(at);
                    StepPart { sequence, most, logits_for: LogitsFor::All, best: None, draws: None }
                })
                .collect();
            if parts.is_empty() {
                continue;
            }
            let logits = step(decoder, &mut experts, &mut parts, &mut ()).unwrap();
            chosen.iter().zip(logits).for_each(|(at, logits)| got[*at].extend(logits.into_all()));
        }
        for ((got, want), prompt) in got.iter().zip(&want).zip(&all) {
            assert!(got == want, "{}", prompt.name);
        }
    });
}

#[test]
fn a_full_context_drops_images_as_a_whole() {
    each(|_, model, prompts| {
        let decoder = &model.decoder;
        for prompt in prompts.iter().filter(|prompt| !prompt.pictures.is_empty()) {
            let mut experts = model.resident();
            for keep in (0..prompt.tokens.len()).step_by(5) {
                let mut shifted = sequence(decoder, prompt);
                shifted.append(decoder, &prompt.tokens, TokenPhase::Prefill).unwrap();
                let dropped = shifted.shift(decoder, keep).unwrap().unwrap();
                let left = [&prompt.tokens[..dropped.start], &prompt.tokens[dropped.end..]].concat();
                assert_eq!(shifted.tokens(), left);
                assert!(dropped.start <= keep && dropped.len() >= (prompt.tokens.len() - keep) / 2);
                // No image is beside another one of its picture.
                let is_cut = |at: usize| {
                    let beside = &prompt.tokens[at.saturating_sub(1)..prompt.tokens.len().min(at + 1)];
                    at > 0 && beside.len() == 2 && beside[0] == beside[1] && beside[0] >= FIRST_IMAGE_ID
                };
                assert!(!is_cut(dropped.start) && !is_cut(dropped.end), "{}: {dropped:?}", prompt.name);
                let mut fresh = sequence(decoder, prompt);
                let mut all = |sequence: &mut Sequence, tokens: &[u32]| {
                    sequence.forward(decoder, &mut experts, &TokenInput::decode(tokens), &mut ()).unwrap()
                };
                assert!(all(&mut shifted, &[5]) == all(&mut fresh, &[&left[..], &[5]].concat()), "{}", prompt.name);
            }
        }
    });
}

struct Quiet;

impl<P> Listener<P> for Quiet {
    fn text(&mut self, _: &str) -> bool {
        true
    }
}

/// The tokens that are written behind a prompt.
fn written<P: ExpertPath>(
    session: &mut Session<P>,
    folder: &Path,
    prompt: &VisionPrompt,
    sampling: Sampling,
    speculation: Speculation,
) -> Generated {
    session.show(&prompt.pictures);
    let request = Request {
        prompt: &prompt.tokens,
        sampler: Sampler::new(sampling, 7).unwrap(),
        grammar: None,
        shown: &[],
        eos: &[],
        stop: StopMatcher::new(vec![]).unwrap(),
        max_tokens: 60,
        drafting: speculation.into(),
    };
    generate(session, &tokenizer(folder), request, &mut Quiet).unwrap()
}

#[test]
fn drafts_penalties_and_steps_ahead_write_the_same_text_behind_images() {
    let sampled = Sampling { temperature: 0.2, top_k: 4, ..Sampling::default() };
    let penalties = Sampling { repetition_penalty: 1.05, frequency_penalty: 0.1, ..sampled };
    let (mut drafted, mut ahead) = (0, 0);
    each(|folder, model, prompts| {
        let (compute, ops) = on_faulty_device(DeviceFaults { wrong_draws: 7, ..DeviceFaults::default() });
        let there = model.decoder_by(ComputeContext { kv_device_layers: usize::MAX, ..compute }).unwrap();
        there.place_embedding().unwrap();
        let mut on_device = OnFake { experts: model.resident(), ops };
        for prompt in prompts {
            for sampling in [Sampling::default(), sampled, penalties] {
                let mut experts = model.resident();
                let mut write = |speculation| {
                    let mut session = Session::new(&model.decoder, &mut experts, ROOM);
                    written(&mut session, folder, prompt, sampling, speculation)
                };
                let want = write(Speculation::Off);
                let got = write(Speculation::Lookup);
                assert_eq!(got.ids, want.ids, "{}", prompt.name);
                drafted += got.drafts.drafted;
                let mut session = Session::new(&there, &mut on_device, ROOM);
                let got = written(&mut session, folder, prompt, sampling, Speculation::Off);
                assert_eq!(got.ids, want.ids, "{}: steps ahead", prompt.name);
                ahead += got.ahead.steps;
            }
        }
    });
    println!("{drafted} tokens drafted, {ahead} steps ahead");
    assert!(drafted > 100 && ahead > 100, "{drafted} tokens drafted, {ahead} steps ahead");
}

/// The sentence with which `tokens` are refused by a sequence that knows these pictures.
fn refusal(model: &Model, pictures: &[Picture], tokens: &[u32]) -> String {
    let mut sequence = Sequence::new(&model.decoder, ROOM);
    sequence.show(pictures);
    let mut experts = model.resident();
    let error = sequence.forward(&model.decoder, &mut experts, &TokenInput::prompt(tokens), &mut ()).unwrap_err();
    assert!(sequence.tokens().is_empty() && sequence.images().is_empty());
    assert!(sequence.forward(&model.decoder, &mut experts, &TokenInput::prompt(&[1, 2]), &mut ()).is_ok());
    error.to_string()
}

#[test]
fn images_that_do_not_fit_are_refused_in_a_sentence() {
    each(|_, model, prompts| {
        let prompt = prompts.iter().find(|prompt| !prompt.pictures.is_empty()).unwrap();
        let (own, tokens) = (&prompt.pictures[0], &prompt.tokens[..]);
        assert!(refusal(model, &[], tokens).contains("a picture that was not given with it"));
        let instead = |other: Picture| {
            let others = prompt.pictures.iter().filter(|picture| picture.number != own.number).cloned();
            others.chain([other]).collect::<Vec<_>>()
        };
        let unencoded = instead(Picture { encoded: None, ..own.clone() });
        assert!(refusal(model, &unencoded, tokens).contains("is not encoded any more"));
        let encoded = own.encoded.as_deref().unwrap();
        let mut others = [encoded.clone(), encoded.clone(), encoded.clone(), encoded.clone()];
        others[0].width += 1;
        others[1].rows.pop();
        others[2].deepstack.push(vec![0.0]);
        others[3].deepstack = vec![encoded.rows.clone(); model.decoder.layers() + 1];
        for wrong in others {
            let picture = Picture { encoded: Some(wrong.into()), ..own.clone() };
            assert!(refusal(model, &instead(picture), tokens).contains("was encoded for another model"));
        }
        let first = tokens.iter().position(|id| *id == own.id()).unwrap();
        let cut = [&tokens[..first + 1], &tokens[first + own.grid.tokens()..]].concat();
        assert!(refusal(model, &prompt.pictures, &cut).contains("the prompt has not all of them"));
        let none = model.decoder.vocab() as u32;
        assert!(refusal(model, &prompt.pictures, &[none]).contains("is out of range"));

        let mut sequence = sequence(&model.decoder, prompt);
        sequence.append(&model.decoder, tokens, TokenPhase::Prefill).unwrap();
        assert!(sequence.missing_pictures().is_empty());
        sequence.drop_encoded();
        let mut numbers: Vec<u32> = prompt.pictures.iter().map(|picture| picture.number).collect();
        let mut known = HashSet::new();
        numbers.retain(|number| known.insert(*number));
        assert_eq!((sequence.missing_pictures(), sequence.ready_tokens()), (numbers.clone(), first));
        sequence.show(&prompt.pictures[..1]);
        sequence.drop_encoded_of_computed();
        assert_eq!(sequence.missing_pictures(), numbers[1..]);
        assert_eq!(sequence.encoded_tokens(), own.grid.tokens());
        sequence.show(&prompt.pictures);
        assert!(sequence.missing_pictures().is_empty());
        assert_eq!(sequence.ready_tokens(), tokens.len());
    });
}

#[test]
fn a_model_that_does_not_see_refuses_images() {
    let images = Images::default();
    let picture = &prompts(&vision_models()[0], &images)[1].pictures[0];
    let tokens: Vec<u32> = [3].into_iter().chain(picture.tokens()).chain([4]).collect();
    for name in ["qwen3_moe", "qwen3_next", "deepseek_v4", "gemma4_text"] {
        let model = model(&fixture("golden").join(name));
        assert_eq!(refusal(&model, std::slice::from_ref(picture), &tokens), "this model takes no images");
        assert!(!model.decoder.takes_images());
    }
}
