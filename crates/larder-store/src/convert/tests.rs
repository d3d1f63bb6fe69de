//! Tests of conversion: content, resuming, refused targets.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use larder_core::{RowOrder, TensorMeta, Tensors};

use super::*;
use crate::{
    error::StoreErrorKind,
    expert_source::ExpertSource,
    source::Checkpoint,
    store::Store,
    testing::{EXPERTS, ExpertForm, FORMS, LAYERS, Tiny},
    verify::verify,
};

struct Fixture {
    dir: tempfile::TempDir,
    tiny: Tiny,
    source: Checkpoint,
}

impl Fixture {
    fn new(form: ExpertForm) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let tiny = Tiny::new(form);
        tiny.write(&dir.path().join("source"));
        let source = Checkpoint::open(&dir.path().join("source")).unwrap();
        Fixture { dir, tiny, source }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn convert(
        &self,
        name: &str,
        experts: Option<NumberFormat>,
        resident: Option<NumberFormat>,
    ) -> Result<ConvertReport> {
        let options = ConvertOptions { experts, resident };
        convert(&self.source, &self.tiny.blueprint(), &self.path(name), &options, &())
    }
}

/// All files below `root` with their contents.
fn files(root: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
            match entry.is_dir() {
                true => folders.push(entry),
                false => drop(found.insert(entry.strip_prefix(root).unwrap().to_owned(), fs::read(&entry).unwrap())),
            }
        }
    }
    found
}

fn write(root: &Path, name: &Path, bytes: &[u8]) {
    let path = root.join(name);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_store_holds_the_experts_of_the_source() {
    for form in FORMS {
        let fixture = Fixture::new(form);
        for wanted in
            [None, Some(NumberFormat::F32), Some(NumberFormat::F16), Some(NumberFormat::Q8_0), Some(NumberFormat::Q4_0)]
        {
            let name = format!("{wanted:?}");
            fixture.convert(&name, wanted, None).unwrap();
            let store = Store::open(&fixture.path(&name)).unwrap();
            store.check(&fixture.tiny.blueprint()).unwrap();
            let blueprint = fixture.tiny.blueprint();
            let assembler = Assembler::new(&fixture.source, &blueprint, wanted).unwrap();
            for (layer, e) in LAYERS.into_iter().flat_map(|l| (0..EXPERTS).map(move |e| (l, e))) {
                let layout = store.layout(layer);
                let (mut got, mut want) = (vec![1; layout.bytes], vec![2; layout.bytes]);
                store.read_expert(layer, ExpertId(e as u16), &mut got).unwrap();
                assembler.read_expert(layer, ExpertId(e as u16), &mut want).unwrap();
                assert_eq!(*layout, assembler.layout(layer).rearrange(&mut want));
                assert!(got == want, "{form:?} {wanted:?} {layer} {e}");
            }
            assert!(verify(&fixture.path(&name), &()).unwrap().is_good());
        }
    }
}

#[test]
fn resident_tensors_keep_their_format_or_take_the_requested_one() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let meta = |store: &Store, name: &str| store.meta(name).unwrap().clone();
    fixture.convert("keep", None, None).unwrap();
    let keep = Store::open(&fixture.path("keep")).unwrap();
    assert_eq!(keep.names(), ["conv", "embed", "head", "norm"]);
    for name in keep.names() {
        let TensorMeta { bytes, .. } = meta(&keep, name);
        assert_eq!(meta(&keep, name), *fixture.source.meta(name).unwrap());
        let (mut got, mut want) = (vec![1; bytes], vec![2; bytes]);
        keep.read(name, 0, &mut got).unwrap();
        fixture.source.read(name, 0, &mut want).unwrap();
        assert_eq!(got, want, "{name}");
    }
    let report = fixture.convert("q8", None, Some(NumberFormat::Q8_0)).unwrap();
    let q8 = Store::open(&fixture.path("q8")).unwrap();
    let embed = TensorMeta { order: RowOrder::Rows8, ..TensorMeta::new(NumberFormat::Q8_0, vec![7, 64]).unwrap() };
    assert_eq!(meta(&q8, "embed"), embed);
    assert_eq!(meta(&q8, "head").kind, NumberFormat::F16);
    assert_eq!(report.notes, ["head is stored as f16: its rows of 80 values are not whole blocks of q8_0"]);
    assert_eq!((meta(&q8, "norm").kind, meta(&q8, "conv").kind), (NumberFormat::Bf16, NumberFormat::Bf16));
    assert!(q8.check(&fixture.tiny.blueprint()).is_ok());
    assert_eq!(q8.config(), fixture.source.config());
    assert_eq!(q8.sidecar("tokenizer.json").unwrap().unwrap(), br#"{"a":1}"#);
    assert_eq!(q8.sidecar("chat_template.jinja").unwrap(), None);
}

/// The files of a store in the order in which a conversion publishes them.
fn in_order(whole: &BTreeMap<PathBuf, Vec<u8>>) -> Vec<PathBuf> {
    let rank = |p: &PathBuf| match p.to_str().unwrap() {
        CONVERSION_STATE => 0,
        "tokenizer.json" => 1,
        RESIDENT_FILE => 2,
        MANIFEST_FILE => 4,
        _ => 3,
    };
    let mut names: Vec<PathBuf> = whole.keys().cloned().collect();
    names.sort_by_key(|name| (rank(name), name.clone()));
    names
}

#[test]
fn a_resumed_conversion_gives_the_same_store() {
    let fixture = Fixture::new(ExpertForm::Halves);
    fixture.convert("whole", Some(NumberFormat::Q8_0), Some(NumberFormat::F16)).unwrap();
    let whole = files(&fixture.path("whole"));
    let state = {
        let options = ConvertOptions { experts: Some(NumberFormat::Q8_0), resident: Some(NumberFormat::F16) };
        let fingerprint = format!("{:x} {:?}", fixture.source.fingerprint(), fixture.tiny.blueprint());
        serde_json::to_vec(&ConversionState::new(xxh3_64(fingerprint.as_bytes()), &options)).unwrap()
    };
    let mut with_state = whole.clone();
    with_state.insert(CONVERSION_STATE.into(), state);
    let names = in_order(&with_state);
    for (done, cut) in (0..=names.len()).flat_map(|done| [0usize, 1, 100, 5000].map(|cut| (done, cut))) {
        let name = format!("{done}-{cut}");
        let root = fixture.path(&name);
        fs::create_dir_all(&root).unwrap();
        for file in &names[..done] {
            write(&root, file, &with_state[file]);
        }
        // The next file is partly written, under its temporary name.
        if let Some(next) = names.get(done).filter(|_| cut > 0) {
            let bytes = &with_state[next];
            write(&root, &crate::atomic_file::temp_path(next), &bytes[..cut.min(bytes.len())]);
        }
        let report = fixture.convert(&name, Some(NumberFormat::Q8_0), Some(NumberFormat::F16)).unwrap();
        assert!(files(&root) == whole, "stopped after {done} files and {cut} bytes");
        if done < names.len() {
            assert_eq!(report.resumed, done.saturating_sub(3).min(EXPERTS * LAYERS.len()));
        }
    }
}

#[test]
fn a_damaged_shard_is_written_again_on_resuming() {
    let fixture = Fixture::new(ExpertForm::Separate);
    fixture.convert("whole", None, None).unwrap();
    let whole = files(&fixture.path("whole"));
    let fingerprint = format!("{:x} {:?}", fixture.source.fingerprint(), fixture.tiny.blueprint());
    let state = ConversionState::new(xxh3_64(fingerprint.as_bytes()), &ConvertOptions::default());
    for name in [Path::new(RESIDENT_FILE), &shard_path(LAYERS[1], ExpertId(1))] {
        for at in [0, 9, 4096, whole[name].len() - 1] {
            let root = fixture.path("damaged");
            for (file, bytes) in whole.iter().filter(|(file, _)| *file != Path::new(MANIFEST_FILE)) {
                write(&root, file, bytes);
            }
            write(&root, Path::new(CONVERSION_STATE), &serde_json::to_vec(&state).unwrap());
            let mut bad = whole[name].clone();
            bad[at] ^= 4;
            write(&root, name, &bad);
            fixture.convert("damaged", None, None).unwrap();
            assert!(files(&root) == whole, "{} at {at}", name.display());
            fs::remove_dir_all(&root).unwrap();
        }
    }
}

#[test]
fn occupied_targets_are_not_touched() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let refusal = |name: &str, kind| {
        let error = fixture.convert(name, kind, None).unwrap_err();
        (error.kind, error.message)
    };
    fixture.convert("store", None, None).unwrap();
    assert_eq!(refusal("store", None).0, StoreErrorKind::Taken);
    fs::write(fixture.path("file"), "x").unwrap();
    assert_eq!(refusal("file", None), (StoreErrorKind::Taken, "is a file, not a folder".into()));
    assert!(refusal("source", None).1.contains("choose an empty or new folder"));
    fs::create_dir(fixture.path("other")).unwrap();
    fs::write(fixture.path("other").join(CONVERSION_STATE), br#"{"of":"another"}"#).unwrap();
    assert!(refusal("other", None).1.contains("unfinished conversion of another model"));
    assert_eq!(files(&fixture.path("other")).len(), 1);
    fs::create_dir(fixture.path("locked")).unwrap();
    let held = fs::File::open(fixture.path("locked")).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    assert_eq!(refusal("locked", None), (StoreErrorKind::Taken, "is being written by another conversion".into()));
    drop(held);
    fixture.convert("locked", None, None).unwrap();
}

#[test]
fn other_options_do_not_resume_a_conversion() {
    let fixture = Fixture::new(ExpertForm::Separate);
    fs::create_dir(fixture.path("store")).unwrap();
    let state = ConversionState::new(1, &ConvertOptions::default());
    write_atomically(&fixture.path("store").join(CONVERSION_STATE), &serde_json::to_vec(&state).unwrap()).unwrap();
    assert_eq!(fixture.convert("store", None, None).unwrap_err().kind, StoreErrorKind::Taken);
}

#[test]
fn a_failed_conversion_leaves_finished_files_and_no_temporary_ones() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let file = fixture.path("source/model.safetensors");
    let good = fs::read(&file).unwrap();
    // The source is truncated while it is open: layer 3 cannot be read.
    fs::write(&file, &good[..good.len() - 20000]).unwrap();
    assert_eq!(fixture.convert("store", None, None).unwrap_err().kind, StoreErrorKind::Io);
    let left = files(&fixture.path("store"));
    assert!(left.keys().all(|name| name.extension().is_none_or(|e| e != "tmp")), "{left:?}");
    assert!(left.contains_key(&shard_path(LAYERS[0], ExpertId(0))) && !left.contains_key(Path::new(MANIFEST_FILE)));
    assert_eq!(Store::open(&fixture.path("store")).err().unwrap().kind, StoreErrorKind::Missing);
    fs::write(&file, &good).unwrap();
    assert!(fixture.convert("store", None, None).unwrap().resumed > 0);
    fixture.convert("again", None, None).unwrap();
    assert!(files(&fixture.path("store")) == files(&fixture.path("again")));
}

#[test]
fn a_missing_resident_tensor_is_named_before_anything_is_written() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let mut blueprint = fixture.tiny.blueprint();
    blueprint.resident[1].name = "embedding".into();
    blueprint.resident[2].name = "convolution".into();
    let target = fixture.path("store");
    let error = convert(&fixture.source, &blueprint, &target, &ConvertOptions::default(), &()).unwrap_err();
    assert_eq!(error.message, "has no tensor 'embedding', and 1 more are missing");
    blueprint = fixture.tiny.blueprint();
    blueprint.resident[1].shape[0] = 8;
    let error = convert(&fixture.source, &blueprint, &target, &ConvertOptions::default(), &()).unwrap_err();
    assert_eq!(error.message, "tensor 'embed' has shape [7, 64], but the config requires [8, 64]");
    assert!(!target.exists());
}
