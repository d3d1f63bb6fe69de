//! NVFP4 of compressed-tensors and Model Optimizer.

use larder_core::{MatrixScale, NumberFormat, RowPick};
use safetensors::Dtype;
use serde_json::{Value, json};

use super::{FP4, Stored, bytes, code, codes, floats, open, refusal, write};
use crate::source::{Checkpoint, Source, quantised::plain};

const ROWS: usize = 3;
const COLS: usize = 128;

/// Scales from the smallest to the largest, all without a sign.
fn scales(count: usize) -> Vec<u8> {
    (0..count).map(|i| ((i * 29 + 1) % 0x7f) as u8).collect()
}

fn e4m3(bits: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(bits >> 3), f32::from(bits & 7));
    if exponent == 0 { mantissa * 2f32.powi(-9) } else { (8.0 + mantissa) * 2f32.powi(exponent - 10) }
}

fn compressed() -> Value {
    let weights =
        json!({ "num_bits": 4, "type": "float", "symmetric": true, "strategy": "tensor_group", "group_size": 16 });
    json!({
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } },
    })
}

fn modelopt() -> Value {
    json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" })
}

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

fn packed(global: f32) -> Vec<Stored<'static>> {
    vec![
        ("a.weight_packed", Dtype::U8, &[ROWS, COLS / 2], codes(ROWS * COLS / 2)),
        ("a.weight_scale", Dtype::F8_E4M3, &[ROWS, COLS / 16], scales(ROWS * COLS / 16)),
        ("a.weight_global_scale", Dtype::F32, &[1], f32s(&[global])),
        ("a.input_global_scale", Dtype::F32, &[1], f32s(&[3.0])),
        ("norm", Dtype::BF16, &[2], vec![1, 2, 3, 4]),
    ]
}

/// Two matrices that are stacked, each with its scale.
fn stacked() -> Vec<Stored<'static>> {
    vec![
        ("experts.down_proj", Dtype::U8, &[2, ROWS, 32], codes(2 * ROWS * 32)),
        ("experts.down_proj_weight_scale", Dtype::F8_E4M3, &[2, ROWS, 4], scales(2 * ROWS * 4)),
        ("experts.down_proj_weight_scale_2", Dtype::F32, &[2], f32s(&[0.5, 3.0])),
    ]
}

/// Checks codes, scales and values of a tensor of rows of `cols` in both views; `scale` is that of each row.
fn check(source: &dyn Source, name: &str, shape: &[usize], scale: impl Fn(usize) -> f32) {
    let meta = source.meta(name).unwrap();
    assert_eq!((meta.kind, &meta.shape[..]), (NumberFormat::Nvfp4, shape));
    let (cols, count) = (shape[shape.len() - 1], shape.iter().product::<usize>());
    let (codes, scales) = (codes(count / 2), scales(count / 16));
    let (kept, wide) = (bytes(source, name), floats(source, name));
    for i in 0..count {
        let (block, within) = (&kept[i / 64 * 36..][..36], i % 64);
        assert_eq!(block[within / 16], scales[i / 16]);
        let byte = block[4 + within / 16 * 8 + within % 8];
        assert_eq!((byte >> (within % 16 / 8 * 4)) & 15, code(&codes, i), "value {i}");
        let value = FP4[usize::from(code(&codes, i))] * e4m3(scales[i / 16]) * scale(i / cols);
        assert_eq!(wide[i], value, "value {i}");
    }
}

#[test]
fn compressed_tensors_are_kept_exactly() {
    let (_dir, source) = open(compressed(), &packed(3.0)).unwrap();
    assert_eq!(source.names(), ["a.input_global_scale", "a.weight", "a.weight.scale", "norm"]);
    check(source.as_ref(), "a.weight", &[ROWS, COLS], |_| 1.0 / 3.0);
    let scale = MatrixScale::find(source.as_ref(), "a.weight", (0, 1)).unwrap().unwrap();
    assert_eq!(scale.read(source.as_ref()).unwrap(), 1.0 / 3.0);
    assert!(source.notes().is_empty());
    let rows = source.rows("a.weight").unwrap();
    let mut read = vec![0; 72];
    rows.read_rows(&[2], &mut read).unwrap();
    assert_eq!(read, bytes(source.as_ref(), "a.weight")[144..]);
}

#[test]
fn model_optimizer_has_a_factor() {
    let names = ["a.weight", "a.weight_scale", "a.weight_scale_2", "a.input_scale", "norm"];
    let shapes: [&[usize]; 3] = [&[ROWS, COLS / 2], &[ROWS, COLS / 16], &[]];
    let mut tensors = packed(0.75);
    tensors.iter_mut().zip(names).for_each(|(tensor, name)| tensor.0 = name);
    tensors.iter_mut().zip(shapes).for_each(|(tensor, shape)| tensor.2 = shape);
    for config in [
        modelopt(),
        json!({ "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "a": { "quant_algo": "W4A16_NVFP4" }, "b": { "quant_algo": "FP8" } } }),
    ] {
        let (_dir, source) = open(config, &tensors).unwrap();
        check(source.as_ref(), "a.weight", &[ROWS, COLS], |_| 0.75);
    }
    // The same with the config in a file of its own.
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), Value::Null, &tensors);
    let file = dir.path().join("hf_quant_config.json");
    let say = |algorithm: Value| {
        let config = json!({ "producer": { "name": "modelopt" }, "quantization": { "quant_algo": algorithm } });
        std::fs::write(&file, config.to_string()).unwrap();
        plain(Checkpoint::open(dir.path()).unwrap())
    };
    check(say("NVFP4".into()).unwrap().as_ref(), "a.weight", &[ROWS, COLS], |_| 0.75);
    assert!(say(Value::Null).unwrap().as_floats().is_none());
    let other = say("NVFP4_AWQ".into()).err().unwrap().message;
    assert!(other.contains("with the algorithm 'NVFP4_AWQ', which is not supported; supported are NVFP4,"), "{other}");
    for broken in ["[]", "7", "{\"quantization\": [1]}"] {
        std::fs::write(&file, broken).unwrap();
        assert!(plain(Checkpoint::open(dir.path()).unwrap()).unwrap().as_floats().is_none(), "{broken}");
    }
    std::fs::write(&file, "{").unwrap();
    assert!(plain(Checkpoint::open(dir.path()).unwrap()).err().unwrap().message.contains("is not valid JSON"));
}

#[test]
fn stacked_matrices_have_a_scale_each_or_one_in_common() {
    let (_dir, source) = open(modelopt(), &stacked()).unwrap();
    check(source.as_ref(), "experts.down_proj", &[2, ROWS, 64], |row| [0.5, 3.0][row / ROWS]);
    for (index, scale) in [0.5, 3.0].into_iter().enumerate() {
        let found = MatrixScale::find(source.as_ref(), "experts.down_proj", (index, 2)).unwrap().unwrap();
        assert_eq!(found.read(source.as_ref()).unwrap(), scale);
    }
    let misfit = MatrixScale::find(source.as_ref(), "experts.down_proj", (0, 3)).err().unwrap().to_string();
    assert!(misfit.contains("is f32 of shape [2], but should be one f32, or 3, one per matrix"), "{misfit}");
    let mut common = stacked();
    common[2] = ("experts.down_proj_weight_scale_2", Dtype::F32, &[], f32s(&[0.25]));
    let (_dir, source) = open(modelopt(), &common).unwrap();
    check(source.as_ref(), "experts.down_proj", &[2, ROWS, 64], |_| 0.25);
}

/// As Llama 4 is published: `[experts, cols / 2, rows]`.
#[test]
fn rows_that_are_stored_as_columns_are_seen_as_rows() {
    let (experts, rows, cols) = (2, 6, 128);
    let turned = |bytes: Vec<u8>, each: usize| -> Vec<u8> {
        let width = cols / each;
        (0..bytes.len())
            .map(|i| (i / (width * rows), i % (width * rows) / rows, i % rows))
            .map(|(e, col, row)| bytes[(e * rows + row) * width + col])
            .collect()
    };
    let name = "model.layers.1.feed_forward.experts.down_proj";
    let tensors: Vec<Stored> = vec![
        (name, Dtype::U8, &[2, 64, 6], turned(codes(experts * rows * cols / 2), 2)),
        (
            "model.layers.1.feed_forward.experts.down_proj_weight_scale",
            Dtype::F8_E4M3,
            &[2, 8, 6],
            turned(scales(experts * rows * cols / 16), 16),
        ),
        ("model.layers.1.feed_forward.experts.down_proj_weight_scale_2", Dtype::F32, &[], f32s(&[0.75])),
    ];
    let (_dir, source) = open(modelopt(), &tensors).unwrap();
    check(source.as_ref(), name, &[experts, rows, cols], |_| 0.75);
    // From the middle of a row of one matrix to that of the other.
    let all = bytes(source.as_ref(), name);
    for (from, blocks) in [(1, 22), (11, 2), (5, 1)] {
        let mut part = vec![0; 36 * blocks];
        source.read(name, 36 * from, &mut part).unwrap();
        assert_eq!(part, all[36 * from..][..36 * blocks]);
    }
    let names = source.expert_names().unwrap().matrices;
    let [gate, up] = [names.gate.unwrap(), names.up];
    assert_eq!((gate.pick, up.pick, up.transposed), (RowPick::FirstHalf, RowPick::SecondHalf, false));
    assert_eq!(up.name, "model.layers.{l}.feed_forward.experts.gate_up_proj");
}

#[test]
fn fp8_beside_it_is_read_too() {
    let mut tensors = stacked();
    tensors.push(("b.weight", Dtype::F8_E4M3, &[2, 32], (0..64).collect()));
    tensors.push(("b.weight_scale", Dtype::F32, &[], f32s(&[0.5])));
    let (_dir, source) = open(modelopt(), &tensors).unwrap();
    assert_eq!(source.meta("b.weight").unwrap().kind, NumberFormat::Bf16);
    assert_eq!(floats(source.as_ref(), "b.weight")[0x38], 0.5);
}

#[test]
fn what_contradicts_itself_is_refused() {
    let refused = |i: usize, tensor: Option<Stored<'static>>, why: &str| {
        let mut all = packed(2.0);
        match tensor {
            Some(tensor) => all[i] = tensor,
            None => drop(all.remove(i)),
        }
        let error = refusal(compressed(), &all);
        assert!(error.contains(why), "{error}");
    };
    let scale =
        |shape: &'static [usize]| Some(("a.weight_scale", Dtype::F8_E4M3, shape, scales(shape.iter().product())));
    refused(1, scale(&[ROWS, 7]), "which does not fit 'a.weight_packed' of [3, 64]; an F8_E4M3 per 16 columns");
    refused(1, scale(&[24]), "which does not fit");
    refused(1, scale(&[ROWS, 2, 4]), "which does not fit");
    refused(0, Some(("a.weight_packed", Dtype::U8, &[], vec![0])), "which does not fit");
    refused(0, Some(("a.weight_packed", Dtype::U8, &[0, 64], vec![])), "which does not fit");
    refused(2, None, "has no tensor 'a.weight_global_scale'");
    let global = |dtype, shape: &'static [usize], len| Some(("a.weight_global_scale", dtype, shape, vec![0; len]));
    refused(2, global(Dtype::F32, &[2], 8), "is F32 of shape [2]; it must be F32 with one of them");
    refused(2, global(Dtype::BF16, &[1], 2), "is BF16 of shape [1]; it must be F32");
    refused(3, Some(("a.weight_zero_point", Dtype::U8, &[1], vec![0])), "zero points");
    let narrow: Vec<Stored> = vec![
        ("a.weight_packed", Dtype::U8, &[1, 16], codes(16)),
        ("a.weight_scale", Dtype::F8_E4M3, &[1, 2], scales(2)),
        ("a.weight_global_scale", Dtype::F32, &[1], f32s(&[1.0])),
    ];
    assert!(refusal(compressed(), &narrow).contains("'a.weight' of shape [1, 32], which nvfp4 cannot hold"));
    let names = ["a.shard_0.weight", "a.shard_0.weight_scale", "a.shard_0.weight_scale_2"];
    let mut table = packed(1.0);
    table.iter_mut().zip(names).for_each(|(tensor, name)| tensor.0 = name);
    assert!(refusal(modelopt(), &table).contains("parts of the table 'a.weight' in nvfp4, which is not supported"));
    let mut moved = stacked();
    moved.push(("experts.pre_quant_scale", Dtype::BF16, &[1], vec![0; 2]));
    assert!(refusal(modelopt(), &moved).contains("'experts.pre_quant_scale', which changes inputs"));
}

#[test]
fn values_without_an_equivalent_are_refused_when_they_are_read() {
    let error = |i: usize, at: usize, bytes: &[u8], name: &str| {
        let mut all = packed(2.0);
        all[i].3[at..at + bytes.len()].copy_from_slice(bytes);
        let (_dir, source) = open(compressed(), &all).unwrap();
        let mut into = vec![0; source.meta(name).unwrap().bytes];
        source.read(name, 0, &mut into).unwrap_err().to_string()
    };
    assert!(error(1, 5, &[0x7f], "a.weight").contains("'a.weight_scale' holds NaN (0x7f), which nvfp4 cannot hold"));
    assert!(error(1, 5, &[0xff], "a.weight").contains("holds NaN (0xff)"));
    assert!(error(1, 5, &[0xb8], "a.weight").contains("holds a negative scale (0xb8)"));
    for bad in [0.0, f32::NAN, f32::INFINITY, f32::from_bits(1)] {
        let said = error(2, 0, &bad.to_le_bytes(), "a.weight.scale");
        assert!(said.contains("tensor 'a.weight_global_scale' holds the scale"), "{said}");
    }
}
