//! Sequences that are saved and restored: the same logits bit for bit, and no wrong byte goes unnoticed.

use larder_core::Rng;
use larder_engine::{Images, SavedSequenceError, Sequence, SequenceOrigin, TokenInput};
use larder_model::{ComputeContext, Decoder, ExpertPath, KvFormat};

use crate::support::rig::model;
use crate::support::{encoder_decoders, fixture, golden_models};

/// Longer than the windows of the golden models with the positions behind them, and than two checkpoints.
const LONG: usize = 600;

fn origin() -> SequenceOrigin {
    SequenceOrigin::new("golden", "original")
}

fn saved(sequence: &Sequence) -> Vec<u8> {
    let mut bytes = Vec::new();
    sequence.save(&origin(), b"a note", &mut bytes).unwrap();
    bytes
}

fn restored(decoder: &Decoder, bytes: &[u8]) -> Result<Sequence, SavedSequenceError> {
    let (sequence, note) = Sequence::restore(
        decoder,
        decoder.context(),
        &origin(),
        &Images::default(),
        bytes.len() as u64,
        &mut &bytes[..],
    )?;
    assert_eq!(note, b"a note");
    Ok(sequence)
}

/// A sequence of `len` tokens, the last few of which were generated, and one that was restored from its bytes.
fn pair(decoder: &Decoder, experts: &mut dyn ExpertPath, len: usize, rng: &mut Rng) -> [Sequence; 2] {
    let tokens: Vec<u32> = (0..len).map(|_| rng.below(decoder.vocab().min(100)) as u32).collect();
    let (prompt, generated) = tokens.split_at(len - len.min(4) / 2);
    let mut first = Sequence::new(decoder, decoder.context());
    first.forward(decoder, experts, &TokenInput::prompt(prompt), &mut ()).unwrap();
    for token in generated {
        first.forward(decoder, experts, &TokenInput::decode(&[*token]), &mut ()).unwrap();
    }
    let bytes = saved(&first);
    let second = restored(decoder, &bytes).unwrap();
    assert_eq!((second.tokens(), second.pending()), (first.tokens(), 0));
    assert_eq!(saved(&second), bytes);
    [first, second]
}

#[test]
fn a_restored_sequence_continues_with_the_same_bits() {
    for folder in golden_models() {
        let model = model(&folder);
        let mut rng = Rng::new(folder.as_os_str().len() as u64);
        for format in [KvFormat::F32, KvFormat::F16, KvFormat::Q8_0] {
            let decoder = model.decoder_remembering(format, None);
            for len in [1, 63, 64, 70, 130, 256, 300, LONG] {
                if len + 12 > decoder.context() {
                    continue;
                }
                let mut experts = model.resident();
                let mut both = pair(&decoder, &mut experts, len, &mut rng);
                let name = format!("{}, {format:?}, {len} tokens", folder.display());
                let mut next = |input: &TokenInput| {
                    let [first, second] = &mut both;
                    let want = first.forward(&decoder, &mut experts, input, &mut ()).unwrap();
                    assert_eq!(second.forward(&decoder, &mut experts, input, &mut ()).unwrap(), want, "{name}");
                };
                next(&TokenInput::decode(&[7]));
                next(&TokenInput::prompt(&[5, 9, 11, 3]).all_logits());
                for back in [3, 40, 100] {
                    let kept = both.each_mut().map(|sequence| sequence.rewind(len.saturating_sub(back)));
                    assert_eq!(kept[0], kept[1], "{name}: {back} back");
                    let [first, second] = &mut both;
                    let input = TokenInput::prompt(&[2, 4]);
                    let want = first.forward(&decoder, &mut experts, &input, &mut ()).unwrap();
                    assert_eq!(second.forward(&decoder, &mut experts, &input, &mut ()).unwrap(), want, "{name}");
                }
            }
        }
    }
}

#[test]
fn wrong_bytes_are_refused() {
    for name in ["qwen3_moe", "qwen3_next", "deepseek_v2", "lfm2_moe", "gpt_oss", "nemotron_h"] {
        let model = model(&fixture("golden").join(name));
        let decoder = &model.decoder;
        let [sequence, _] = pair(decoder, &mut model.resident(), 70, &mut Rng::new(3));
        let bytes = saved(&sequence);
        for at in (0..bytes.len()).step_by(7) {
            let mut wrong = bytes.clone();
            wrong[at] ^= 1 << (at % 8);
            assert!(restored(decoder, &wrong).is_err(), "{name}: byte {at}");
        }
        for len in (0..bytes.len()).step_by(131) {
            assert!(restored(decoder, &bytes[..len]).is_err(), "{name}: {len} bytes");
        }
        assert!(restored(decoder, &[&bytes[..], &[0]].concat()).is_err(), "{name}");
        let used = decoder.kv_pool().usage();
        drop(sequence);
        assert!(decoder.kv_pool().usage().bytes() < used.bytes() && decoder.kv_pool().usage().pages == 0, "{name}");
    }
}

#[test]
fn pending_tokens_are_left_out() {
    let model = model(&fixture("golden/qwen3_moe"));
    let [mut sequence, _] = pair(&model.decoder, &mut model.resident(), 20, &mut Rng::new(3));
    sequence.append(&model.decoder, &[1, 2, 3], larder_model::TokenPhase::Prefill).unwrap();
    let again = restored(&model.decoder, &saved(&sequence)).unwrap();
    assert_eq!(again.tokens(), &sequence.tokens()[..20]);
    let empty = restored(&model.decoder, &saved(&Sequence::new(&model.decoder, 9))).unwrap();
    assert_eq!((empty.tokens().len(), empty.pending()), (0, 0));
}

#[test]
fn sequences_of_other_shapes_are_refused() {
    let models: Vec<_> = golden_models().iter().map(|folder| model(folder)).collect();
    let files: Vec<Vec<u8>> = models
        .iter()
        .map(|model| saved(&pair(&model.decoder, &mut model.resident(), 33, &mut Rng::new(1))[0]))
        .collect();
    let mut refused = 0;
    for (i, model) in models.iter().enumerate() {
        for (_, file) in files.iter().enumerate().filter(|(j, _)| *j != i) {
            // Some golden models have the same shapes; what tells them apart is their origin.
            refused += usize::from(restored(&model.decoder, file).is_err());
        }
        let other = SequenceOrigin::new("another", "original");
        let file = &files[i];
        let refusal =
            Sequence::restore(&model.decoder, 99, &other, &Images::default(), file.len() as u64, &mut &file[..]);
        assert!(matches!(refusal, Err(SavedSequenceError::OtherModel)));
    }
    assert!(refused > models.len(), "{refused}");
}

#[test]
fn a_full_kv_cache_is_an_error() {
    let model = model(&fixture("golden/qwen3_moe"));
    let [sequence, _] = pair(&model.decoder, &mut model.resident(), 200, &mut Rng::new(3));
    let kv_limit_bytes = Some(sequence.kv_bytes() / 2);
    let small = ComputeContext { kv_limit_bytes, ..ComputeContext::new(1, false).unwrap() };
    let small = model.decoder_by(small).unwrap();
    let error = restored(&small, &saved(&sequence)).err().expect("there is no room").to_string();
    assert!(error.starts_with("the KV cache is full"), "{error}");
    assert_eq!(small.kv_pool().usage().bytes(), 0);
}

#[test]
fn sequences_with_an_encoder_are_refused() {
    for folder in encoder_decoders() {
        let error = model(&folder).decoder.check_saving().unwrap_err().to_string();
        assert_eq!(error, "sequences of a model with an encoder cannot be saved");
    }
}
