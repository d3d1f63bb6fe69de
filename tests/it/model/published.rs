//! Published configs open as they are, with the right sizes. Their checkpoints consist of headers only.

use std::error::Error;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_core::{Blueprint, ExpertId, NumberFormat, RowPick, TensorSlice};
use larder_model::ModelError;
use larder_runtime::blueprint_of;
use larder_store::{
    Assembler, Checkpoint, IncomingFiles, ReadAt, Source, StoreError, StoreErrorKind, check_resident, plain,
};
use serde_json::{Map, Value, json};

use crate::support::fixture;

/// What follows from a published config: name of the file,
/// `[layers, layers with experts, experts, experts of a token, hidden width, expert width, vocabulary, context]`, bytes
/// of an expert and bytes of the KV cache per token in f16.
///
/// An expert has three matrices of `hidden · expert` values, or two in Nemotron, which read a latent there; of 2 bytes
/// in bf16, which FP8 is kept as, 17/32 in mxfp4 and 18/32 in q4_0. A token keeps, in each layer whose attention goes
/// over all positions, keys and values of its heads, or the latent and what is rotated of latent attention, and keys of
/// indexers; windows, chunks and recurrent states do not grow.
type Row = (&'static str, [usize; 8], usize, u64);

const ROWS: [Row; 25] = [
    ("DeepSeek-R1", [61, 58, 256, 8, 7168, 2048, 129_280, 163_840], 3 * 7168 * 2048 * 2, 61 * (512 + 64) * 2),
    ("DeepSeek-V2-Lite", [27, 26, 64, 6, 2048, 1408, 102_400, 163_840], 3 * 2048 * 1408 * 2, 27 * (512 + 64) * 2),
    ("DeepSeek-V3.2", [61, 58, 256, 8, 7168, 2048, 129_280, 163_840], 3 * 7168 * 2048 * 2, 61 * (512 + 64 + 128) * 2),
    // From the third on, layers with an entry for 4 tokens and one of the indexer, and those with one for 128 tokens
    // take turns.
    (
        "DeepSeek-V4-Flash",
        [43, 43, 256, 6, 4096, 2048, 129_280, 1_048_576],
        3 * 4096 * 2048 * 17 / 32,
        (21 * (512 + 128) / 4 + 20 * 512 / 128) * 2,
    ),
    ("GLM-4.5-Air", [46, 45, 128, 8, 4096, 1408, 151_552, 131_072], 3 * 4096 * 1408 * 2, 46 * 2 * 8 * 128 * 2),
    ("GLM-4.7-Flash", [47, 46, 64, 4, 2048, 1536, 154_880, 202_752], 3 * 2048 * 1536 * 2, 47 * (512 + 64) * 2),
    ("GLM-5", [78, 75, 256, 8, 6144, 2048, 154_880, 202_752], 3 * 6144 * 2048 * 2, 78 * (512 + 64 + 128) * 2),
    // The first three layers have indexers, and then every fourth from the seventh on.
    (
        "GLM-5.2",
        [78, 75, 256, 8, 6144, 2048, 154_880, 1_048_576],
        3 * 6144 * 2048 * 2,
        (78 * (512 + 64) + (3 + 18) * 128) * 2,
    ),
    ("Kimi-K2-Instruct", [61, 60, 384, 8, 7168, 2048, 163_840, 131_072], 3 * 7168 * 2048 * 2, 61 * (512 + 64) * 2),
    ("Kimi-K2.5", [61, 60, 384, 8, 7168, 2048, 163_840, 262_144], 3 * 7168 * 2048 * 18 / 32, 61 * (512 + 64) * 2),
    ("Kimi-Linear-48B-A3B", [27, 26, 256, 8, 2304, 1024, 163_840, 1_048_576], 3 * 2304 * 1024 * 2, 7 * (512 + 64) * 2),
    // Every fourth layer has no chunks.
    (
        "Llama-4-Scout-17B-16E-Instruct",
        [48, 48, 16, 1, 5120, 8192, 202_048, 10_485_760],
        3 * 5120 * 8192 * 2,
        12 * 2 * 8 * 128 * 2,
    ),
    ("MiMo-V2-Flash", [48, 47, 256, 8, 4096, 2048, 152_576, 262_144], 3 * 4096 * 2048 * 2, 9 * 4 * (192 + 128) * 2),
    ("MiniMax-M2.5", [62, 62, 256, 8, 3072, 1536, 200_064, 196_608], 3 * 3072 * 1536 * 2, 62 * 2 * 8 * 128 * 2),
    ("Mixtral-8x7B-v0.1", [32, 32, 8, 2, 4096, 14_336, 32_000, 32_768], 3 * 4096 * 14_336 * 2, 32 * 2 * 8 * 128 * 2),
    (
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        [52, 23, 128, 6, 2688, 1856, 131_072, 262_144],
        2 * 2688 * 1856 * 2,
        6 * 2 * 2 * 128 * 2,
    ),
    (
        "NVIDIA-Nemotron-3-Super-120B-A12B-FP8",
        [88, 40, 512, 22, 4096, 2688, 131_072, 262_144],
        2 * 1024 * 2688 * 2,
        8 * 2 * 2 * 128 * 2,
    ),
    ("Qwen3-30B-A3B", [48, 48, 128, 8, 2048, 768, 151_936, 40_960], 3 * 2048 * 768 * 2, 48 * 2 * 4 * 128 * 2),
    (
        "Qwen3-Coder-480B-A35B-Instruct",
        [62, 62, 160, 8, 6144, 2560, 151_936, 262_144],
        3 * 6144 * 2560 * 2,
        62 * 2 * 8 * 128 * 2,
    ),
    ("Qwen3-Next-80B-A3B", [48, 48, 512, 10, 2048, 512, 151_936, 262_144], 3 * 2048 * 512 * 2, 12 * 2 * 2 * 256 * 2),
    (
        "Qwen3-VL-30B-A3B-Instruct",
        [48, 48, 128, 8, 2048, 768, 151_936, 262_144],
        3 * 2048 * 768 * 2,
        48 * 2 * 4 * 128 * 2,
    ),
    ("Qwen3.5-35B-A3B", [40, 40, 256, 8, 2048, 512, 248_320, 262_144], 3 * 2048 * 512 * 2, 10 * 2 * 2 * 256 * 2),
    // The indexer has a key for 4 tokens.
    (
        "Qwen3.8-Flash-Next",
        [48, 48, 512, 10, 2560, 640, 248_320, 262_144],
        3 * 2560 * 640 * 2,
        12 * (2 * 2 * 256 + 128 / 4) * 2,
    ),
    ("gemma-4-26B-A4B", [30, 30, 128, 8, 2816, 704, 262_144, 262_144], 3 * 2816 * 704 * 2, 5 * 2 * 2 * 512 * 2),
    // Biases are in f32, and an expert is a whole number of pages.
    (
        "gpt-oss-20b",
        [24, 24, 32, 4, 2880, 2880, 201_088, 131_072],
        (3 * 2880 * 2880 * 17 / 32 + 3 * 2880 * 4_usize).next_multiple_of(4096),
        12 * 2 * 8 * 64 * 2,
    ),
];

#[test]
fn published_configs_open_with_the_sizes_that_follow_from_them() {
    assert_eq!(configs(&fixture("configs")).len(), ROWS.len(), "each has a row");
    for (name, sizes, expert, kv) in ROWS {
        let found = open(&fixture("configs").join(format!("{name}.json")));
        assert_eq!(found.unwrap_or_else(|e| panic!("{name}: {e}")), (sizes, expert, kv), "{name}");
    }
}

/// Prints what follows from each config of a folder, for models that have no row.
#[test]
#[ignore = "opens the configs in the folder that LARDER_CONFIGS names"]
fn configs_of_a_folder_open() {
    let folder = std::env::var_os("LARDER_CONFIGS").expect("LARDER_CONFIGS names a folder");
    let (mut refused, files) = (0, configs(Path::new(&folder)));
    for file in &files {
        let found = open(file).map_or_else(|e| e.to_string(), |found| format!("{found:?}"));
        refused += usize::from(!found.starts_with('('));
        println!("{}: {found}", file.file_stem().unwrap_or_default().to_string_lossy());
    }
    assert_eq!(refused, 0, "of {} configs are refused", files.len());
}

/// The configs in a folder, sorted.
fn configs(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<_> = files.filter(|file| file.extension().is_some_and(|e| e == "json")).collect();
    files.sort();
    files
}

/// Sizes, bytes of an expert and bytes of the KV cache per token of a published config.
fn open(config: &Path) -> Result<([usize; 8], usize, u64), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    std::fs::copy(config, folder.path().join("config.json"))?;
    let checkpoint = |tensors: Tensors| Checkpoint::incoming(folder.path(), Arc::new(tensors));
    let tensors = tensors(checkpoint(Tensors::default())?.config())?;
    let source = plain(checkpoint(tensors)?)?;
    let blueprint = blueprint_of(source.as_ref())?;
    check_resident(source.as_ref(), &blueprint)?;
    let experts = Assembler::new(source.as_ref(), &blueprint, None)?;
    let bytes: Vec<usize> = experts.layouts().values().map(|layout| layout.bytes).collect();
    assert!(bytes.iter().all(|own| *own == bytes[0]), "{bytes:?}");
    let g = &blueprint.geometry;
    let Blueprint { hidden, vocab, context, .. } = blueprint;
    let sizes = [g.layers, g.moe_layers.len(), g.experts, g.top_k, hidden, g.inter, vocab, context];
    Ok((sizes, bytes[0], blueprint.sequence_memory.bytes_per_token(NumberFormat::F16)))
}

/// The tensors of a file of which there is only the header.
#[derive(Default)]
struct Tensors {
    entries: Map<String, Value>,
    /// Bytes of all.
    end: u64,
}

impl IncomingFiles for Tensors {
    fn header(&self, _: &str) -> Result<(u64, Vec<u8>), StoreError> {
        let json = serde_json::to_vec(&self.entries).unwrap();
        Ok((8 + json.len() as u64 + self.end, json))
    }

    fn checksum(&self, name: &str) -> Result<String, StoreError> {
        Ok(name.to_owned())
    }

    fn sampled(&self, name: &str, _: &str) -> Result<String, StoreError> {
        Err(no_data(name))
    }

    fn file(&self, name: &str, _: Range<u64>) -> Result<Arc<ReadAt>, StoreError> {
        Err(no_data(name))
    }

    fn release(&self, _: &str, _: Range<u64>) -> Result<(), StoreError> {
        Ok(())
    }
}

fn no_data(name: &str) -> StoreError {
    StoreError::new(StoreErrorKind::Missing, Path::new(name), "has no data")
}

/// All tensors of a model, the experts quantised as its config says.
fn tensors(config: &Value) -> Result<Tensors, ModelError> {
    let (mut described, mut quantised) = (config.clone(), Value::Null);
    for nest in ["/text_config", ""] {
        let keys = described.pointer_mut(nest).and_then(Value::as_object_mut);
        quantised = keys.and_then(|keys| keys.remove("quantization_config")).unwrap_or(quantised);
    }
    let blueprint = larder_model::blueprint(&described)?;
    let mut tensors = Tensors::default();
    blueprint.resident.iter().for_each(|spec| tensors.add(&spec.name, "BF16", &spec.shape));
    tensors.add_experts(&blueprint, &quantised);
    Ok(tensors)
}

impl Tensors {
    fn add(&mut self, name: &str, dtype: &str, shape: &[usize]) {
        if self.entries.contains_key(name) {
            return;
        }
        let bytes = match dtype {
            "BF16" => 2,
            "I32" | "F32" => 4,
            _ => 1,
        };
        let start = self.end;
        self.end += shape.iter().product::<usize>() as u64 * bytes;
        self.entries.insert(name.into(), json!({"dtype": dtype, "shape": shape, "data_offsets": [start, self.end]}));
    }

    /// All experts of a layer in one tensor where there is such a form, else in tensors of their own.
    fn add_experts(&mut self, blueprint: &Blueprint, quantised: &Value) {
        let g = &blueprint.geometry;
        let method = quantised["quant_method"].as_str().unwrap_or_default();
        let apart = blueprint.experts.matrices.gate.is_none() || blueprint.model_type == "deepseek_v4";
        for layer in &g.moe_layers {
            let of_biases = blueprint.experts.bias.iter().flat_map(|bias| bias.named()).map(|bias| (bias, true));
            for ((part, slice), bias) in blueprint.experts.matrices.named().map(|own| (own, false)).chain(of_biases) {
                let [rows, cols] = if part == "down" { [g.hidden, g.inter] } else { [g.inter, g.hidden] };
                let [rows, cols] = if bias { [rows, 1] } else { [rows, cols] };
                if slice.stacked || !apart {
                    let (name, pick) = joined(slice, part);
                    let name = name.replace("{l}", &layer.0.to_string());
                    let rows = if pick == RowPick::All { rows } else { 2 * rows };
                    let shape = match (bias, slice.transposed && method.is_empty()) {
                        (true, _) => vec![g.experts, rows],
                        (false, true) => vec![g.experts, cols, rows],
                        (false, false) => vec![g.experts, rows, cols],
                    };
                    self.add_quantised(&name, &shape, if bias { "" } else { method }, blueprint);
                } else {
                    for expert in 0..g.experts {
                        let name = slice.tensor_name(*layer, ExpertId(expert as u16));
                        self.add_quantised(&name, &[rows, cols], method, blueprint);
                    }
                }
            }
        }
    }

    /// A tensor in the form in which a method of quantisation stores it.
    fn add_quantised(&mut self, name: &str, shape: &[usize], method: &str, blueprint: &Blueprint) {
        let (outer, [rows, cols]) = (&shape[..shape.len() - 2.min(shape.len())], last_two(shape));
        let of = |inner: &[usize]| [outer, inner].concat();
        let beside = |end: &str| format!("{}{end}", name.strip_suffix(".weight").unwrap_or(name));
        match method {
            "fp8" if blueprint.model_type == "deepseek_v4" => {
                self.add(name, "I8", &of(&[rows, cols / 2]));
                self.add(&beside(".scale"), "F8_E8M0", &of(&[rows, cols / 32]));
            }
            "fp8" => {
                self.add(name, "F8_E4M3", shape);
                self.add(&format!("{name}_scale_inv"), "F32", &of(&[rows.div_ceil(128), cols.div_ceil(128)]));
            }
            "mxfp4" => {
                self.add(&beside("_blocks"), "U8", &of(&[rows, cols / 32, 16]));
                self.add(&beside("_scales"), "U8", &of(&[rows, cols / 32]));
            }
            "compressed-tensors" => {
                self.add(&format!("{name}_packed"), "I32", &of(&[rows, cols / 8]));
                self.add(&format!("{name}_scale"), "BF16", &of(&[rows, cols / 32]));
            }
            _ => self.add(name, "BF16", shape),
        }
    }
}

fn last_two(shape: &[usize]) -> [usize; 2] {
    match shape {
        [.., rows, cols] => [*rows, *cols],
        _ => [1, 1],
    }
}

/// The tensor over all experts that has a matrix, and which of its rows.
fn joined(slice: &TensorSlice, part: &str) -> (String, RowPick) {
    match (slice.stacked, slice.name.split_once(".{e}.")) {
        (false, Some((folder, _))) if part == "down" => (format!("{folder}.down_proj"), RowPick::All),
        (false, Some((folder, _))) => (format!("{folder}.gate_up_proj"), RowPick::FirstHalf),
        _ => (slice.name.clone(), slice.pick),
    }
}
