//! Multi-token prediction: the layer computes what the reference of `scripts/make/make_mtp.py` does, and its drafts
//! change no token.

use std::sync::Arc;

use larder_cache::CacheScope;
use larder_engine::{DraftCounts, Drafting, Session, Speculation, TokenInput};
use larder_model::{ComputeContext, KvCache, LogitsFor, Span};
use larder_runtime::{ModelOptions, MtpUse, OpenModel};
use larder_store::{MtpTensors, Source, Store, open_source, open_source_with};

use super::speculation::{CONTEXT, PROMPT, Way, tokenizer, ways, write, write_in};
use crate::support::checkpoint::{NamedTensor, tensors};
use crate::support::fixture;
use crate::support::gguf::write_glm;
use crate::support::mtp::{MODELS, folder, predict_often, predict_well, set};
use crate::support::reference::{Bars, Reference, furthest};
use crate::support::rig::{Model, model, model_with};

/// Logits and hidden states of the layer for tokens behind positions with hidden states, `most` at a time.
fn predict(model: &Model, cache: &mut KvCache, tokens: &[u32], hidden: &[f32], most: usize) -> (Vec<f32>, Vec<f32>) {
    let (width, mut experts) = (hidden.len() / tokens.len(), model.resident());
    let (mut logits, mut own) = (Vec::new(), Vec::new());
    for (tokens, hidden) in tokens.chunks(most).zip(hidden.chunks(most * width)) {
        let span = Span { logits_for: LogitsFor::All, hidden: Some(&mut own), ..Span::new(tokens, cache) };
        logits.extend(model.decoder.predict(&mut [span], hidden, &mut experts, &mut ()).unwrap());
    }
    (logits, own)
}

#[test]
fn the_layer_computes_what_the_reference_does() {
    for name in MODELS {
        let dir = folder(name, |_| {});
        let mut model = model_with(dir.path(), MtpTensors::Kept);
        let exact = ComputeContext { exact: true, ..ComputeContext::new(2, false).unwrap() };
        model.decoder = model.decoder_by(exact).unwrap();
        let reference = Reference::read(&fixture("mtp").join(name));
        let ids = Reference::read(&fixture("golden").join(name)).tokens("full_ids");
        let (mut cache, mut hidden) = (model.decoder.new_kv_cache(), Vec::new());
        let span = Span { hidden: Some(&mut hidden), ..Span::new(&ids, &mut cache) };
        model.decoder.step(&mut [span], &mut model.resident(), &mut ()).unwrap();
        let width = hidden.len() / ids.len();
        hidden.truncate(hidden.len() - width);

        let (bar, mut cache) = (Bars::of(name).logits, model.decoder.new_mtp_cache());
        let (logits, own) = predict(&model, &mut cache, &ids[1..], &hidden, usize::MAX / width);
        for (what, got) in [("logits", &logits), ("hidden", &own)] {
            let worst = furthest(got, reference.floats(what));
            assert!(worst <= bar, "{name}: {what} are {worst:e} off");
        }
        let mut pieces = model.decoder.new_mtp_cache();
        assert_eq!(predict(&model, &mut pieces, &ids[1..], &hidden, 5), (logits, own.clone()), "{name}: in pieces");

        let (mut state, mut chain) = (own[own.len() - width..].to_vec(), Vec::new());
        for id in reference.tokens("chain_ids") {
            let (logits, own) = predict(&model, &mut cache, &[id], &state, 1);
            chain.extend(logits);
            state = own;
        }
        let worst = furthest(&chain, reference.floats("chain_logits"));
        assert!(worst <= bar, "{name}: logits of its own hidden states are {worst:e} off");
    }
}

fn mtp(speculation: Speculation) -> Drafting {
    Drafting { speculation, model: None, mtp: true }
}

fn add(all: &mut DraftCounts, more: DraftCounts) {
    all.steps += more.steps;
    all.drafted += more.drafted;
    all.accepted += more.accepted;
}

/// Compares texts of both models by way, the one without the layer in memory.
fn compare(name: &str, plain: &Model, with: &Model, way: (usize, Way), all: &mut DraftCounts) {
    let ((at, way), tokenizer) = (way, tokenizer(&fixture("golden/deepseek_v3")));
    let (want, _) = write(plain, &mut plain.resident(), &tokenizer, way, Speculation::Off);
    let (got, drafts) = write(with, &mut with.resident(), &tokenizer, way, mtp(Speculation::Mtp));
    assert_eq!(got, want, "{name}: way {at} in memory");
    add(all, drafts);
    let mut few = with.streaming(3, CacheScope::Layer, 0, with.memory());
    let (got, streamed) = write(with, &mut few, &tokenizer, way, mtp(Speculation::Mtp));
    assert_eq!((got, streamed), (want.clone(), drafts), "{name}: way {at} through three slots");
    let (got, _) = write(with, &mut with.resident(), &tokenizer, way, mtp(Speculation::Auto));
    assert_eq!(got, want, "{name}: way {at} by time");
}

#[test]
fn drafts_of_the_layer_change_neither_the_text_nor_what_follows() {
    for name in MODELS {
        let unsure = |all: &mut Vec<NamedTensor>| set(all, "eh_proj.weight", |_, value| 40.0 * value);
        let folders = [folder(name, predict_well), folder(name, predict_often), folder(name, unsure)];
        let drafts = folders.map(|dir| {
            let (plain, with) = (model(dir.path()), model_with(dir.path(), MtpTensors::Kept));
            let mut all = DraftCounts::default();
            for way in ways().into_iter().enumerate() {
                compare(name, &plain, &with, way, &mut all);
            }
            all
        });
        println!("{name}: {drafts:?}");
        let [well, often, _] = drafts;
        assert!(well.accepted * 10 > well.drafted * 7 && well.accepted > 300, "{name}: {well:?}");
        assert!(often.drafted > often.accepted && often.accepted > 20, "{name}: {often:?}");
    }
}

#[test]
fn a_store_made_without_the_layer_is_as_before() {
    let (dir, plain) = (folder("deepseek_v3", |_| {}), fixture("golden/deepseek_v3"));
    let source = open_source(dir.path()).unwrap();
    assert!(source.notes()[0].contains("tensors for multi-token prediction are not used"), "{:?}", source.notes());
    assert!(open_source_with(dir.path(), MtpTensors::Kept).unwrap().notes().is_empty());
    let (without, with) = (model(dir.path()), model_with(dir.path(), MtpTensors::Kept));
    let same = model(&plain);
    assert_eq!(without.store.manifest().experts, same.store.manifest().experts);
    assert_eq!(without.store.manifest().resident, same.store.manifest().resident);
    let (whole, cut) = (with.store.manifest().clone(), Store::open(with.store.path()).unwrap().without_mtp());
    assert_eq!((whole.geometry.layers, whole.geometry.moe_layers.len()), (3, 3));
    assert_eq!(cut.manifest().geometry, without.store.manifest().geometry);
    assert_eq!((cut.stored_manifest(), cut.hash()), (&whole, with.store.hash()));
    assert_eq!(cut.manifest().config, without.store.manifest().config);
}

#[test]
fn what_is_missing_or_of_another_shape_is_named() {
    let refusal = |change: fn(&mut Vec<NamedTensor>)| {
        let dir = folder("deepseek_v3", change);
        let source = match open_source_with(dir.path(), MtpTensors::Kept) {
            Ok(source) => source,
            Err(error) => return error.to_string(),
        };
        let blueprint = larder_runtime::blueprint_of(source.as_ref()).unwrap();
        let target = tempfile::tempdir().unwrap();
        let target = target.path().join("store");
        let options = larder_store::ConvertOptions::default();
        larder_store::convert(source.as_ref(), &blueprint, &target, &options, &()).unwrap_err().to_string()
    };
    let gone = refusal(|all| all.retain(|t| !t.name.ends_with("eh_proj.weight")));
    assert!(gone.contains("'model.layers.2.eh_proj.weight'"), "{gone}");
    let expert = refusal(|all| all.retain(|t| t.name != "model.layers.2.mlp.experts.3.up_proj.weight"));
    assert!(expert.contains("model.layers.2.mlp.experts.3.up_proj.weight"), "{expert}");
    let shape = refusal(|all| {
        let at = all.iter().position(|t| t.name.ends_with("eh_proj.weight")).unwrap();
        all[at].shape.reverse();
    });
    assert!(shape.contains("eh_proj.weight") && shape.contains("[64, 32]"), "{shape}");
    let none = refusal(|all| all.retain(|t| !t.name.contains("layers.2.")));
    assert!(none.contains("has no layer for multi-token prediction"), "{none}");
}

/// The layer's own state follows a sequence that goes back, and a prompt in pieces of any size.
#[test]
fn a_sequence_that_goes_back_is_drafted_for_again() {
    let dir = folder("glm4_moe", predict_well);
    let (model, tokenizer) = (model_with(dir.path(), MtpTensors::Kept), tokenizer(&fixture("golden/glm4_moe")));
    let way = ways()[0];
    let mut experts = model.resident();
    let mut session = Session::new(&model.decoder, &mut experts, CONTEXT).with_prefill_tokens(3);
    let (first, drafts) = write_in(&mut session, &tokenizer, way, mtp(Speculation::Mtp));
    assert!(drafts.accepted > 0, "{drafts:?}");
    let bytes = session.kv_bytes();
    let prompt = session.tokens()[..PROMPT.len()].to_vec();
    for keep in [PROMPT.len() - 1, 7, 1] {
        // Some of the prompt stays, some is computed again, and then all of it is dropped.
        session.rewind(keep);
        session.forward(&TokenInput::prompt(&prompt[keep..]), &mut ()).unwrap();
        session.rewind(0);
        let (again, drafts) = write_in(&mut session, &tokenizer, way, mtp(Speculation::Mtp));
        assert_eq!(again, first, "behind {keep} tokens that were kept");
        assert!(drafts.accepted > 0, "{drafts:?}");
    }
    assert_eq!(session.kv_bytes(), bytes);
    session.rewind(0);
    session.forward(&TokenInput::prompt(&PROMPT), &mut ()).unwrap();
    assert_eq!(model.decoder.kv_pool().usage().bytes(), session.kv_bytes());
}

#[test]
fn a_gguf_file_drafts_with_its_block_for_multi_token_prediction() {
    let dir = folder("glm4_moe", predict_well);
    let config = serde_json::from_slice(&std::fs::read(dir.path().join("config.json")).unwrap()).unwrap();
    let gguf = dir.path().join("m.gguf");
    write_glm(&gguf, &config, &tensors(dir.path()));
    assert_eq!(open_source(&gguf).unwrap().notes().len(), 1);
    let (plain, with) = (model(&gguf), model_with(&gguf, MtpTensors::Kept));
    assert_eq!((plain.store.manifest().geometry.layers, with.store.manifest().geometry.layers), (2, 3));
    let mut all = DraftCounts::default();
    ways().into_iter().enumerate().take(4).for_each(|way| compare("gguf", &plain, &with, way, &mut all));
    assert!(all.accepted > 100, "{all:?}");

    // As it is, with all experts in memory.
    let options = ModelOptions { mtp: MtpUse::Always, ..Default::default() };
    let (open, way) = (OpenModel::open(&gguf, &options).unwrap(), ways()[2]);
    let compute = Arc::new(ComputeContext::new(2, false).unwrap());
    let (decoder, mut experts) = (open.decoder(&compute).unwrap(), open.all_resident(&compute).unwrap());
    let tokenizer = tokenizer(&fixture("golden/glm4_moe"));
    let mut session = Session::new(&decoder, &mut experts, CONTEXT);
    let (got, drafts) = write_in(&mut session, &tokenizer, way, mtp(Speculation::Mtp));
    let (want, _) = write(&plain, &mut plain.resident(), &tokenizer, way, Speculation::Off);
    assert_eq!(got, want);
    assert!(drafts.accepted > 20, "{drafts:?}");
}
