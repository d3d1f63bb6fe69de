//! Keys, values and attention on a device: the same bits as in memory.

use std::sync::Arc;

use larder_engine::{Session, TokenInput};
use larder_model::{
    AllResident, ComputeContext, Decoder, FakeAttention, FakeOps, FakeProducts, KvCache, KvFormat, KvUsage, LogitsFor,
    ModelError, Span,
};

use crate::support::rig::{TOKENS, model, read_and_write};
use crate::support::{fixture, golden_models};

const ROOMY: usize = 1 << 30;

/// Logits of all tokens, read in chunks.
fn read(decoder: &Decoder, experts: &mut AllResident, state: &mut KvCache, tokens: &[u32], chunk: usize) -> Vec<f32> {
    let pieces = tokens.chunks(chunk);
    pieces
        .flat_map(|piece| {
            let span = Span { horizon: 40, logits_for: LogitsFor::All, ..Span::new(piece, state) };
            decoder.step(&mut [span], experts, &mut ()).unwrap()
        })
        .collect()
}

#[test]
fn all_models_give_the_same_logits_and_leave_nothing_behind() {
    let mut there = 0;
    let folders = golden_models();
    for (folder, memory) in folders.iter().flat_map(|f| [(f, KvFormat::F32), (f, KvFormat::F16)]) {
        let (model, device) = (model(folder), Arc::new(FakeAttention::new(ROOMY)));
        let here = model.decoder_remembering(memory, None);
        let want = read_and_write(&mut Session::new(&here, &mut model.resident(), 200));
        let decoder = model.decoder_remembering(memory, Some(device.clone()));
        let mut experts = model.resident();
        let mut session = Session::new(&decoder, &mut experts, 200);
        assert!(read_and_write(&mut session) == want, "{} in {memory:?}", folder.display());
        assert!(session.kv_bytes() >= device.used_bytes());
        there += usize::from(device.used_bytes() > 0 && device.calls() > 12);
        drop(session);
        assert_eq!((decoder.kv_pool().usage(), device.copies()), (KvUsage::default(), 0));
        drop(decoder);
        assert_eq!(device.used_bytes(), 0);
    }
    assert!(there > 20, "{there} attended there");
}

/// A context whose products, KV cache and chains are on a device.
fn on_device(failing: u64) -> (ComputeContext, Arc<FakeOps>) {
    on_faulty_device(DeviceFaults { failing, ..DeviceFaults::default() })
}

/// What a device does wrong: every n-th call of attention or allocation fails, or draw is of another token; 0 for none.
#[derive(Clone, Copy, Default, Debug)]
pub struct DeviceFaults {
    pub failing: u64,
    pub refusing: u64,
    pub wrong_draws: u64,
}

/// As [`on_device`], with these faults.
pub fn on_faulty_device(faults: DeviceFaults) -> (ComputeContext, Arc<FakeOps>) {
    let DeviceFaults { failing, refusing, wrong_draws } = faults;
    let products = Arc::new(FakeProducts::new(ROOMY as u64));
    let attention = Arc::new(FakeAttention::new(ROOMY).failing(failing).refusing(refusing));
    let ops = Arc::new(FakeOps::fake(products.clone(), attention.clone()).drawing_wrong(wrong_draws));
    let here = ComputeContext::new(2, false).unwrap();
    let compute = ComputeContext {
        device_products: Some(products),
        device_attention: Some(attention),
        device_ops: Some(ops.clone()),
        ..here
    };
    (compute, ops)
}

/// By model: the waits of a decoded token, and its MoE layers. Its logits are those of the CPU, with the keys and
/// values of so many layers on the device.
fn waits_of_tokens(kv_device_layers: usize) -> Vec<(String, u64, u64)> {
    let mut waits = Vec::new();
    for folder in golden_models() {
        let model = model(&folder);
        let (compute, ops) = on_device(0);
        let decoder = model.decoder_by(ComputeContext { kv_device_layers, ..compute }).unwrap();
        let want = read_and_write(&mut Session::new(&model.decoder, &mut model.resident(), 200));
        let mut experts = model.resident();
        let mut session = Session::new(&decoder, &mut experts, 200);
        let got = read_and_write(&mut session);
        assert!(want == got, "{} with {kv_device_layers} layers", folder.display());
        let before = ops.chains();
        session.forward(&TokenInput::decode(&TOKENS[..1]), &mut ()).unwrap();
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        waits.push((name, ops.chains() - before, decoder.moe_layers().count() as u64));
    }
    waits
}

#[test]
fn chains_on_a_device_give_the_same_logits() {
    let waits = waits_of_tokens(usize::MAX);
    let whole = waits.iter().filter(|(_, waits, moe_layers)| *waits == moe_layers + 1).count();
    println!("waits for chains and MoE layers: {waits:?}");
    assert!(whole >= 30, "{whole} models wait once for each MoE layer and once for logits: {waits:?}");
}

#[test]
fn keys_and_values_may_be_in_memory() {
    let [all, one, none] = [usize::MAX, 1, 0].map(waits_of_tokens);
    let more = all.iter().zip(&one).zip(&none).filter(|((all, one), none)| all.1 < one.1 && one.1 < none.1);
    let more: Vec<_> = more.collect();
    assert!(more.len() >= 20, "each layer that is attended to in memory is waited for: {more:?}");
}

#[test]
fn a_chain_that_fails_is_an_error_and_nothing_is_lost() {
    let model = model(&fixture("golden/olmoe"));
    let want = read_and_write(&mut Session::new(&model.decoder, &mut model.resident(), 200));
    let (compute, ops) = on_device(7);
    let decoder = model.decoder_by(compute).unwrap();
    let (mut experts, mut failures) = (model.resident(), 0);
    let mut session = Session::new(&decoder, &mut experts, 200);
    let mut last = Vec::new();
    for token in TOKENS {
        last = loop {
            match session.forward(&TokenInput::decode(&[token]), &mut ()) {
                Ok(logits) => break logits,
                Err(error) => assert!(matches!(error, ModelError::Device(_)), "{error:?}"),
            }
            failures += 1;
            assert!(failures < 100);
        };
    }
    assert!(failures > 0 && ops.chains() > failures);
    let vocab = decoder.vocab();
    assert!(last == want[(TOKENS.len() - 1) * vocab..][..vocab], "wrong after a failure");
}

#[test]
fn clones_and_cut_sequences_go_their_own_way_and_grow() {
    for (which, folder) in golden_models().iter().enumerate() {
        let (model, device) = (model(folder), Arc::new(FakeAttention::new(ROOMY)));
        let memory = [KvFormat::F32, KvFormat::F16][which % 2];
        let decoders = [None, Some(device.clone())].map(|attention| model.decoder_remembering(memory, attention));
        let [want, got] = decoders.map(|decoder| {
            let mut experts = model.resident();
            let mut go =
                |state: &mut KvCache, tokens: &[u32], chunk| read(&decoder, &mut experts, state, tokens, chunk);
            let mut first = decoder.new_kv_cache();
            let mut logits = go(&mut first, &TOKENS, 3);
            let mut second = first.clone();
            logits.extend(go(&mut first, &TOKENS[3..6], 1));
            logits.extend(go(&mut second, &TOKENS[6..9], 2));
            let mut third = second.clone();
            drop(second);
            logits.push(third.truncate(7) as f32);
            logits.extend(go(&mut third, &TOKENS[1..5], 4));
            logits.extend(go(&mut first, &TOKENS[..2], 1));
            logits
        });
        assert!(want == got, "{}", folder.display());
        assert_eq!(device.used_bytes(), 0);
        assert!(device.calls() == 0 || device.copies() > 0, "{}", folder.display());
    }
}

#[test]
fn memory_that_a_device_lacks_is_an_error_and_so_is_what_fails() {
    let model = model(&fixture("golden/olmoe"));
    let want = read_and_write(&mut Session::new(&model.decoder, &mut model.resident(), 200));
    let mut experts = model.resident();
    // Enough for some of the layers; or for all of them, but not for what they grow to.
    let page = 64 * 2 * 8 * size_of::<f32>();
    for (bytes, least) in [(3 * page, 0), (5 * page, 64)] {
        let device = Arc::new(FakeAttention::new(bytes));
        let decoder = model.decoder_remembering(KvFormat::F32, Some(device.clone()));
        let (mut state, mut read) = (decoder.new_kv_cache(), 0);
        let error = TOKENS.iter().cycle().take(200).find_map(|token| {
            read += 1;
            decoder.step(&mut [Span::new(&[*token], &mut state)], &mut experts, &mut ()).err()
        });
        let error = error.expect("it does not fit");
        let said = error.to_string();
        assert!(matches!(error, ModelError::Device(_)) && said.contains("does not fit into the"), "{said}");
        assert_eq!(read, least + 1, "tokens that were read");
        drop((state, decoder));
        assert_eq!(device.used_bytes(), 0);
    }
    let device = Arc::new(FakeAttention::new(ROOMY).failing(7));
    let decoder = model.decoder_remembering(KvFormat::F32, Some(device));
    let (mut session, mut failures) = (Session::new(&decoder, &mut experts, 200), 0);
    for token in TOKENS {
        while let Err(error) = session.forward(&TokenInput::decode(&[token]), &mut ()) {
            assert!(matches!(error, ModelError::Device(_)), "{error:?}");
            failures += 1;
            assert!(failures < 100);
        }
    }
    assert!(failures > 0);
    let last = session.forward(&TokenInput::decode(&TOKENS[..1]), &mut ());
    let vocab = decoder.vocab();
    assert!(last.is_err() || last.unwrap() == want[TOKENS.len() * vocab..][..vocab], "wrong after a failure");
}
