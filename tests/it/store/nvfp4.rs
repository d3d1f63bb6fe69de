//! NVFP4 with its scales of whole matrices: in a GGUF file, in a store, and in checkpoints of two forms.

use std::path::{Path, PathBuf};

use larder_core::{ExpertId, LayerIdx, MatrixScale, NumberFormat, PerMatrix, Tensors};
use larder_store::{ExpertSource, Gguf, Source, Store};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::convert::{convert, full_logits, logits_with, relative_error, text};
use crate::support::checkpoint::{NamedTensor, with_tensors};
use crate::support::{fixture, larder_ok, larder_refuses};

const EXPERTS: usize = 4;

fn gguf() -> PathBuf {
    fixture("fixtures/gguf/tiny-qwen3moe-128-nvfp4.gguf")
}

/// Where the two forms of checkpoints differ.
struct Form {
    codes: &'static str,
    global: &'static str,
    /// What is stored for a factor.
    stored: fn(f32) -> f32,
    config: fn() -> Value,
}

const MODELOPT: Form = Form {
    codes: "weight",
    global: "weight_scale_2",
    stored: |factor| factor,
    config: || json!({ "quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"] }),
};

const COMPRESSED: Form = Form {
    codes: "weight_packed",
    global: "weight_global_scale",
    stored: |factor| 1.0 / factor,
    config: || json!({ "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized" }),
};

impl Form {
    /// The tensors of a matrix `[rows, cols]` of these blocks.
    fn tensors(&self, base: &str, shape: [usize; 2], blocks: &[u8], factor: f32) -> Vec<NamedTensor> {
        let [rows, cols] = shape;
        let scales = blocks.chunks_exact(36).flat_map(|block| &block[..4]).copied().collect();
        let code = |i: usize| {
            let (block, within) = (&blocks[i / 64 * 36..][..36], i % 64);
            (block[4 + within / 16 * 8 + within % 8] >> (within % 16 / 8 * 4)) & 15
        };
        let codes = (0..rows * cols / 2).map(|i| code(2 * i) | code(2 * i + 1) << 4).collect();
        let part = |part: &str, dtype, shape: &[usize], data| NamedTensor {
            name: format!("{base}.{part}"),
            dtype,
            shape: shape.to_vec(),
            data,
        };
        vec![
            part(self.codes, Dtype::U8, &[rows, cols / 2], codes),
            part("weight_scale", Dtype::F8_E4M3, &[rows, cols / 16], scales),
            part(self.global, Dtype::F32, &[1], (self.stored)(factor).to_le_bytes().to_vec()),
            part("input_scale", Dtype::F32, &[1], vec![0; 4]),
        ]
    }

    /// The model of the GGUF file as a checkpoint, in which all that is not in NVFP4 is in f32.
    fn write(&self, folder: &Path) {
        let source = Gguf::open(&gguf()).unwrap();
        let mut all = vec![];
        for name in source.names().into_iter().filter(|name| !name.ends_with(".scale")) {
            let meta = source.meta(name).unwrap();
            let mut bytes = vec![0; meta.bytes];
            source.read(name, 0, &mut bytes).unwrap();
            if meta.kind != NumberFormat::Nvfp4 {
                let mut values = vec![0.0; meta.shape.iter().product()];
                larder_kernels::widen(meta.kind, &bytes, &mut values);
                all.push(NamedTensor::f32(name, &meta.shape, &values));
                continue;
            }
            let (matrices, shape) = match meta.shape[..] {
                [count, rows, cols] => (count, [rows, cols]),
                [rows, cols] => (1, [rows, cols]),
                _ => panic!("{name} has the shape {:?}", meta.shape),
            };
            for (e, blocks) in bytes.chunks(bytes.len() / matrices).enumerate() {
                let scale = MatrixScale::find(&source, name, (e, matrices)).unwrap().unwrap();
                let base = expert_name(name, e).unwrap_or(name.strip_suffix(".weight").unwrap().to_owned());
                all.extend(self.tensors(&base, shape, blocks, scale.read(&source).unwrap()));
            }
        }
        with_tensors(&fixture("golden/mixtral"), folder, &all, |config| {
            *config = source.config().clone();
            config["quantization_config"] = (self.config)();
        });
    }
}

/// The hub's name of expert `e` in the tensor `blk.1.ffn_gate_exps.weight`, without `.weight`.
fn expert_name(name: &str, e: usize) -> Option<String> {
    let (layer, part) = name.strip_prefix("blk.")?.split_once(".ffn_")?;
    Some(format!("model.layers.{layer}.mlp.experts.{e}.{}_proj", part.strip_suffix("_exps.weight")?))
}

fn exact(model: &Path, out: &Path) -> Vec<u8> {
    logits_with(model, out, &["-oexact", "-o", "kv=f32"])
}

/// With activations that are not rounded, f32 and NVFP4 beside it give the bits of the file. A reciprocal is rounded.
#[test]
fn checkpoints_have_the_logits_of_the_gguf_file() {
    let dir = tempfile::tempdir().unwrap();
    let want = exact(&gguf(), &dir.path().join("want"));
    for (form, rounds) in [(MODELOPT, false), (COMPRESSED, true)] {
        let [folder, store] = ["checkpoint", "store"].map(|name| dir.path().join(form.codes).join(name));
        form.write(&folder);
        let got = exact(&folder, &dir.path().join("got"));
        assert!(got == want || rounds, "{}", form.codes);
        assert!(relative_error(&full_logits(&got), &full_logits(&want)) < 1e-5);
        let said = larder_ok(&["convert", text(&folder), text(&store), "--json"]);
        let said: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(said["rounding_error"].as_f64(), Some(0.0), "{said}");
        larder_ok(&["verify", text(&store)]);
        let direct = logits_with(&folder, &dir.path().join("direct"), &[]);
        for flags in [&["--cache=all"][..], &["--cache", "2x"], &["--cache", "3x", "-o", "reader=pread"]] {
            assert!(logits_with(&store, &dir.path().join("streamed"), flags) == direct, "{flags:?}");
        }
        // The values that the codes stand for, rounded to f32 at most once.
        let wide = dir.path().join(form.codes).join("wide");
        convert(&folder, &wide, &["--experts", "f32", "--resident", "f32"]);
        let values = full_logits(&exact(&wide, &dir.path().join("out")));
        assert!(relative_error(&values, &full_logits(&want)) < 1e-5);
    }
}

#[test]
fn a_store_has_the_scales_of_the_gguf_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store");
    convert(&gguf(), &path, &[]);
    let (store, source) = (Store::open(&path).unwrap(), Gguf::open(&gguf()).unwrap());
    for layer in [0, 1] {
        let layout = store.layout(LayerIdx(layer));
        assert_eq!(layout.kinds(), [NumberFormat::Nvfp4; 3].into());
        for e in 0..EXPERTS {
            let mut data = vec![0; layout.bytes];
            store.read_expert(LayerIdx(layer), ExpertId(e as u16), &mut data).unwrap();
            let parts = PerMatrix { gate: layout.gate, up: layout.up, down: layout.down };
            for (part, matrix) in parts.named() {
                let name = format!("blk.{layer}.ffn_{part}_exps.weight");
                let scale = MatrixScale::find(&source, &name, (e, EXPERTS)).unwrap().unwrap();
                assert_eq!(matrix.scale(&data), scale.read(&source).unwrap(), "{layer} {e} {part}");
            }
        }
        let resident = format!("model.layers.{layer}.self_attn.o_proj.weight");
        assert_eq!(store.meta(&resident).unwrap().kind, NumberFormat::Nvfp4);
        let scales = [&store as &dyn Tensors, &source].map(|tensors| larder_core::matrix_scale(tensors, &resident));
        let [kept, stored] = scales.map(Result::unwrap);
        assert!(kept == stored && kept != 1.0);
    }
}

/// Where a file has these bytes.
fn position(file: &[u8], bytes: &[u8]) -> usize {
    file.windows(bytes.len()).position(|window| window == bytes).unwrap()
}

#[test]
fn broken_scales_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let good = std::fs::read(gguf()).unwrap();
    let refused = |file: &[u8], why: &str| {
        let [path, store, tokens, out] = ["broken.gguf", "store", "ids.json", "out"].map(|name| dir.path().join(name));
        std::fs::write(&path, file).unwrap();
        std::fs::write(&tokens, "[1]").unwrap();
        let logits = ["logits", "-ono-store", "-m", text(&path), "--tokens", text(&tokens), "--out", text(&out)];
        for command in [&["convert", text(&path), text(&store)][..], &logits] {
            let said = larder_refuses(command);
            assert!(said.contains(why) && said.lines().count() == 1, "{said}");
        }
        let _ = std::fs::remove_dir_all(&store);
    };
    let source = Gguf::open(&gguf()).unwrap();
    for (gguf_name, name, count) in [
        ("blk.1.ffn_up_exps.scale", "blk.1.ffn_up_exps.weight.scale", EXPERTS),
        ("blk.1.attn_output.scale", "model.layers.1.self_attn.o_proj.weight.scale", 1),
    ] {
        let mut scales = vec![0; 4 * count];
        source.read(name, 0, &mut scales).unwrap();
        let mut infinite = good.clone();
        infinite[position(&good, &scales)..][..4].copy_from_slice(&f32::INFINITY.to_le_bytes());
        refused(&infinite, &format!("tensor '{name}' holds the scale inf"));
        let entry = position(&good, gguf_name.as_bytes()) + gguf_name.len();
        let mut longer = good.clone();
        longer[entry + 4..][..8].copy_from_slice(&3u64.to_le_bytes());
        refused(&longer, &format!("tensor '{name}' is f32 of shape [3], but should be one f32"));
        let mut renamed = good.clone();
        renamed[entry - 1] = b'x';
        refused(&renamed, "which is unknown for the architecture 'qwen3moe'");
    }
    refused(&good[..good.len() - 4096], "ends before the end of its tensor");
}
