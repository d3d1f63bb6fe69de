//! The store format: stores that were written earlier, other formats, experts of several sizes, row tables, a reader
//! written from the specification.

use std::path::{Path, PathBuf};
use std::process::Command;

use larder_core::{LayerIdx, NumberFormat};
use larder_store::{ExpertSource, Store, encode};

use super::convert::{contents, convert, logits_with, text};
use super::number_formats::PatchedGguf;
use crate::support::{fixture, larder_ok, larder_refuses};

pub fn copied(from: &Path, to: &Path) {
    for (name, bytes) in contents(from) {
        let path = to.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}

/// The golden phimoe with the experts of layer 1 cut to bf16, so that its layers have experts of two sizes.
pub fn mixed_checkpoint(folder: &Path) {
    let golden = fixture("golden/phimoe");
    std::fs::create_dir_all(folder).unwrap();
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(golden.join(name), folder.join(name)).unwrap();
    }
    let bytes = std::fs::read(golden.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let cut = |name: &str, data: &[u8]| match name.contains("layers.1.") && name.contains(".experts.") {
        true => (safetensors::Dtype::BF16, data.as_chunks::<4>().0.iter().flat_map(|v| [v[2], v[3]]).collect()),
        false => (safetensors::Dtype::F32, data.to_vec()),
    };
    let tensors: Vec<_> = file.iter().map(|(name, t)| (name, t.shape().to_vec(), cut(name, t.data()))).collect();
    let views = tensors.iter().map(|(name, shape, (dtype, data))| {
        (*name, safetensors::tensor::TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    std::fs::write(folder.join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
}

#[test]
fn stores_that_were_written_earlier_give_the_recorded_bits() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["uniform", "mixed"] {
        let (store, out) = (fixture("stores").join(name), dir.path().join("out"));
        let recorded = std::fs::read(fixture("stores").join(format!("{name}.logits.safetensors"))).unwrap();
        for streamed in [&[][..], &["--cache", "2x"], &["--cache", "1x", "-o", "reader=pread"]] {
            assert!(logits_with(&store, &out, streamed) == recorded, "{name} {streamed:?}");
        }
        larder_ok(&["verify", text(&store)]);
    }
}

#[test]
fn a_store_that_was_written_earlier_has_the_shards_of_a_new_one() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, new) = (dir.path().join("checkpoint"), dir.path().join("new"));
    mixed_checkpoint(&checkpoint);
    convert(&checkpoint, &new, &[]);
    let (new, old) = (contents(&new), contents(&fixture("stores/mixed")));
    let shards: Vec<&PathBuf> = new.keys().filter(|name| name.starts_with("experts")).collect();
    assert_eq!(shards.len(), 12);
    assert!(shards.iter().all(|shard| new[*shard] == old[*shard]));
}

#[test]
fn a_store_of_another_format_is_refused_by_every_command() {
    let dir = tempfile::tempdir().unwrap();
    let (store, second) = (dir.path().join("store"), dir.path().join("second"));
    copied(&fixture("stores/uniform"), &store);
    let manifest = store.join("larder.json");
    let good = std::fs::read_to_string(&manifest).unwrap();
    for format in [1, 3] {
        std::fs::write(&manifest, good.replacen("\"format\": 2", &format!("\"format\": {format}"), 1)).unwrap();
        for args in [
            &["run", "-m", text(&store), "-p", "the", "-n", "1"][..],
            &["inspect", text(&store)],
            &["verify", text(&store)],
            &["store", "set", text(&store), "rms_norm_eps=0.1"],
            &["store", "seal", text(&store)],
            &["convert", text(&store), text(&store), "--also", text(&second)],
        ] {
            let said = larder_refuses(args);
            let reason = format!("has store format {format}, but this larder reads only format 2");
            assert!(said.contains(&reason) && said.contains("`larder convert SOURCE STORE`"), "{args:?}: {said}");
        }
    }
}

#[test]
fn experts_of_several_sizes_stream_with_the_bits_of_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, store) = (dir.path().join("checkpoint"), dir.path().join("store"));
    mixed_checkpoint(&checkpoint);
    convert(&checkpoint, &store, &[]);
    larder_ok(&["verify", text(&store)]);
    let opened = Store::open(&store).unwrap();
    assert!(opened.layout(LayerIdx(0)).bytes > opened.layout(LayerIdx(1)).bytes);
    assert_eq!(opened.manifest().experts.classes.len(), 2);
    let want = logits_with(&checkpoint, &dir.path().join("want"), &[]);
    for flags in ["--cache=all", "--cache 1x", "--cache 3x -o prefetch=2", "--cache 4x -o scope=global"] {
        let flags: Vec<&str> = flags.split(' ').collect();
        assert!(logits_with(&store, &dir.path().join("got"), &flags) == want, "{flags:?}");
    }
}

#[test]
fn slots_have_the_size_of_their_layers_experts() {
    let dir = tempfile::tempdir().unwrap();
    let (checkpoint, store) = (dir.path().join("checkpoint"), dir.path().join("store"));
    mixed_checkpoint(&checkpoint);
    convert(&checkpoint, &store, &[]);
    let opened = Store::open(&store).unwrap();
    let bytes: Vec<u64> = [0, 1].map(|layer| opened.layout(LayerIdx(layer)).bytes as u64).into();
    assert!(bytes[0] > bytes[1]);
    // Room for three experts of each layer and one that passes through, and for two if all slots had the size of the
    // largest.
    let room = 3 * (bytes[0] + bytes[1]) + bytes[0];
    assert!(room < (3 * 2 + 1) * bytes[0]);
    let room = format!("{room}");
    let plan = |flags: &[&str]| -> serde_json::Value {
        let base = ["plan", "-m", text(&store), "--cache", &room, "--json"];
        serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap()
    };
    let own = plan(&[]);
    assert_eq!((&own["slots"], own["slot_bytes"].to_string()), (&3.into(), room.clone()), "{own}");
    assert_eq!(own["expert_classes"][1]["bytes"], bytes[1]);
    assert_eq!(plan(&["-o", "scratch=1"])["slots"], 2, "scratch slots pass between layers");
    let want = logits_with(&checkpoint, &dir.path().join("want"), &[]);
    let streamed = ["--cache", &room, "-o", "prefetch=2"];
    for flags in [&streamed[..], &[&streamed[..], &["-o", "scratch=2"]].concat()] {
        assert!(logits_with(&store, &dir.path().join("got"), flags) == want, "{flags:?}");
    }
    assert!(larder_ok(&["inspect", text(&store)]).contains(" in 1 layer, "));
}

/// A GGUF file whose `down` matrices are q4_0 in layer 0 and f16 in layer 1, as files named after a mix of formats have
/// them.
fn mixed_gguf(path: &Path) {
    let mut gguf = PatchedGguf::of("tiny-olmoe-q4_0.gguf");
    let down = gguf.matrices(LayerIdx(1)).remove(2);
    let (count, _) = gguf.size(&down);
    let values: Vec<f32> = (0..count).map(|i| (i * 37 % 101) as f32 * 0.01 - 0.5).collect();
    let mut larger = vec![0; 2 * values.len()];
    encode(NumberFormat::F16, &values, &mut larger).unwrap();
    gguf.replace(&down, 1, &larger);
    gguf.write(path);
}

#[test]
fn a_gguf_file_of_mixed_formats_streams_with_its_own_bits() {
    let dir = tempfile::tempdir().unwrap();
    let (gguf, store) = (dir.path().join("mixed.gguf"), dir.path().join("store"));
    mixed_gguf(&gguf);
    convert(&gguf, &store, &[]);
    larder_ok(&["verify", text(&store)]);
    let opened = Store::open(&store).unwrap();
    let layouts = opened.manifest().geometry.moe_layers.iter().map(|layer| opened.layout(*layer));
    let kinds: Vec<_> = layouts.map(|layout| layout.down.kind).collect();
    assert_eq!(kinds, [NumberFormat::Q4_0, NumberFormat::F16]);
    assert!(opened.layout(LayerIdx(1)).bytes > opened.layout(LayerIdx(0)).bytes);
    let want = logits_with(&gguf, &dir.path().join("want"), &[]);
    for flags in ["--cache=all", "--cache 2x", "--cache 3x -o scope=global -o prefetch=1"] {
        let flags: Vec<&str> = flags.split(' ').collect();
        assert!(logits_with(&store, &dir.path().join("got"), &flags) == want, "{flags:?}");
    }
}

#[test]
fn the_embedding_is_read_row_by_row_where_the_head_has_its_own_weights() {
    let dir = tempfile::tempdir().unwrap();
    for (model, resident, table) in
        [("phimoe", "keep", true), ("qwen2_moe", "q8_0", true), ("gpt_oss", "f16", true), ("mixtral", "keep", false)]
    {
        let (source, store) = (fixture("golden").join(model), dir.path().join(model));
        convert(&source, &store, &["--resident", resident]);
        assert_eq!(store.join("tables/model.embed_tokens.weight.safetensors").exists(), table, "{model}");
        let shown = larder_ok(&["inspect", text(&store)]);
        assert_eq!(shown.contains("(model.embed_tokens.weight), read row by row"), table, "{shown}");
    }
    // A damaged row is an error when it is first read, and verified beforehand by none but verify.
    let store = dir.path().join("phimoe");
    let table = store.join("tables/model.embed_tokens.weight.safetensors");
    let mut bytes = std::fs::read(&table).unwrap();
    bytes[5000] ^= 1;
    std::fs::write(&table, bytes).unwrap();
    let tokens = dir.path().join("tokens.json");
    std::fs::write(&tokens, "[5, 17]").unwrap();
    let out = dir.path().join("out.safetensors");
    let run = ["logits", "-m", text(&store), "--tokens", text(&tokens), "--out", text(&out), "--force"];
    let said = larder_refuses(&run);
    assert!(said.contains("model.embed_tokens.weight.safetensors: rows 0 and following"), "{said}");
    larder_refuses(&["verify", text(&store)]);
}

#[test]
fn a_small_copy_is_written_shown_and_verified() {
    let dir = tempfile::tempdir().unwrap();
    let (with, without) = (dir.path().join("with"), dir.path().join("without"));
    let source = fixture("golden/mixtral");
    convert(&source, &with, &["--experts", "q8_0", "--shelf", "q4_0"]);
    convert(&source, &without, &["--experts", "q8_0"]);
    larder_ok(&["verify", text(&with)]);
    let shown = larder_ok(&["inspect", text(&with)]);
    assert!(shown.contains("(gate q4_0, up q4_0, down q4_0) of every expert; read by --routing shelf"), "{shown}");
    assert!(!larder_ok(&["inspect", text(&without)]).contains("small copy"));
    let out = dir.path().join("out");
    let streamed = ["--cache", "2x"];
    assert!(logits_with(&with, &out, &streamed) == logits_with(&without, &out, &streamed));
}

/// A reader that was written from docs/store.md alone, where Python has what it needs; `LARDER_PYTHON` names an
/// interpreter.
#[test]
fn a_second_reader_reads_every_form_of_store() {
    let python = std::env::var("LARDER_PYTHON").unwrap_or_else(|_| "python3".into());
    let there = Command::new(&python).args(["-c", "import xxhash, numpy"]).output();
    if !there.is_ok_and(|o| o.status.success()) {
        println!("skipped: {python} has no numpy or xxhash package");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = fixture("../scripts/check/read_store.py");
    let read = |store: &Path, layer: &str| {
        let output = Command::new(&python).args([text(&script), text(store), layer, "0"]).output().unwrap();
        (
            output.status.success(),
            String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr),
        )
    };
    let mixed = dir.path().join("mixed-checkpoint");
    mixed_checkpoint(&mixed);
    let golden = |name: &str| fixture("golden").join(name);
    for (i, (source, layer, flags)) in [
        (golden("gpt_oss"), "1", "--experts keep"),
        (golden("olmoe"), "1", "--experts q8_0 --resident q8_0 --small-copy q4_0"),
        (golden("qwen3_moe"), "1", "--experts q4_0 --resident q8_0"),
        (golden("mixtral"), "0", "--experts bf16"),
        (golden("mixtral"), "0", "--experts mxfp4"),
        (golden("mixtral"), "0", "--experts q5_1"),
        (mixed, "1", "--experts keep"),
        (fixture("fixtures/gguf/tiny-qwen3moe-q4_k.gguf"), "0", "--experts keep"),
    ]
    .into_iter()
    .enumerate()
    {
        let store = dir.path().join(i.to_string());
        convert(&source, &store, &flags.split(' ').collect::<Vec<_>>());
        let (good, said) = read(&store, layer);
        assert!(good && said.contains("experts up: "), "{}: {said}", source.display());
        let shard = store.join(format!("experts/L00{layer}/E000.safetensors"));
        let mut bytes = std::fs::read(&shard).unwrap();
        bytes[4096 + 10] ^= 1;
        std::fs::write(&shard, bytes).unwrap();
        let (good, said) = read(&store, layer);
        assert!(!good && said.contains("segment 0 does not match its checksum"), "{said}");
    }
}
