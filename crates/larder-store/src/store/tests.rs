//! Tests of opening stores: damage, missing files, contradictions.

use std::fs;

use larder_core::SEGMENTS;

use super::*;
use crate::{
    files::safetensors::DATA_START,
    manifest::MANIFEST_FILE,
    shard::shard_path,
    source::SIDECARS,
    testing::{ExpertForm, LAYERS, Tiny, edit_manifest, small_store, store_of},
};

fn store() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = small_store(dir.path(), ExpertForm::Separate);
    (dir, path)
}

fn flip(path: &Path, at: usize) {
    let mut bytes = fs::read(path).unwrap();
    bytes[at] ^= 16;
    fs::write(path, bytes).unwrap();
}

fn refusal(path: &Path) -> StoreError {
    Store::open(path).err().expect("refused")
}

#[test]
fn the_error_for_a_damaged_expert_names_file_and_offset() {
    let (_dir, path) = store();
    let store = Store::open(&path).unwrap();
    let (layer, expert) = (LAYERS[1], ExpertId(2));
    let mut data = vec![0; store.layout(layer).bytes];
    flip(&path.join(shard_path(layer, expert)), DATA_START + 77);
    let error = store.read_expert(layer, expert, &mut data).unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Mismatch);
    let message = error.to_string();
    let shard = path.join(shard_path(layer, expert));
    assert!(message.starts_with(&format!("{}: segment 0 of layer 3, expert 2,", shard.display())), "{message}");
    assert!(message.contains("bytes at 4096, have checksum"), "{message}");
    flip(&path.join(shard_path(layer, expert)), DATA_START + 77);
    store.read_expert(layer, expert, &mut data).unwrap();
}

#[test]
fn a_store_can_be_opened_with_missing_shards() {
    let (_dir, path) = store();
    let (layer, expert) = (LAYERS[1], ExpertId(2));
    fs::remove_file(path.join(shard_path(layer, expert))).unwrap();
    assert!(refusal(&path).to_string().contains("layer 3, expert 2"));
    let store = Store::open_partial(&path).unwrap();
    assert!(!store.has(layer, expert) && store.has(layer, ExpertId(1)) && !store.has(LayerIdx(0), expert));
    assert_eq!(store.require_all().unwrap_err().to_string(), refusal(&path).to_string());
    fs::write(path.join(shard_path(layer, ExpertId(1))), b"short").unwrap();
    assert!(Store::open_partial(&path).is_err());
}

#[test]
fn checksums_are_verified_at_every_read_unless_only_the_first_is_checked() {
    let (_dir, path) = store();
    let store = Store::open(&path).unwrap();
    let (layer, expert) = (LAYERS[0], ExpertId(1));
    let mut data = vec![0; store.layout(layer).bytes];
    store.read_expert(layer, expert, &mut data).unwrap();
    let good = data.clone();
    let shard = path.join(shard_path(layer, expert));
    flip(&shard, DATA_START);
    for _ in 0..2 {
        let error = store.read_expert(layer, expert, &mut data).unwrap_err();
        assert!(error.message.contains("layer 1, expert 1"), "{error}");
    }
    store.set_check_reads(CheckReads::First);
    store.read_expert(layer, expert, &mut data).unwrap();
    assert!(data != good);
    store.set_check_reads(CheckReads::All);
    store.read_expert(layer, expert, &mut data).unwrap_err();
    flip(&shard, DATA_START);
    store.read_expert(layer, expert, &mut data).unwrap();
    assert!(data == good);
}

#[test]
fn lengths_are_checked_at_every_read() {
    let (_dir, path) = store();
    let store = Store::open(&path).unwrap();
    store.set_check_reads(CheckReads::First);
    let (layer, expert) = (LAYERS[0], ExpertId(1));
    let mut data = vec![0; store.layout(layer).bytes];
    store.read_expert(layer, expert, &mut data).unwrap();
    let shard = path.join(shard_path(layer, expert));
    fs::OpenOptions::new().write(true).open(&shard).unwrap().set_len(DATA_START as u64 + 1).unwrap();
    assert_eq!(store.read_expert(layer, expert, &mut data).unwrap_err().kind, StoreErrorKind::Malformed);
    fs::remove_file(&shard).unwrap();
    assert!(store.read_expert(layer, expert, &mut data).unwrap_err().message.starts_with("layer 1, expert 1: "));
}

#[test]
fn small_copies_are_checked_at_every_read() {
    let dir = tempfile::tempdir().unwrap();
    let small_experts = Some(larder_core::NumberFormat::Q4_0);
    let options = crate::convert::ConvertOptions { small_experts, ..Default::default() };
    let path = store_of(dir.path(), &Tiny::new(ExpertForm::Separate), &options);
    let store = Store::open(&path).unwrap();
    let (layer, expert) = (LAYERS[1], ExpertId(0));
    let small = store.small_experts().unwrap();
    let mut data = vec![0; small.layout(layer).bytes];
    small.read_expert(layer, expert, &mut data).unwrap();
    flip(&path.join(crate::shard::shard_path_in(SMALL_EXPERTS, layer, expert)), DATA_START + 9);
    assert!(small.read_expert(layer, expert, &mut data).unwrap_err().message.contains("layer 3, expert 0"));
    store.set_check_reads(CheckReads::First);
    small.read_expert(layer, expert, &mut data).unwrap();
}

#[test]
fn a_damaged_resident_tensor_is_refused() {
    let (_dir, path) = store();
    let resident = path.join(RESIDENT_FILE);
    let length = fs::metadata(&resident).unwrap().len() as usize;
    flip(&resident, length - 1);
    let store = Store::open(&path).unwrap();
    let mut head = vec![0; store.meta("head").unwrap().bytes];
    assert!(store.read("head", 0, &mut head).unwrap_err().0.contains("tensor 'head'"));
    flip(&resident, length - 1);
    store.read("head", 0, &mut head).unwrap();
    flip(&resident, 200);
    assert!(matches!(refusal(&path).kind, StoreErrorKind::Mismatch | StoreErrorKind::Malformed));
}

#[test]
fn an_incomplete_store_is_refused() {
    let (_dir, path) = store();
    let shard = path.join(shard_path(LAYERS[0], ExpertId(0)));
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[..bytes.len() - 1]).unwrap();
    assert!(refusal(&path).message.contains("layer 1, expert 0 is"));
    fs::remove_file(&shard).unwrap();
    assert_eq!(refusal(&path).kind, StoreErrorKind::Io);
    fs::write(&shard, &bytes).unwrap();
    fs::rename(path.join(RESIDENT_FILE), path.join("other")).unwrap();
    assert_eq!(refusal(&path).kind, StoreErrorKind::Io);
    fs::remove_file(path.join(MANIFEST_FILE)).unwrap();
    assert_eq!(refusal(&path).message, "is not a store: it has no larder.json");
    fs::write(path.join(crate::manifest::CONVERSION_STATE), "{}").unwrap();
    assert!(refusal(&path).message.contains("was not finished"));
}

#[test]
fn a_manifest_that_contradicts_the_files_is_refused() {
    for (from, to) in [
        ("\"inter\": 32", "\"inter\": 3200000"),
        ("\"file_bytes\": ", "\"file_bytes\": 1"),
        ("\"experts\": 3", "\"experts\": 2"),
        ("\"experts\": 3", "\"experts\": 4"),
        ("\"hidden\": 64", "\"hidden\": 18446744073709551615"),
        ("\"hidden\": 64", "\"hidden\": -1"),
        ("\"q8_0\"", "\"q9\""),
        ("\"header_checksum\": \"", "\"header_checksum\": \"0"),
        ("\"tokenizer.json\"", "\"../tokenizer.json\""),
        ("\"config\"", "\"more\": 1, \"config\""),
    ] {
        let (_dir, path) = store();
        edit_manifest(&path, from, to);
        let fault = refusal(&path).kind;
        assert!(matches!(fault, StoreErrorKind::Malformed | StoreErrorKind::Mismatch), "{from} -> {to}: {fault:?}");
    }
    let (_dir, path) = store();
    edit_manifest(&path, "\"format\": 2", "\"format\": 7");
    assert_eq!(refusal(&path).kind, StoreErrorKind::OtherFormat);
}

#[test]
fn the_config_must_match_the_stored_model() {
    let (_dir, path) = store();
    let store = Store::open(&path).unwrap();
    let mut blueprint = Tiny::new(ExpertForm::Separate).blueprint();
    store.check(&blueprint).unwrap();
    blueprint.resident[0].shape = vec![6];
    assert!(store.check(&blueprint).unwrap_err().message.contains("tensor 'norm' has shape [5]"));
    blueprint.geometry.top_k = 1;
    assert_eq!(store.check(&blueprint).unwrap_err().kind, StoreErrorKind::Mismatch);
}

#[test]
fn a_damaged_sidecar_is_refused() {
    let (_dir, path) = store();
    flip(&path.join(SIDECARS[0]), 3);
    let store = Store::open(&path).unwrap();
    assert_eq!(store.sidecar(SIDECARS[0]).unwrap_err().kind, StoreErrorKind::Mismatch);
}

#[test]
fn a_segment_is_checked_as_soon_as_its_bytes_are_there() {
    for form in [ExpertForm::TransposedTurns, ExpertForm::TwoMatrices] {
        let dir = tempfile::tempdir().unwrap();
        let path = small_store(dir.path(), form);
        let (layer, expert) = (LAYERS[1], ExpertId(2));
        let whole = fs::read(path.join(shard_path(layer, expert))).unwrap();
        let data = &whole[DATA_START..];
        for at in [0, 1] {
            let store = Store::open(&path).unwrap();
            store.set_check_reads(CheckReads::First);
            let layout = store.layout(layer).clone();
            let segments = layout.segments();
            let mut bad = data[segments[at].clone()].to_vec();
            *bad.last_mut().unwrap() ^= 1;
            let error = store.check_segment(layer, expert, at, &bad).unwrap_err();
            assert!(error.message.contains(&format!("segment {at} of layer 3, expert 2")), "{error}");
            // The other segment is not affected, and the right bytes are accepted after a failure.
            for i in [1 - at, at] {
                store.check_segment(layer, expert, i, &data[segments[i].clone()]).unwrap();
            }
            // Each is checked once in a run if only first reads are, and both together are the expert.
            store.check_segment(layer, expert, at, &bad).unwrap();
            let checked_by_segment = vec![0; layout.bytes];
            store.check_expert(layer, expert, &checked_by_segment).unwrap();
            store.set_check_reads(CheckReads::All);
            assert_eq!(store.check_segment(layer, expert, at, &bad).unwrap_err().message, error.message);
            assert!(store.check_expert(layer, expert, &checked_by_segment).is_err());
        }
    }
}

#[test]
fn the_parts_of_a_check_cover_every_byte_of_an_expert() {
    let (_dir, path) = store();
    let (layer, expert) = (LAYERS[0], ExpertId(1));
    let whole = fs::read(path.join(shard_path(layer, expert))).unwrap();
    let store = Store::open(&path).unwrap();
    let data = &whole[DATA_START..][..store.layout(layer).bytes];
    let check = |data: &[u8]| (0..SEGMENTS).try_for_each(|i| store.check_part(layer, expert, i, data));
    check(data).unwrap();
    for at in [0, data.len() / 2, data.len() - 1] {
        let mut bad = data.to_vec();
        bad[at] ^= 1;
        let error = check(&bad).unwrap_err();
        assert_eq!(error.message, store.check_expert(layer, expert, &bad).unwrap_err().message);
    }
}

#[test]
fn experts_are_read_without_their_headers_which_are_verified_apart() {
    let (_dir, path) = store();
    let (layer, expert) = (LAYERS[0], ExpertId(1));
    flip(&path.join(shard_path(layer, expert)), 400);
    let store = Store::open(&path).unwrap();
    store.read_expert(layer, expert, &mut vec![0; store.layout(layer).bytes]).unwrap();
    let report = crate::verify(&path, &()).unwrap();
    assert!(report.problems[0].message.contains("the header of layer"), "{:?}", report.problems);
}

#[test]
fn a_hash_identifies_the_content_and_a_changed_manifest_is_refused() {
    let (_dir, path) = store();
    let (_other_dir, other) = store();
    let hash = Store::open(&path).unwrap().hash().to_owned();
    assert_eq!(hash, Store::open(&other).unwrap().hash());
    edit_manifest(&other, "\"model_type\": \"tiny\"", "\"model_type\": \"tony\"");
    assert_ne!(hash, Store::open(&other).unwrap().hash());
    let manifest = path.join(MANIFEST_FILE);
    let text = fs::read_to_string(&manifest).unwrap();
    fs::write(&manifest, text.replacen("tiny", "tony", 1)).unwrap();
    assert!(refusal(&path).message.contains("does not match its own checksum"));
}

#[test]
fn tables_that_contradict_the_store_are_refused() {
    let (_dir, path) = store();
    let table = path.join("tables/embed.safetensors");
    fs::rename(&table, path.join("tables/head.safetensors")).unwrap();
    assert_eq!(refusal(&path).kind, StoreErrorKind::Io);
    edit_manifest(&path, "\"name\": \"embed\"", "\"name\": \"head\"");
    assert!(refusal(&path).message.contains("lists 'head' as a table, which resident.safetensors holds too"));
    for (from, to) in [("\"rows\": 7", "\"rows\": 8"), ("\"rows\": 7", "\"rows\": 9007199254740991")] {
        let (_dir, path) = store();
        edit_manifest(&path, from, to);
        assert_eq!(refusal(&path).kind, StoreErrorKind::Malformed, "{to}");
    }
}
