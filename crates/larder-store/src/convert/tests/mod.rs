//! Tests of conversion: content, resuming, refused targets.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use larder_core::{TensorMeta, Tensors};
use larder_os::FileAt;

mod importance;
mod mix;
mod targets;

use super::*;
use crate::{
    assemble::Assembler,
    error::StoreErrorKind,
    expert_source::ExpertSource,
    shard::shard_path,
    source::{Checkpoint, GgufBuilder},
    store::Store,
    testing::{EXPERTS, ExpertForm, FORMS, LAYERS, Tiny, bytes_as, files},
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
        let options = ConvertOptions { experts, resident, ..ConvertOptions::default() };
        convert(&self.source, &self.tiny.blueprint(), &self.path(name), &options, &())
    }

    /// The bytes of `convert.json` of a conversion of this source.
    fn state(&self, options: &ConvertOptions) -> Vec<u8> {
        let blueprint = self.tiny.blueprint();
        let fingerprint = fingerprint(&self.source, &identity(&self.source, &blueprint).unwrap(), &blueprint);
        serde_json::to_vec(&ConversionState::new(fingerprint, options)).unwrap()
    }
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
    assert_eq!(keep.names(), ["conv", "head", "norm", "embed"]);
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
    assert_eq!(meta(&q8, "embed"), TensorMeta::new(NumberFormat::Q8_0, vec![7, 64]).unwrap());
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
    let rank = |p: &PathBuf| match p.to_str().unwrap().replace(std::path::MAIN_SEPARATOR, "/").as_str() {
        CONVERSION_STATE => 0,
        "tokenizer.json" => 1,
        RESIDENT_FILE => 2,
        "tables/embed.safetensors" => 3,
        MANIFEST_FILE => 5,
        _ => 4,
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
        let (experts, resident) = (Some(NumberFormat::Q8_0), Some(NumberFormat::F16));
        fixture.state(&ConvertOptions { experts, resident, ..ConvertOptions::default() })
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
            write(&root, &crate::files::atomic_file::temp_path(next), &bytes[..cut.min(bytes.len())]);
        }
        let report = fixture.convert(&name, Some(NumberFormat::Q8_0), Some(NumberFormat::F16)).unwrap();
        assert!(files(&root) == whole, "stopped after {done} files and {cut} bytes");
        if done < names.len() {
            assert_eq!(report.resumed, done.saturating_sub(4).min(EXPERTS * LAYERS.len()));
        }
    }
}

#[test]
fn a_damaged_shard_is_written_again_on_resuming() {
    let fixture = Fixture::new(ExpertForm::Separate);
    fixture.convert("whole", None, None).unwrap();
    let whole = files(&fixture.path("whole"));
    let state = fixture.state(&ConvertOptions::default());
    let table = Path::new("tables/embed.safetensors");
    for name in [Path::new(RESIDENT_FILE), table, &shard_path(LAYERS[1], ExpertId(1))] {
        for at in [0, 9, 4096, whole[name].len() - 1] {
            let root = fixture.path("damaged");
            for (file, bytes) in whole.iter().filter(|(file, _)| *file != Path::new(MANIFEST_FILE)) {
                write(&root, file, bytes);
            }
            write(&root, Path::new(CONVERSION_STATE), &state);
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
fn equal_sources_give_equal_stores_at_any_time_and_place() {
    let fixture = Fixture::new(ExpertForm::Halves);
    fixture.convert("first", None, None).unwrap();
    let copy = fixture.path("elsewhere/under/another/name");
    fixture.tiny.write(&copy);
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(100_000);
    fs::File::options().write(true).open(copy.join("model.safetensors")).unwrap().set_modified(old).unwrap();
    let source = Checkpoint::open(&copy).unwrap();
    let target = fixture.path("second");
    convert(&source, &fixture.tiny.blueprint(), &target, &ConvertOptions::default(), &()).unwrap();
    assert!(files(&fixture.path("first")) == files(&target));
    let identity = Store::open(&target).unwrap().manifest().source.identity.clone();
    assert_eq!(identity.unwrap(), super::identity(&source, &fixture.tiny.blueprint()).unwrap());
}

#[test]
fn a_source_that_changes_while_it_is_converted_is_refused() {
    /// Changes the weights, in place and with their old time, once half of the work is done.
    struct Changing(parking_lot::Mutex<Option<PathBuf>>);

    impl Progress for Changing {
        fn begin(&self, _: u64) {}

        fn advance(&self, _: u64) {
            let Some(path) = self.0.lock().take() else { return };
            let last = fs::metadata(&path).unwrap().len() - 1;
            let byte = fs::read(&path).unwrap()[last as usize];
            // Not written anew: another thread that reads it would see it truncated.
            fs::File::options().write(true).open(&path).unwrap().write_all_at(&[byte ^ 1], last).unwrap();
        }
    }

    let fixture = Fixture::new(ExpertForm::Separate);
    let changing = Changing(parking_lot::Mutex::new(Some(fixture.path("source/model.safetensors"))));
    let (blueprint, target) = (fixture.tiny.blueprint(), fixture.path("store"));
    let error = convert(&fixture.source, &blueprint, &target, &ConvertOptions::default(), &changing).unwrap_err();
    assert!(error.message.contains("has changed while it was converted"), "{error}");
    assert!(!target.join(MANIFEST_FILE).exists());
    // The unfinished store was partly made of the source before its change, so the conversion is not resumed.
    let error = fixture.convert("store", None, None).unwrap_err();
    assert!(error.message.contains("of a source that has changed since"), "{error}");
}

#[test]
fn other_options_do_not_resume_a_conversion() {
    let fixture = Fixture::new(ExpertForm::Separate);
    fs::create_dir(fixture.path("store")).unwrap();
    let state = ConversionState::new("1".into(), &ConvertOptions::default());
    write_atomically(&fixture.path("store").join(CONVERSION_STATE), &serde_json::to_vec(&state).unwrap()).unwrap();
    assert_eq!(fixture.convert("store", None, None).unwrap_err().kind, StoreErrorKind::Taken);
}

#[test]
fn a_failed_conversion_leaves_finished_files_and_no_temporary_ones() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let (store, state) = (fixture.path("store"), fixture.state(&ConvertOptions::default()));
    // A folder is in the place of a shard of the last layer.
    let blocked = store.join(shard_path(LAYERS[1], ExpertId(2)));
    fs::create_dir_all(&blocked).unwrap();
    fs::write(store.join(CONVERSION_STATE), state).unwrap();
    assert_eq!(fixture.convert("store", None, None).unwrap_err().kind, StoreErrorKind::Io);
    let left = files(&store);
    assert!(left.keys().all(|name| name.extension().is_none_or(|e| e != "tmp")), "{left:?}");
    assert!(left.contains_key(&shard_path(LAYERS[0], ExpertId(0))) && !left.contains_key(Path::new(MANIFEST_FILE)));
    assert_eq!(Store::open(&store).err().unwrap().kind, StoreErrorKind::Missing);
    fs::remove_dir(&blocked).unwrap();
    assert!(fixture.convert("store", None, None).unwrap().resumed > 0);
    fixture.convert("again", None, None).unwrap();
    assert!(files(&store) == files(&fixture.path("again")));
}

#[test]
fn a_source_that_changed_since_is_not_resumed() {
    let fixture = Fixture::new(ExpertForm::Separate);
    let (store, state) = (fixture.path("store"), fixture.state(&ConvertOptions::default()));
    fs::create_dir(&store).unwrap();
    fs::write(store.join(CONVERSION_STATE), state).unwrap();
    let file = fixture.path("source/model.safetensors");
    let good = fs::read(&file).unwrap();
    let mut other = good.clone();
    *other.last_mut().unwrap() ^= 1;
    fs::write(&file, other).unwrap();
    let error = fixture.convert("store", None, None).unwrap_err();
    assert_eq!(error.kind, StoreErrorKind::Taken);
    assert!(error.message.contains("a source that has changed since"), "{error}");
    fs::write(&file, good).unwrap();
    fixture.convert("store", None, None).unwrap();
}

#[test]
fn layers_of_other_formats_are_classes_of_their_own_length() {
    // 368,640 bytes as f32, half of that as bf16.
    let mut fixture = Fixture::new(ExpertForm::Separate);
    let kinds = (NumberFormat::F32, Some(NumberFormat::Bf16));
    fixture.tiny = Tiny { inter: 480, kind: kinds.0, last_kind: kinds.1, ..fixture.tiny };
    fixture.tiny.write(&fixture.path("source"));
    fixture.source = Checkpoint::open(&fixture.path("source")).unwrap();
    fixture.convert("store", None, None).unwrap();
    let store = Store::open(&fixture.path("store")).unwrap();
    let experts = &store.manifest().experts;
    assert_eq!(experts.layers, [0, 1]);
    let sizes: Vec<_> = experts.classes.iter().map(|class| (class.data_bytes, class.file_bytes)).collect();
    let f32_bytes = 3 * 480 * 64 * 4;
    assert_eq!(sizes, [(f32_bytes, 6 * 65536 + 4096), (f32_bytes / 2, 3 * 65536 + 4096)]);
    for (layer, kind) in LAYERS.into_iter().zip([NumberFormat::F32, NumberFormat::Bf16]) {
        let layout = store.layout(layer);
        assert_eq!(layout.kinds(), [kind; 3].into());
        let mut data = vec![0; layout.bytes];
        store.read_expert(layer, ExpertId(1), &mut data).unwrap();
        for (i, (_, part)) in layout.parts().enumerate() {
            assert!(part.of(&data) == bytes_as(kind, &fixture.tiny.part(layer, ExpertId(1), i)), "{layer} {i}");
        }
    }
    assert!(verify(&fixture.path("store"), &()).unwrap().is_good());
}

#[test]
fn a_gguf_file_of_mixed_formats_keeps_them() {
    const Q4_K: u32 = 12;
    const Q6_K: u32 = 14;
    let dir = tempfile::tempdir().unwrap();
    let mut gguf = GgufBuilder::new()
        .text("general.architecture", "llama")
        .uint("llama.block_count", 2)
        .uint("llama.context_length", 64)
        .uint("llama.embedding_length", 256)
        .uint("llama.feed_forward_length", 256)
        .uint("llama.attention.head_count", 2)
        .uint("llama.expert_count", 2)
        .uint("llama.expert_used_count", 1)
        .float("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .counting("token_embd.weight", &[256, 5], 0);
    let bytes = |len: usize, seed: usize| (0..len).map(|i| (i * 31 + seed) as u8).collect::<Vec<_>>();
    // As in files that are named Q4_K_M: some of the down matrices have more bits.
    for (layer, down) in [(0, (Q6_K, 210)), (1, (Q4_K, 144))] {
        for (matrix, (kind, block)) in [("gate", (Q4_K, 144)), ("up", (Q4_K, 144)), ("down", down)] {
            let name = format!("blk.{layer}.ffn_{matrix}_exps.weight");
            gguf = gguf.tensor(&name, &[256, 256, 2], kind, &bytes(2 * 256 * block, layer + block));
        }
    }
    fs::write(dir.path().join("m.gguf"), gguf.bytes()).unwrap();
    let source = crate::source::Gguf::open(&dir.path().join("m.gguf")).unwrap();
    let layers = [LayerIdx(0), LayerIdx(1)];
    let mut blueprint = Tiny::new(ExpertForm::Separate).blueprint();
    blueprint.resident.clear();
    let geometry = &mut blueprint.geometry;
    (geometry.layers, geometry.experts, geometry.hidden, geometry.inter) = (2, 2, 256, 256);
    geometry.moe_layers = layers.to_vec();
    let target = dir.path().join("store");
    convert(&source, &blueprint, &target, &ConvertOptions::default(), &()).unwrap();
    let store = Store::open(&target).unwrap();
    assert_eq!(store.manifest().experts.classes.len(), 2);
    let [q6, q4] = layers.map(|layer| store.layout(layer));
    assert_eq!((q6.down.kind, q4.down.kind), (NumberFormat::Q6K, NumberFormat::Q4K));
    assert!(q6.bytes > q4.bytes);
    let assembler = Assembler::new(&source, &blueprint, None).unwrap();
    for (layer, e) in layers.into_iter().flat_map(|layer| [(layer, ExpertId(0)), (layer, ExpertId(1))]) {
        let layout = store.layout(layer);
        let (mut got, mut want) = (vec![1; layout.bytes], vec![2; layout.bytes]);
        store.read_expert(layer, e, &mut got).unwrap();
        assembler.read_expert(layer, e, &mut want).unwrap();
        assert_eq!(*layout, assembler.layout(layer).rearrange(&mut want));
        assert!(got == want, "{layer} {e}");
    }
    assert!(verify(&target, &()).unwrap().is_good());
}

#[test]
fn a_small_copy_has_the_experts_in_the_other_format() {
    for form in [ExpertForm::Separate, ExpertForm::TransposedTurns, ExpertForm::TwoMatrices] {
        let fixture = Fixture::new(form);
        let options = ConvertOptions { small_experts: Some(NumberFormat::Q4_0), ..ConvertOptions::default() };
        let target = fixture.path("store");
        convert(&fixture.source, &fixture.tiny.blueprint(), &target, &options, &()).unwrap();
        fixture.convert("plain", None, None).unwrap();
        let store = Store::open(&target).unwrap();
        let small = store.small_experts().unwrap();
        let blueprint = fixture.tiny.blueprint();
        let assembler = Assembler::new(&fixture.source, &blueprint, Some(NumberFormat::Q4_0)).unwrap();
        for (layer, e) in LAYERS.into_iter().flat_map(|l| (0..EXPERTS).map(move |e| (l, ExpertId(e as u16)))) {
            let layout = small.layout(layer);
            let (mut got, mut want) = (vec![1; layout.bytes], vec![2; layout.bytes]);
            small.read_expert(layer, e, &mut got).unwrap();
            assembler.read_expert(layer, e, &mut want).unwrap();
            assert_eq!(*layout, assembler.layout(layer).rearrange(&mut want));
            assert!(got == want, "{form:?} {layer} {e}");
            assert_eq!(store.layout(layer).up.kind, NumberFormat::Bf16);
        }
        // The experts that the model computes with are the same with and without a copy.
        let (with, without) = (files(&target), files(&fixture.path("plain")));
        assert!(without.iter().filter(|(name, _)| !name.ends_with(MANIFEST_FILE)).all(|(n, b)| with[n] == *b));
        assert!(Store::open(&fixture.path("plain")).unwrap().small_experts().is_none());
        assert!(verify(&target, &()).unwrap().is_good());
        // Damage in a copy is found, and it is written again when a conversion is resumed.
        let shard = crate::shard::shard_path_in(crate::shard::SMALL_EXPERTS, LAYERS[0], ExpertId(1));
        let mut bad = with[&shard].clone();
        bad[5000] ^= 1;
        fs::write(target.join(&shard), bad).unwrap();
        assert_eq!(verify(&target, &()).unwrap().problems[0].path, target.join(&shard));
        fs::remove_file(target.join(MANIFEST_FILE)).unwrap();
        fs::write(target.join(CONVERSION_STATE), fixture.state(&options)).unwrap();
        convert(&fixture.source, &fixture.tiny.blueprint(), &target, &options, &()).unwrap();
        assert!(files(&target) == with);
        fs::remove_file(target.join(&shard)).unwrap();
        assert!(Store::open(&target).is_err() && Store::open_partial(&target).is_ok());
    }
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
