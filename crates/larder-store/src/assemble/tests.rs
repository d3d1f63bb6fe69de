//! Tests of assembling experts from every form of checkpoint.

use super::*;
use crate::{
    source::Checkpoint,
    testing::{EXPERTS, ExpertForm, FORMS, HIDDEN, LAYERS, Tiny, bytes_as, write_checkpoint},
};

const KINDS: [NumberFormat; 5] =
    [NumberFormat::F32, NumberFormat::F16, NumberFormat::Bf16, NumberFormat::Q8_0, NumberFormat::Q4_0];

fn open(tiny: &Tiny) -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    tiny.write(dir.path());
    let source = Checkpoint::open(dir.path()).unwrap();
    (dir, source)
}

/// Checks that each part of each expert has the values of the model, and that the padding between parts is zero.
fn check(tiny: &Tiny, wanted: Option<NumberFormat>) {
    let (_dir, source) = open(tiny);
    let assembler = Assembler::new(&source, &tiny.blueprint(), wanted).unwrap();
    let mut scratch = AssemblyBuffers::default();
    for layer in LAYERS {
        for expert in (0..EXPERTS).map(|e| ExpertId(e as u16)) {
            let layout = assembler.layout(layer);
            let mut got = vec![0xaa; layout.bytes];
            assembler.assemble(layer, expert, &mut got, &mut scratch).unwrap();
            let mut want = vec![0; layout.bytes];
            for (i, (_, part)) in layout.parts().enumerate() {
                let values = bytes_as(part.kind, &tiny.part(layer, expert, i + tiny.first_part()));
                want[part.offset..part.offset + part.bytes].copy_from_slice(&values);
            }
            assert!(got == want, "{:?} from {} as {wanted:?}, {layer}, {expert}", tiny.form, tiny.kind);
        }
    }
}

#[test]
fn every_form_gives_the_same_experts_in_every_format() {
    for form in FORMS {
        for wanted in KINDS {
            check(&Tiny::new(form), Some(wanted));
        }
        for kind in [NumberFormat::F32, NumberFormat::F16, NumberFormat::Bf16] {
            check(&Tiny { kind, ..Tiny::new(form) }, None);
        }
    }
}

#[test]
fn matrices_larger_than_a_chunk_are_assembled() {
    for form in FORMS {
        check(&Tiny { inter: 9984, kind: NumberFormat::F32, ..Tiny::new(form) }, Some(NumberFormat::Q8_0));
    }
}

#[test]
fn rows_that_are_not_whole_blocks_fall_back_to_f16_with_a_note() {
    let tiny = Tiny { inter: 80, ..Tiny::new(ExpertForm::Halves) };
    check(&tiny, Some(NumberFormat::Q8_0));
    let (_dir, source) = open(&tiny);
    let assembler = Assembler::new(&source, &tiny.blueprint(), Some(NumberFormat::Q8_0)).unwrap();
    assert_eq!(assembler.layout(LAYERS[0]).gate.unwrap().kind, NumberFormat::Q8_0);
    assert_eq!(assembler.layout(LAYERS[0]).down.kind, NumberFormat::F16);
    assert_eq!(assembler.notes(), ["down is stored as f16: its rows of 80 values are not whole blocks of q8_0"]);
}

fn refusal(source: &dyn Source, blueprint: &Blueprint, wanted: Option<NumberFormat>) -> StoreError {
    Assembler::new(source, blueprint, wanted).err().expect("refused")
}

#[test]
fn wrong_shapes_missing_tensors_and_unsupported_formats_are_refused() {
    let tiny = Tiny::new(ExpertForm::Separate);
    let (_dir, source) = open(&tiny);
    let mut blueprint = tiny.blueprint();
    blueprint.geometry.inter = 48;
    let error = refusal(&source, &blueprint, None);
    assert_eq!(error.message, "tensor 'l.1.0.gate.weight' has shape [32, 64], but the config requires [48, 64]");
    blueprint = tiny.blueprint();
    blueprint.geometry.experts = 4;
    assert_eq!(refusal(&source, &blueprint, None).message, "has no tensor 'l.1.3.gate.weight'");
    blueprint.geometry.experts = 1 << 17;
    assert_eq!(refusal(&source, &blueprint, None).kind, StoreErrorKind::Unsupported);
    blueprint.geometry.experts = 0;
    assert_eq!(refusal(&source, &blueprint, None).kind, StoreErrorKind::Unsupported);
    blueprint = tiny.blueprint();
    blueprint.geometry.hidden = usize::MAX;
    assert_eq!(refusal(&source, &blueprint, None).kind, StoreErrorKind::Mismatch);
    blueprint = tiny.blueprint();
    blueprint.geometry.bias = true;
    assert_eq!(refusal(&source, &blueprint, None).message, "has no expert biases, which the config requires");
}

#[test]
fn values_out_of_range_are_named() {
    let tiny = Tiny { kind: NumberFormat::Bf16, ..Tiny::new(ExpertForm::Separate) };
    let dir = tempfile::tempdir().unwrap();
    let mut tensors = tiny.tensors();
    let up = tensors.iter_mut().find(|(name, ..)| name == "l.3.2.up.weight").unwrap();
    up.2[HIDDEN + 1] = 1e38;
    write_checkpoint(dir.path(), |_| NumberFormat::F32, &tensors);
    let source = Checkpoint::open(dir.path()).unwrap();
    let assembler = Assembler::new(&source, &tiny.blueprint(), Some(NumberFormat::F16)).unwrap();
    let mut data = vec![0; assembler.layout(LAYERS[1]).bytes];
    assembler.read_expert(LAYERS[1], ExpertId(1), &mut data).unwrap();
    let error = assembler.read_expert(LAYERS[1], ExpertId(2), &mut data).unwrap_err();
    assert!(error.message.starts_with("tensor 'l.3.2.up.weight' holds the value 1"), "{error}");
    assert!(error.message.ends_with("which is out of range for f16"), "{error}");
}

#[test]
fn a_file_truncated_after_opening_is_an_error() {
    let tiny = Tiny::new(ExpertForm::TransposedTurns);
    let (dir, source) = open(&tiny);
    let assembler = Assembler::new(&source, &tiny.blueprint(), None).unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(dir.path().join("model.safetensors")).unwrap();
    file.set_len(5000).unwrap();
    let mut data = vec![0; assembler.layout(LAYERS[1]).bytes];
    let error = assembler.read_expert(LAYERS[1], ExpertId(2), &mut data).unwrap_err();
    assert!(error.to_string().contains("model.safetensors: ends before byte"), "{error}");
}

#[test]
fn quantised_tensors_can_only_keep_their_format() {
    let (_dir, source) = open(&Tiny::new(ExpertForm::Separate));
    let choose = |from, wanted| choose_format(&source, "w", from, wanted, 256).map_err(|e| e.message);
    assert_eq!(choose(NumberFormat::Q4K, None), Ok((NumberFormat::Q4K, false)));
    assert_eq!(choose(NumberFormat::Q8_0, Some(NumberFormat::Q8_0)), Ok((NumberFormat::Q8_0, false)));
    for wanted in [NumberFormat::Q4_0, NumberFormat::F16] {
        let message =
            format!("tensor 'w' is already quantised as q8_0 and cannot be converted to {wanted}; keep its format");
        assert_eq!(choose(NumberFormat::Q8_0, Some(wanted)), Err(message));
    }
}

#[test]
fn formats_without_an_encoder_can_only_be_kept() {
    let (_dir, source) = open(&Tiny::new(ExpertForm::Separate));
    let choose = |from, wanted| choose_format(&source, "w", from, Some(wanted), 256).map_err(|e| e.message);
    for kind in NumberFormat::ALL.into_iter().filter(|kind| !kind.is_encodable()) {
        assert_eq!(choose(kind, kind), Ok((kind, false)));
        let message = choose(NumberFormat::Bf16, kind).unwrap_err();
        assert!(
            message.starts_with(&format!("tensor 'w' cannot be written as {kind}, which is only kept")),
            "{message}"
        );
        assert!(message.ends_with("iq2_xs, iq2_s"), "{message}");
    }
}

#[test]
fn rows_that_are_not_whole_blocks_get_another_format() {
    let (_dir, source) = open(&Tiny::new(ExpertForm::Separate));
    for (wanted, cols, stored) in [
        (NumberFormat::Q4K, 512, (NumberFormat::Q4K, false)),
        (NumberFormat::Q4K, 704, (NumberFormat::Q5_0, true)),
        (NumberFormat::Q6K, 704, (NumberFormat::Q8_0, true)),
        (NumberFormat::Q2K, 704, (NumberFormat::Q4_0, true)),
        (NumberFormat::Iq4Xs, 32, (NumberFormat::Iq4Nl, true)),
        (NumberFormat::Iq2Xs, 96, (NumberFormat::Iq4Nl, true)),
        (NumberFormat::Iq3S, 40, (NumberFormat::F16, true)),
        (NumberFormat::Q5K, 40, (NumberFormat::F16, true)),
        (NumberFormat::Mxfp4, 40, (NumberFormat::F16, true)),
    ] {
        assert_eq!(choose_format(&source, "w", NumberFormat::F32, Some(wanted), cols).unwrap(), stored, "{wanted}");
    }
}
