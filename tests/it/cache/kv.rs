//! KV caches in pages: forks, windows, checkpoints and a limit change no bit.

use larder_core::CheckpointPolicy;
use larder_engine::{Session, TokenInput};
use larder_model::{AllResident, ComputeContext, Decoder, KvCache, KvFormat, KvUsage, LogitsFor, ModelError, Span};
use larder_store::Source;

use crate::support::rig::{Model, model};
use crate::support::{fixture, golden_models};

/// More tokens than a few pages hold.
const LONG: usize = 420;

fn tokens(len: usize, seed: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * i + 7 * i + seed) % 97) as u32).collect()
}

fn context() -> ComputeContext {
    ComputeContext::new(2, false).unwrap()
}

/// The logits of the last token, read in chunks.
fn read(decoder: &Decoder, experts: &mut AllResident, cache: &mut KvCache, tokens: &[u32], piece: usize) -> Vec<f32> {
    let mut logits = Vec::new();
    for piece in tokens.chunks(piece) {
        logits = decoder.step(&mut [Span { horizon: LONG, ..Span::new(piece, cache) }], experts, &mut ()).unwrap();
    }
    logits
}

#[test]
fn windows_and_chunks_give_pages_back() {
    let (long, mut smaller) = (tokens(LONG, 1), 0);
    for folder in golden_models() {
        let model = model(&folder);
        let (decoder, mut experts) = (&model.decoder, model.resident());
        // One pass sees every position, so it has all pages until its end.
        let mut whole = decoder.new_kv_cache();
        let want = read(decoder, &mut experts, &mut whole, &long, LONG);
        drop(whole);
        let mut cache = decoder.new_kv_cache();
        let got = read(decoder, &mut experts, &mut cache, &long, 47);
        assert!(got == want, "{}", folder.display());
        smaller += usize::from(cache.layers.iter().any(|layer| layer.keys.first_position() > 64));
        assert_eq!(decoder.kv_pool().usage().bytes(), cache.bytes());
        drop(cache);
        assert_eq!(decoder.kv_pool().usage(), KvUsage::default());
    }
    assert!(smaller >= 4, "{smaller} models gave pages back");
}

#[test]
fn a_rewind_recomputes_only_what_no_checkpoint_holds() {
    let policy = CheckpointPolicy { every: 8, most: 3, pins: 0 };
    let (long, other, mut partly) = (tokens(100, 1), tokens(9, 5), 0);
    for folder in golden_models() {
        let model = model(&folder);
        let decoder = model.decoder_by(ComputeContext { kv_checkpoints: policy, ..context() }).unwrap();
        let mut experts = model.resident();
        for (len, piece) in [(97, 100), (97, 1), (95, 13), (80, 7), (50, 11), (3, 6)] {
            let both = [&long[..len], &other].concat();
            let mut session = Session::new(&decoder, &mut experts, 256);
            let want = session.forward(&TokenInput::prompt(&both).in_chunks(64), &mut ()).unwrap();
            session.rewind(0);
            for piece in long.chunks(piece) {
                session.forward(&TokenInput::prompt(piece).in_chunks(64), &mut ()).unwrap();
            }
            let kept = session.rewind(len);
            if !decoder.rewinds_freely() {
                assert!(kept.is_multiple_of(8) && kept <= len && (len != 97 || kept == 96), "{kept} of {len}");
                partly += usize::from(0 < kept && kept < len);
            } else {
                assert_eq!(kept, len, "{}", folder.display());
            }
            let got = session.forward(&TokenInput::prompt(&other).in_chunks(3), &mut ()).unwrap();
            assert!(got == want, "{} from {len} on", folder.display());
        }
        assert_eq!(decoder.kv_pool().usage(), KvUsage::default());
    }
    assert!(partly >= 6, "{partly} went back to a checkpoint");
}

#[test]
fn every_model_goes_back_to_pinned_positions() {
    let policy = CheckpointPolicy { every: 8, most: 3, pins: 3 };
    let (long, other, at) = (tokens(300, 1), tokens(9, 5), [5, 33, 150]);
    for folder in golden_models() {
        let model = model(&folder);
        let decoder = model.decoder_by(ComputeContext { kv_checkpoints: policy, ..context() }).unwrap();
        let mut experts = model.resident();
        let mut fresh = |tokens: &[u32]| read(&decoder, &mut experts, &mut decoder.new_kv_cache(), tokens, 64);
        let want = at.map(|at| fresh(&[&long[..at], &other].concat()));
        for piece in [300, 37, 1] {
            let mut cache = decoder.new_kv_cache();
            cache.pin(at.to_vec());
            read(&decoder, &mut experts, &mut cache, &long, piece);
            for (at, want) in at.iter().zip(&want) {
                let mut fork = cache.fork(*at);
                let next = cache.keepable(at + 1);
                assert!(fork.len == *at && [*at, at + 1].contains(&next), "{}: {next}", folder.display());
                assert!(read(&decoder, &mut experts, &mut fork, &other, 4) == *want, "{}", folder.display());
            }
            let before = decoder.kv_pool().usage().bytes();
            let gives_back = cache.unpin() && decoder.kv_pool().usage().bytes() < before;
            assert!(!cache.unpin() && (gives_back || cache.keepable(33) == 33), "{}", folder.display());
        }
        assert_eq!(decoder.kv_pool().usage(), KvUsage::default());
    }
}

#[test]
fn forks_share_pages_and_go_their_own_way() {
    let (long, ends) = (tokens(150, 1), [tokens(70, 2), tokens(3, 3), tokens(90, 4)]);
    for folder in golden_models() {
        let model = model(&folder);
        let (decoder, mut experts) = (&model.decoder, model.resident());
        let mut fresh = |tokens: &[u32]| read(decoder, &mut experts, &mut decoder.new_kv_cache(), tokens, 33);
        let want: Vec<Vec<f32>> = ends.iter().map(|end| fresh(&[&long[..], end].concat())).collect();
        let mut trunk = decoder.new_kv_cache();
        read(decoder, &mut experts, &mut trunk, &long, 33);
        let before = decoder.kv_pool().usage();
        let mut forks: Vec<KvCache> = ends.iter().map(|_| trunk.fork(150)).collect();
        assert_eq!(decoder.kv_pool().usage(), before, "forks take no memory");
        // Each copies one page per layer, and adds its own.
        for ((fork, end), want) in forks.iter_mut().zip(&ends).zip(&want) {
            assert!(read(decoder, &mut experts, fork, end, 20) == *want, "{}", folder.display());
        }
        let (usage, alone) =
            (decoder.kv_pool().usage(), forks.iter().chain([&trunk]).map(KvCache::bytes).sum::<usize>());
        assert!(usage.bytes() < alone, "{}: {usage:?} and {alone}", folder.display());
        drop((trunk, forks));
        assert_eq!(decoder.kv_pool().usage(), KvUsage::default());
    }
}

/// The bytes that the plan counts for one sequence, in steps of up to 50 tokens.
fn planned(model: &Model, tokens: usize) -> usize {
    planned_in_steps(model, tokens, 50)
}

fn planned_in_steps(model: &Model, tokens: usize, step: usize) -> usize {
    let blueprint = larder_model::blueprint(model.store.config()).unwrap();
    let (memory, policy) = (blueprint.sequence_memory, CheckpointPolicy::default());
    let bytes = memory.kv_bytes(tokens, step, larder_core::NumberFormat::F32) + memory.recurrent_bytes(tokens, &policy);
    bytes as usize
}

#[test]
fn windows_are_planned_with_what_they_keep() {
    const TOKENS: usize = 1600;
    let (long, mut less) = (tokens(TOKENS, 3), Vec::new());
    for folder in golden_models() {
        let model = model(&folder);
        // In one step, windows keep as much as other layers.
        let all = planned_in_steps(&model, TOKENS, TOKENS);
        if planned(&model, TOKENS) == all {
            continue;
        }
        for (piece, step) in [(50, 50), (1, 1), (200, 200), (33, 50)] {
            let limit = planned_in_steps(&model, TOKENS, step);
            let decoder = model.decoder_by(ComputeContext { kv_limit_bytes: Some(limit), ..context() }).unwrap();
            read(&decoder, &mut model.resident(), &mut decoder.new_kv_cache(), &long, piece);
            less.push((folder.file_name().unwrap().to_owned(), limit as f64 / all as f64));
        }
    }
    assert!(less.len() >= 4 * 7 && less.iter().all(|(_, share)| *share < 0.9), "{less:?}");
}

#[test]
fn planned_sequences_fit_and_others_are_refused() {
    let long = tokens(LONG, 1);
    for folder in golden_models() {
        let model = model(&folder);
        let limit = planned(&model, LONG) + planned(&model, 1) / 2;
        let decoder = model.decoder_by(ComputeContext { kv_limit_bytes: Some(limit), ..context() }).unwrap();
        let mut experts = model.resident();
        let mut first = decoder.new_kv_cache();
        read(&decoder, &mut experts, &mut first, &long, 50);
        let of_first = decoder.kv_pool().usage().bytes();
        assert!(of_first <= planned(&model, LONG), "{}", folder.display());
        // A second one does not fit for long, and fits again once the first is closed.
        let mut second = decoder.new_kv_cache();
        let mut take = |cache: &mut KvCache| {
            let mut tokens = long.iter();
            tokens.find_map(|token| {
                decoder.step(&mut [Span { horizon: LONG, ..Span::new(&[*token], cache) }], &mut experts, &mut ()).err()
            })
        };
        let full = take(&mut second);
        assert!(matches!(full, Some(ModelError::KvCacheFull(_)) | None), "{full:?}");
        // Both fit where windows leave the first one less than half of the plan.
        assert!(full.is_some() || 2 * of_first <= limit, "{}: no error", folder.display());
        drop((first, second));
        assert!(take(&mut decoder.new_kv_cache()).is_none());
    }
}

#[test]
fn an_error_of_the_limit_says_what_is_in_use() {
    let model = model(&fixture("golden/olmoe"));
    let decoder = model.decoder_by(ComputeContext { kv_limit_bytes: Some(10_000), ..context() }).unwrap();
    let mut session_experts = model.resident();
    let mut session = Session::new(&decoder, &mut session_experts, 200);
    let error = session.forward(&TokenInput::prompt(&tokens(64, 1)).in_chunks(64), &mut ()).unwrap_err().to_string();
    assert!(error.starts_with("the KV cache is full: ") && error.contains(" of 10000 bytes are in use"), "{error}");
    assert_eq!(decoder.kv_pool().usage(), KvUsage::default(), "what failed is given back");
}

#[test]
fn eight_bit_rows_stay_near_and_pieces_change_no_bit() {
    let long = tokens(150, 1);
    for folder in golden_models() {
        let model = model(&folder);
        let mut experts = model.resident();
        let mut logits = |kv_format, threads, piece: usize| {
            let compute = ComputeContext { kv_format, ..ComputeContext::new(threads, false).unwrap() };
            let (decoder, mut all) = (model.decoder_by(compute).unwrap(), Vec::new());
            let mut cache = decoder.new_kv_cache();
            for piece in long.chunks(piece) {
                let span = Span { horizon: 150, logits_for: LogitsFor::All, ..Span::new(piece, &mut cache) };
                all.extend(decoder.step(&mut [span], &mut experts, &mut ()).unwrap());
            }
            all
        };
        let exact = logits(KvFormat::F32, 2, 150);
        let [f16, q8_0] = [KvFormat::F16, KvFormat::Q8_0].map(|format| logits(format, 2, 150));
        for (threads, piece) in [(1, 1), (3, 37)] {
            assert!(logits(KvFormat::Q8_0, threads, piece) == q8_0, "{} in chunks of {piece}", folder.display());
        }
        // A router that is nearly undecided may choose another expert, so the largest differences say little.
        let [f16, q8_0] = [f16, q8_0].map(|rounded| {
            let mut differences: Vec<f32> = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).collect();
            differences.sort_by(f32::total_cmp);
            [differences[differences.len() / 2], differences[differences.len() * 3 / 4]]
        });
        println!(
            "{}: median and third quartile of the differences of logits: f16 {f16:?}, q8_0 {q8_0:?}",
            folder.display()
        );
        assert!(f16[0] < q8_0[0] && q8_0[0] < 0.1 && f16[1] < 0.1, "{}", folder.display());
    }
}
