//! Checkpoints in the forms of GPTQ, AWQ and MLX: their values, the format in which they are kept, and streaming.

use std::path::{Path, PathBuf};

use half::f16;
use larder_core::{LayerIdx, NumberFormat};
use larder_store::{ExpertSource, Store};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::convert::{contents, convert, full_logits, logits_with, relative_error, text};
use super::quantised::{SIDE, twins};
use crate::support::checkpoint::{NamedTensor, tensors, with_tensors};
use crate::support::{fixture, larder_ok, larder_refuses};

/// Codes from 0 to 15 of a square matrix, and by row the scale, which f16 holds, and the zero point.
struct Quantised {
    codes: Vec<u32>,
    scales: Vec<f32>,
    zeros: Vec<u32>,
}

impl Quantised {
    fn of(values: &[f32], symmetric: bool) -> Self {
        let mut all = Quantised { codes: vec![], scales: vec![], zeros: vec![] };
        for row in values.chunks(SIDE) {
            let [least, most] = [f32::min as fn(f32, f32) -> f32, f32::max].map(|of| row.iter().copied().fold(0.0, of));
            let range = if symmetric { 2.0 * most.max(-least) } else { most - least };
            let scale = f16::from_f32(range / 15.0).to_f32();
            let zero = if symmetric { 8.0 } else { (-least / scale).round().clamp(1.0, 15.0) };
            all.codes.extend(row.iter().map(|v| (v / scale + zero).round().clamp(0.0, 15.0) as u32));
            all.scales.push(scale);
            all.zeros.push(zero as u32);
        }
        all
    }

    fn values(&self) -> Vec<f32> {
        let value = |(i, code): (usize, &u32)| (*code as f32 - self.zeros[i / SIDE] as f32) * self.scales[i / SIDE];
        self.codes.iter().enumerate().map(value).collect()
    }

    fn half_scales(&self) -> Vec<u8> {
        self.scales.iter().flat_map(|scale| f16::from_f32(*scale).to_le_bytes()).collect()
    }
}

/// Words of eight codes each, of which the first is in the low bits.
fn words(codes: impl IntoIterator<Item = u32>) -> Vec<u8> {
    let codes: Vec<u32> = codes.into_iter().collect();
    codes.chunks(8).flat_map(|eight| (0..8).fold(0u32, |word, i| word | eight[i] << (4 * i)).to_le_bytes()).collect()
}

fn part(name: &str, part: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> NamedTensor {
    NamedTensor { name: format!("{name}.{part}"), dtype, shape: shape.to_vec(), data }
}

fn gptq(name: &str, values: &[f32], symmetric: bool) -> (Vec<NamedTensor>, Vec<f32>) {
    let all = Quantised::of(values, symmetric);
    // Word `i` of row `w` holds columns 8 w to 8 w + 7 of row `i`.
    let codes = (0..SIDE * SIDE).map(|at| all.codes[at / 8 % SIDE * SIDE + at / 8 / SIDE * 8 + at % 8]);
    let zeros = all.zeros.iter().map(|zero| zero - 1);
    let order = (0..SIDE).flat_map(|_| 0i32.to_le_bytes()).collect();
    let stored = vec![
        part(name, "qweight", Dtype::I32, &[SIDE / 8, SIDE], words(codes)),
        part(name, "qzeros", Dtype::I32, &[1, SIDE / 8], words(zeros)),
        part(name, "scales", Dtype::F16, &[1, SIDE], all.half_scales()),
        part(name, "g_idx", Dtype::I32, &[SIDE], order),
    ];
    (stored, all.values())
}

fn awq(name: &str, values: &[f32]) -> (Vec<NamedTensor>, Vec<f32>) {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let all = Quantised::of(values, false);
    let row = |at: usize| at % SIDE / 8 * 8 + ORDER[at % 8];
    let stored = vec![
        part(name, "qweight", Dtype::I32, &[SIDE, SIDE / 8], {
            words((0..SIDE * SIDE).map(|at| all.codes[row(at) * SIDE + at / SIDE]))
        }),
        part(name, "qzeros", Dtype::I32, &[1, SIDE / 8], words((0..SIDE).map(|at| all.zeros[row(at)]))),
        part(name, "scales", Dtype::F16, &[1, SIDE], all.half_scales()),
    ];
    (stored, all.values())
}

#[test]
fn gptq_and_awq_are_kept_exactly() {
    type Quantise = fn(&str, &[f32]) -> (Vec<NamedTensor>, Vec<f32>);
    let gptq_config =
        |symmetric: bool| json!({ "quant_method": "gptq", "bits": 4, "group_size": 32, "sym": symmetric });
    let cases: [(Value, Quantise, NumberFormat); 3] = [
        (gptq_config(true), |name, values| gptq(name, values, true), NumberFormat::Q4_0),
        (gptq_config(false), |name, values| gptq(name, values, false), NumberFormat::Q5_0),
        (json!({ "quant_method": "awq", "bits": 4, "version": "gemm" }), awq, NumberFormat::Q5_0),
    ];
    for (config, quantise, kind) in cases {
        let dir = tempfile::tempdir().unwrap();
        let [quantised, wide] = twins(dir.path(), config, quantise);
        is_kept(dir.path(), &quantised, &wide, kind);
    }
}

/// The same bytes from both if they are widened, and as it is kept the same numbers in a store that streams.
fn is_kept(dir: &Path, quantised: &Path, wide: &Path, kind: NumberFormat) {
    for wanted in ["f32", "q8_0"] {
        let shards = [quantised, wide].map(|source| {
            let store = dir.join(format!("{}-{wanted}", source.file_name().unwrap().to_string_lossy()));
            convert(source, &store, &["--experts", wanted]);
            contents(&store).into_iter().filter(|(name, _)| name.starts_with("experts")).collect::<Vec<_>>()
        });
        assert!(!shards[0].is_empty() && shards[0] == shards[1], "{kind} as {wanted}");
    }
    let store = dir.join("store");
    let made: Value = serde_json::from_str(&larder_ok(&["convert", text(quantised), text(&store), "--json"])).unwrap();
    assert_eq!(made["rounding_error"], 0.0, "{kind}");
    larder_ok(&["verify", text(&store)]);
    assert_eq!(Store::open(&store).unwrap().layout(LayerIdx(0)).kinds(), [kind; 3].into());
    let direct = logits_with(quantised, &dir.join("direct"), &[]);
    assert!(logits_with(&store, &dir.join("streamed"), &["--cache", "2x"]) == direct, "{kind}");
    let [kept, wide] = [&store, wide].map(|m| full_logits(&logits_with(m, &dir.join("out"), &["-oexact"])));
    assert!(relative_error(&kept, &wide) < 1e-5, "{kind}");
}

/// The golden mixtral as MLX has it: experts of a layer in one tensor, and they, queries and embedding quantised;
/// beside it in f32.
fn mlx_twins(dir: &Path) -> [PathBuf; 2] {
    let golden = fixture("golden/mixtral");
    let all = tensors(&golden);
    let (mut stored, mut wide) = (vec![], vec![]);
    let mut add = |module: &str, shape: &[usize], values: &[f32]| {
        let matrix = Quantised::of(values, false);
        let biases: Vec<f32> =
            matrix.scales.iter().zip(&matrix.zeros).map(|(scale, zero)| -scale * *zero as f32).collect();
        let halves: Vec<f16> = biases.iter().map(|bias| f16::from_f32(*bias)).collect();
        let [outer @ .., _] = shape else { unreachable!("a matrix has columns") };
        let of = |last: usize| [outer, &[last]].concat();
        stored.push(part(module, "weight", Dtype::U32, &of(SIDE / 8), words(matrix.codes.iter().copied())));
        stored.push(part(module, "scales", Dtype::F16, &of(1), matrix.half_scales()));
        stored.push(part(module, "biases", Dtype::F16, &of(1), halves.iter().flat_map(|h| h.to_le_bytes()).collect()));
        let value = |(i, code): (usize, &u32)| {
            let (scale, bias) = (f64::from(matrix.scales[i / SIDE]), halves[i / SIDE].to_f64());
            (f64::from(*code) * scale + bias) as f32
        };
        matrix.codes.iter().enumerate().map(value).collect::<Vec<f32>>()
    };
    let mut stacks = std::collections::BTreeMap::<String, Vec<&NamedTensor>>::new();
    let mut plain = vec![];
    for tensor in &all {
        let module = tensor.name.strip_suffix(".weight").unwrap_or_default();
        if let Some((block, (_, matrix))) =
            module.split_once(".experts.").map(|(b, rest)| (b, rest.split_once('.').unwrap()))
        {
            let usual = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")];
            let usual = usual.iter().find(|(name, _)| *name == matrix).unwrap().1;
            stacks.entry(format!("{block}.switch_mlp.{usual}")).or_default().push(tensor);
        } else if module.ends_with(".q_proj") || module == "model.embed_tokens" {
            let values = add(module, &tensor.shape, &tensor.values());
            wide.push(NamedTensor::f32(tensor.name.clone(), &tensor.shape, &values));
        } else {
            plain.push(tensor.clone());
        }
    }
    for (module, experts) in &stacks {
        let values: Vec<f32> = experts.iter().flat_map(|expert| expert.values()).collect();
        let widened = add(module, &[experts.len(), SIDE, SIDE], &values);
        for (expert, values) in experts.iter().zip(widened.chunks(SIDE * SIDE)) {
            wide.push(NamedTensor::f32(expert.name.clone(), &expert.shape, values));
        }
    }
    let folders = ["mlx", "wide"].map(|name| dir.join(name));
    let settings = json!({ "group_size": 32, "bits": 4 });
    with_tensors(&golden, &folders[0], &[stored, plain.clone()].concat(), |json| json["quantization"] = settings);
    with_tensors(&golden, &folders[1], &[wide, plain].concat(), |_| {});
    folders
}

#[test]
fn mlx_is_kept_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let [mlx, wide] = mlx_twins(dir.path());
    is_kept(dir.path(), &mlx, &wide, NumberFormat::Q4_1);
    let store = Store::open(&dir.path().join("store")).unwrap();
    assert!(store.manifest().config.get("quantization").is_none());
}

#[test]
fn columns_in_another_order_are_refused_up_front() {
    let dir = tempfile::tempdir().unwrap();
    let config = json!({ "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": true, "sym": true });
    let [quantised, _] = twins(dir.path(), config, |name, values| {
        let (mut stored, wide) = gptq(name, values, true);
        stored[3].data[..4].copy_from_slice(&1i32.to_le_bytes());
        (stored, wide)
    });
    let store = dir.path().join("store");
    for command in [&["convert", text(&quantised), text(&store)][..], &["run", "-m", text(&quantised), "-p", "a"]] {
        let said = larder_refuses(command);
        assert!(said.contains("columns in another order (act-order, desc_act), which is not supported"), "{said}");
    }
    assert!(!store.exists());
}
