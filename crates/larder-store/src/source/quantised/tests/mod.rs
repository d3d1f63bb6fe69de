//! Tests of quantised checkpoints: values in both views, and files that contradict themselves.

use std::path::Path;

use half::{bf16, f16};
use larder_core::{NumberFormat, RowPick};
use safetensors::Dtype;
use serde_json::{Value, json};

mod nvfp4;
mod packed_integers;

use super::plain;
use crate::{
    error::{Result, StoreErrorKind},
    files::safetensors::HeaderWriter,
    source::{Checkpoint, Source},
};

type Stored<'a> = (&'a str, Dtype, &'a [usize], Vec<u8>);

/// Opens a folder with these tensors and this `quantization_config`.
fn open(config: Value, tensors: &[Stored]) -> Result<(tempfile::TempDir, Box<dyn Source>)> {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), config, tensors);
    let source = plain(Checkpoint::open(dir.path())?)?;
    Ok((dir, source))
}

fn write(folder: &Path, config: Value, tensors: &[Stored]) {
    let config = json!({ "model_type": "x", "quantization_config": config });
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut header = HeaderWriter::default();
    let mut data = vec![];
    for (name, dtype, shape, bytes) in tensors {
        header.push(name, *dtype, shape, bytes.len());
        data.extend_from_slice(bytes);
    }
    let mut file = header.finish(8);
    file.extend(data);
    std::fs::write(folder.join("model.safetensors"), file).unwrap();
}

fn refusal(config: Value, tensors: &[Stored]) -> String {
    open(config, tensors).err().expect("refused").message
}

fn bytes(source: &dyn Source, name: &str) -> Vec<u8> {
    let mut all = vec![0; source.meta(name).unwrap().bytes];
    source.read(name, 0, &mut all).unwrap();
    for (from, len) in [(0, 1), (3, 50), (all.len() / 2 - 5, 11), (all.len() - 7, 7)] {
        let mut part = vec![0; len];
        source.read(name, from, &mut part).unwrap();
        assert_eq!(part, all[from..from + len], "{name} from {from}");
    }
    all
}

fn floats(source: &dyn Source, name: &str) -> Vec<f32> {
    let view = source.as_floats().unwrap();
    assert_eq!(view.meta(name).unwrap().kind, NumberFormat::F32);
    bytes(view, name).as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Bytes without a pattern that is a power of two long.
fn codes(count: usize) -> Vec<u8> {
    (0..count).map(|i| (i * 73 + i / 16 * 31 + 5) as u8).collect()
}

/// Code `i` of values that are two to a byte, the first in the low bits.
fn code(codes: &[u8], i: usize) -> u8 {
    (codes[i / 2] >> (4 * (i % 2))) & 15
}

/// Code `i` of blocks of 32 that begin with `head` bytes, as GGUF has them.
fn kept_code(blocks: &[u8], head: usize, i: usize) -> u8 {
    let (block, within) = (i / 32, i % 32);
    let byte = blocks[block * (head + 16) + head + within % 16];
    (byte >> (4 * (within / 16))) & 15
}

const FP4: [f32; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

fn gpt_oss(blocks: &[u8], scales: &[u8]) -> [Stored<'static>; 3] {
    let name = |part| {
        ["model.layers.0.mlp.experts.gate_up_proj_blocks", "model.layers.0.mlp.experts.gate_up_proj_scales"][part]
    };
    [
        (name(0), Dtype::U8, &[2, 3, 2, 16], blocks.to_vec()),
        (name(1), Dtype::U8, &[2, 3, 2], scales.to_vec()),
        ("norm", Dtype::BF16, &[2], vec![1, 2, 3, 4]),
    ]
}

#[test]
fn mxfp4_is_kept_exactly() {
    let (codes, scales) = (codes(192), [127, 0, 1, 128, 120, 254, 3, 100, 101, 102, 103, 104]);
    let (_dir, source) = open(json!({ "quant_method": "mxfp4" }), &gpt_oss(&codes, &scales)).unwrap();
    let name = "model.layers.0.mlp.experts.gate_up_proj";
    assert_eq!(source.names(), [name, "norm"]);
    let meta = source.meta(name).unwrap();
    assert_eq!((meta.kind, &meta.shape[..]), (NumberFormat::Mxfp4, &[2, 3, 64][..]));
    let kept = bytes(source.as_ref(), name);
    assert!(kept.chunks(17).map(|block| block[0]).eq(scales));
    assert!((0..384).all(|i| kept_code(&kept, 1, i) == code(&codes, i)));
    assert!(source.config().get("quantization_config").is_none());
    let experts = source.expert_names().unwrap().matrices;
    assert_eq!((experts.up.pick, experts.up.transposed), (RowPick::Odd, false));
    // 6 times 2^127 is no f32.
    let error = source.as_floats().unwrap().read(name, 4 * 160, &mut [0; 128]).unwrap_err().to_string();
    assert!(error.contains("holds the value"), "{error}");
    let mut block = [0; 4 * 160];
    source.as_floats().unwrap().read(name, 0, &mut block).unwrap();
    for (i, value) in block.as_chunks().0.iter().enumerate() {
        let want = f64::from(FP4[usize::from(code(&codes, i))]) * 2f64.powi(i32::from(scales[i / 32]) - 127);
        assert_eq!(f64::from(f32::from_le_bytes(*value)), want, "{i}");
    }
    let mut norm = [0; 4];
    source.read("norm", 0, &mut norm).unwrap();
    assert_eq!(norm, [1, 2, 3, 4]);
}

#[test]
fn mxfp4_tensors_that_contradict_themselves_are_refused() {
    let method = json!({ "quant_method": "mxfp4" });
    let good = gpt_oss(&codes(192), &[127; 12]);
    let with = |i: usize, tensor: Stored<'static>| {
        let mut all = good.clone();
        all[i] = tensor;
        all
    };
    let [blocks, scales] = [good[0].0, good[1].0];
    let refused = |tensors: &[Stored], why: &str| {
        let error = refusal(method.clone(), tensors);
        assert!(error.contains(why), "{error}");
    };
    refused(&with(0, (blocks, Dtype::U8, &[2, 3, 4, 8], codes(192))), "not U8 of [experts, rows, blocks, 16]");
    refused(&with(0, (blocks, Dtype::I8, &[2, 3, 2, 16], codes(192))), "is I8");
    refused(&with(1, (scales, Dtype::U8, &[2, 2, 3], vec![127; 12])), "which does not fit");
    refused(&with(1, (scales, Dtype::U8, &[2, 3, 1], vec![127; 6])), "which does not fit");
    refused(&with(1, (scales, Dtype::U8, &[12], vec![127; 12])), "which does not fit");
    refused(&with(1, (scales, Dtype::U8, &[2, 3, 0], vec![])), "which does not fit");
    refused(&with(1, (scales, Dtype::F32, &[2, 3, 2], vec![0; 48])), "dtype F32");
    refused(&with(1, ("other", Dtype::U8, &[2, 3, 2], vec![127; 12])), "has no tensor");
    refused(&good[2..], "has no tensor that is quantised so");
    let (_dir, source) = open(method.clone(), &gpt_oss(&codes(192), &[255; 12])).unwrap();
    let error = source.read(source.names()[0], 0, &mut [0; 17]).unwrap_err().to_string();
    assert!(error.contains("holds the scale NaN"), "{error}");
}

fn integers(codes: &[u8], scales: &[f32], group: usize) -> Vec<Stored<'static>> {
    let scales = scales.iter().flat_map(|s| bf16::from_f32(*s).to_le_bytes()).collect();
    vec![
        ("a.weight_packed", Dtype::I32, &[3, 16], codes.to_vec()),
        ("a.weight_scale", Dtype::BF16, if group == 32 { &[3, 4] } else { &[3, 1] }, scales),
        ("a.weight_shape", Dtype::I64, &[2], vec![0; 16]),
    ]
}

fn packed_config() -> Value {
    let weights = json!({ "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32 });
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } },
    })
}

#[test]
fn integers_of_four_bits_are_kept_exactly_if_their_scales_are_halves() {
    let codes = codes(192);
    for (group, count) in [(32, 12), (128, 3)] {
        let mut scales: Vec<f32> = (0..count).map(|i| bf16::from_f32(0.01 * (i as f32 + 1.0)).to_f32()).collect();
        let (_dir, source) = open(packed_config(), &integers(&codes, &scales, group)).unwrap();
        let meta = source.meta("a.weight").unwrap();
        assert_eq!((meta.kind, &meta.shape[..]), (NumberFormat::Q4_0, &[3, 128][..]));
        let (kept, widened) = (bytes(source.as_ref(), "a.weight"), floats(source.as_ref(), "a.weight"));
        assert_eq!(widened.len(), 384);
        for (i, value) in widened.iter().enumerate() {
            let scale = scales[i / group];
            assert_eq!(f16::from_le_bytes([kept[i / 32 * 18], kept[i / 32 * 18 + 1]]).to_f32(), scale);
            assert_eq!(kept_code(&kept, 2, i), code(&codes, i));
            assert_eq!(*value, (f32::from(code(&codes, i)) - 8.0) * scale);
        }
        // Too small for a half, but not for a float.
        scales[count - 1] = bf16::from_f32(1.3e-8).to_f32();
        let (_dir, source) = open(packed_config(), &integers(&codes, &scales, group)).unwrap();
        let error = source.read("a.weight", 11 * 18, &mut [0; 18]).unwrap_err().to_string();
        assert!(
            error.contains("'a.weight_scale' holds the scale 1.29") && error.contains("convert to bf16"),
            "{error}"
        );
        assert_eq!(floats(source.as_ref(), "a.weight")[383], (f32::from(code(&codes, 383)) - 8.0) * scales[count - 1]);
    }
}

#[test]
fn what_compressed_tensors_can_say_and_larder_does_not_read_is_refused() {
    let good = integers(&codes(192), &[0.5; 12], 32);
    let refused = |change: &dyn Fn(&mut Value, &mut Vec<Stored>), why: &str| {
        let (mut config, mut tensors) = (packed_config(), good.clone());
        change(&mut config, &mut tensors);
        let error = refusal(config, &tensors);
        assert!(error.contains(why), "{error}");
    };
    let weights =
        |config: &mut Value, key: &str, value: Value| config["config_groups"]["group_0"]["weights"][key] = value;
    refused(&|config, _| config["format"] = "int-quantized".into(), "in the format 'int-quantized'");
    refused(&|config, _| config["transform_config"] = json!({ "r1": {} }), "have a transform_config");
    refused(&|config, _| weights(config, "num_bits", 8.into()), "as int with 8 bits");
    refused(&|config, _| weights(config, "symmetric", false.into()), "with zero points");
    refused(&|_, all| all.push(("a.weight_zero_point", Dtype::I32, &[1], vec![0; 4])), "zero points");
    refused(&|_, all| all.push(("a.weight_g_idx", Dtype::I32, &[1], vec![0; 4])), "columns in another order");
    refused(&|_, all| all[0].2 = &[16, 3], "which does not fit");
    refused(&|_, all| all[0].2 = &[48], "which does not fit");
    refused(&|_, all| all[0].1 = Dtype::F32, "dtype F32");
    refused(&|_, all| all[1] = ("a.weight_scale", Dtype::BF16, &[3, 8], vec![0; 48]), "which does not fit");
    refused(&|_, all| all[1] = ("a.weight_scale", Dtype::U8, &[3, 4], vec![0; 12]), "dtype U8");
    let (_dir, source) = open(packed_config(), &integers(&codes(192), &[f32::NAN; 12], 32)).unwrap();
    assert!(source.read("a.weight", 0, &mut [0; 18]).unwrap_err().to_string().contains("holds the scale NaN"));
}

#[test]
fn fp8_is_the_weight_times_the_scale_of_its_block() {
    let codes: Vec<u8> = codes(5 * 40).into_iter().map(|c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
    let scales: Vec<f32> = (0..9).map(|i| 0.003 * (i as f32 + 1.0)).collect();
    let stored = |scales: &[f32]| scales.iter().flat_map(|s| s.to_le_bytes()).collect::<Vec<u8>>();
    let config = json!({ "quant_method": "fp8", "weight_block_size": [2, 16], "activation_scheme": "dynamic" });
    let tensors: [Stored; 2] = [
        ("a.weight", Dtype::F8_E4M3, &[5, 40], codes.clone()),
        ("a.weight_scale_inv", Dtype::F32, &[3, 3], stored(&scales)),
    ];
    let (_dir, source) = open(config.clone(), &tensors).unwrap();
    let widened = floats(source.as_ref(), "a.weight");
    let (_dir, unscaled) =
        open(config.clone(), &[tensors[0].clone(), ("a.weight_scale_inv", Dtype::F32, &[1], stored(&[1.0]))]).unwrap();
    let plain = floats(unscaled.as_ref(), "a.weight");
    for (i, (value, plain)) in widened.iter().zip(&plain).enumerate() {
        assert_eq!(*value, plain * scales[i / 40 / 2 * 3 + i % 40 / 16], "{i}");
    }
    let kept = bytes(source.as_ref(), "a.weight");
    assert_eq!(source.meta("a.weight").unwrap().kind, NumberFormat::Bf16);
    for (kept, value) in kept.as_chunks().0.iter().zip(&widened) {
        assert_eq!(bf16::from_le_bytes(*kept), bf16::from_f32(*value));
    }
    assert_eq!(source.notes(), ["some quantised weights are rounded to bf16 where no other format is asked for"]);

    let refused = |config: Value, i: usize, tensor: Option<Stored>, why: &str| {
        let mut all = tensors.to_vec();
        match tensor {
            Some(tensor) => all[i] = tensor,
            None => drop(all.remove(i)),
        }
        let error = refusal(config, &all);
        assert!(error.contains(why), "{error}");
    };
    let scale = |shape: &'static [usize], dtype| Some(("a.weight_scale_inv", dtype, shape, vec![0; 36]));
    refused(config.clone(), 1, None, "has no scales for the tensor 'a.weight'");
    refused(config.clone(), 1, scale(&[9, 1], Dtype::F32), "does not fit");
    refused(config.clone(), 1, scale(&[9], Dtype::I32), "is not supported for scales");
    for size in [json!([0, 16]), json!([2]), json!("2x16"), json!([2, -16])] {
        refused(json!({ "quant_method": "fp8", "weight_block_size": size }), 1, None, "which is not two sizes");
    }
    refused(json!({ "quant_method": "fp8", "fmt": "e5m2" }), 1, None, "e5m2");
    let mut bad = codes.clone();
    bad[7] = 0x7f;
    let nan = [("a.weight", Dtype::F8_E4M3, &[5usize, 40][..], bad), tensors[1].clone()];
    let (_dir, source) = open(config.clone(), &nan).unwrap();
    for view in [source.as_ref(), source.as_floats().unwrap()] {
        let mut all = vec![0; view.meta("a.weight").unwrap().bytes];
        assert!(view.read("a.weight", 0, &mut all).unwrap_err().to_string().contains("holds the value NaN"));
    }
    let broken = [tensors[0].clone(), ("a.weight_scale_inv", Dtype::F32, &[3, 3], stored(&[f32::INFINITY; 9]))];
    let (_dir, source) = open(config, &broken).unwrap();
    assert!(source.read("a.weight", 0, &mut [0; 80]).unwrap_err().to_string().contains("holds the scale inf"));
}

#[test]
fn scales_beside_the_weights_are_powers_of_two() {
    let config =
        json!({ "quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [2, 16], "scale_fmt": "ue8m0" });
    let e4m3: Vec<u8> = codes(4 * 32).into_iter().map(|c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
    let good: Vec<Stored> = vec![
        ("a.w1.weight", Dtype::F8_E4M3, &[4, 32], e4m3),
        ("a.w1.scale", Dtype::F8_E8M0, &[2, 2], vec![127, 126, 130, 120]),
        ("a.w2.weight", Dtype::I8, &[3, 32], codes(96)),
        ("a.w2.scale", Dtype::F8_E8M0, &[3, 2], vec![127, 0, 1, 128, 120, 254]),
        ("hc.scale", Dtype::F32, &[1], vec![0; 4]),
    ];
    let (_dir, source) = open(config.clone(), &good).unwrap();
    assert_eq!(source.names(), ["a.w1.weight", "a.w2.weight", "hc.scale"]);
    let (kept, wide) = (bytes(source.as_ref(), "a.w1.weight"), floats(source.as_ref(), "a.w1.weight"));
    assert!(kept.as_chunks().0.iter().zip(&wide).all(|(kept, wide)| bf16::from_le_bytes(*kept).to_f32() == *wide));
    let meta = source.meta("a.w2.weight").unwrap();
    assert_eq!((meta.kind, &meta.shape[..]), (NumberFormat::Mxfp4, &[3, 64][..]));
    let kept = bytes(source.as_ref(), "a.w2.weight");
    assert!(kept.chunks(17).map(|block| block[0]).eq([127, 0, 1, 128, 120, 254]));
    assert!((0..192).all(|i| kept_code(&kept, 1, i) == code(&codes(96), i)));
    assert!(source.notes().is_empty());

    let refused = |i: usize, tensor: Stored<'static>, why: &str| {
        let mut all = good.clone();
        all[i] = tensor;
        let error = refusal(config.clone(), &all);
        assert!(error.contains(why), "{error}");
    };
    refused(
        1,
        ("b.scale", Dtype::F8_E8M0, &[2, 2], vec![127; 4]),
        "'a.w1.weight_scale_inv', 'a.w1.weight_scale' or 'a.w1.scale'",
    );
    refused(1, ("a.w1.scale", Dtype::F8_E8M0, &[3], vec![127; 3]), "does not fit");
    refused(3, ("a.w2.scale", Dtype::F8_E8M0, &[3, 1], vec![127; 3]), "does not fit");
    refused(3, ("a.w2.scale", Dtype::F32, &[3, 2], vec![0; 24]), "has dtype F32");
    refused(2, ("a.w2.weight", Dtype::I8, &[3, 0], vec![]), "does not fit");
}

#[test]
fn other_methods_are_refused_by_name() {
    for name in ["hqq", "auto-round", "bitsandbytes", "quark"] {
        let error = refusal(json!({ "quant_method": name }), &[]);
        assert!(
            error.contains(&format!("by the method '{name}', which is not supported; supported are mxfp4, fp8,")),
            "{error}"
        );
    }
    assert!(refusal(json!({ "bits": 4 }), &[]).contains("by the method ''"));
    for none in [Value::Null, false.into()] {
        assert!(open(none, &[("norm", Dtype::BF16, &[2], vec![0; 4])]).unwrap().1.as_floats().is_none());
    }
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), json!({ "quant_method": "hqq" }), &[]);
    let error = plain(Checkpoint::open(dir.path()).unwrap()).err().unwrap();
    assert_eq!(error.kind, StoreErrorKind::Unsupported);
}

#[test]
fn tables_in_parts_are_joined_and_read_by_row() {
    let values: Vec<f32> = (0..7 * 8).map(|i| i as f32 - 27.5).collect();
    let part = |rows: std::ops::Range<usize>| {
        values[rows.start * 8..rows.end * 8].iter().flat_map(|v| bf16::from_f32(*v).to_le_bytes()).collect::<Vec<u8>>()
    };
    let names = ["a.shard_0.weight", "a.shard_1.weight", "a.shard_2.weight"];
    let shapes: [&[usize]; 3] = [&[3, 8], &[3, 8], &[1, 8]];
    let parts = [part(0..3), part(3..6), part(6..7)];
    let good: Vec<Stored> = (0..3).map(|i| (names[i], Dtype::BF16, shapes[i], parts[i].clone())).collect();
    let (_dir, source) = open(Value::Null, &good).unwrap();
    assert_eq!((source.names(), &source.meta("a.weight").unwrap().shape[..]), (vec!["a.weight"], &[7, 8][..]));
    assert_eq!(bytes(source.as_ref(), "a.weight"), parts.concat());
    assert_eq!(floats(source.as_ref(), "a.weight"), values);
    assert!(source.notes().is_empty() && source.samples("a.weight").unwrap().is_some());
    let rows = source.rows("a.weight").unwrap();
    let mut read = vec![0; 4 * 16];
    rows.read_rows(&[6, 0, 5, 3], &mut read).unwrap();
    assert_eq!(read, [part(6..7), part(0..1), part(5..6), part(3..4)].concat());
    assert!(source.as_floats().unwrap().rows("a.weight").is_none());

    let refused = |i: usize, tensor: Option<Stored<'static>>, why: &str| {
        let mut all = good.clone();
        match tensor {
            Some(tensor) => all[i] = tensor,
            None => drop(all.remove(i)),
        }
        let error = refusal(Value::Null, &all);
        assert!(error.contains(why), "{error}");
    };
    refused(1, None, "has no part 1 of the table 'a.weight'");
    refused(2, Some(("a.shard_2.weight", Dtype::F32, &[1, 8], vec![0; 32])), "in several formats or widths");
    refused(2, Some(("a.shard_2.weight", Dtype::BF16, &[8, 1], vec![0; 16])), "in several formats or widths");
    refused(0, Some(("a.shard_0.weight", Dtype::BF16, &[24], vec![0; 48])), "with the shape [24]");
    refused(0, Some(("a.shard_0.weight", Dtype::BF16, &[3, 0], vec![])), "with the shape [3, 0]");
    refused(0, Some(("a.shard_0.weight", Dtype::I32, &[3, 8], vec![0; 96])), "dtype I32");
}

#[test]
fn quantised_parts_of_a_table_have_its_scale() {
    let code = |i: usize| 0x30 + (i % 16) as u8; // from 0.5 on
    let part = |rows: std::ops::Range<usize>| (rows.start * 8..rows.end * 8).map(code).collect::<Vec<u8>>();
    let scale = 0.25f32.to_le_bytes().to_vec();
    let tensors: Vec<Stored> = vec![
        ("a.shard_0.weight", Dtype::F8_E4M3, &[3, 8], part(0..3)),
        ("a.shard_1.weight", Dtype::F8_E4M3, &[2, 8], part(3..5)),
        ("a.weight_scale", Dtype::F32, &[1], scale),
    ];
    let (_dir, source) = open(json!({ "quant_method": "fp8" }), &tensors).unwrap();
    assert_eq!((source.names(), &source.meta("a.weight").unwrap().shape[..]), (vec!["a.weight"], &[5, 8][..]));
    let widened = floats(source.as_ref(), "a.weight");
    assert_eq!((widened[0], widened[8], widened[24]), (0.125, 0.25, 0.25));
    let kept = bytes(source.as_ref(), "a.weight");
    let rows = source.rows("a.weight").unwrap();
    let mut read = vec![0; 3 * 16];
    rows.read_rows(&[4, 2, 3], &mut read).unwrap();
    assert_eq!(read, [&kept[64..], &kept[32..48], &kept[48..64]].concat());
    assert!(rows.read_rows(&[5], &mut [0; 16]).unwrap_err().to_string().contains("has no row 5 of 'a.weight'"));
    assert_eq!(source.notes(), ["some quantised weights are rounded to bf16 where no other format is asked for"]);
}

#[test]
fn samples_are_those_of_the_stored_tensors() {
    let scales = [127; 12];
    let digest = |codes: &[u8], scales: &[u8]| {
        let (_dir, source) = open(json!({ "quant_method": "mxfp4" }), &gpt_oss(codes, scales)).unwrap();
        let name = source.names()[0].to_owned();
        let kept = source.samples(&name).unwrap().unwrap();
        assert_eq!(source.as_floats().unwrap().samples(&name).unwrap().unwrap(), kept);
        assert_eq!(source.samples("norm").unwrap(), None);
        kept
    };
    let first = digest(&codes(192), &scales);
    assert_ne!(first, digest(&[1; 192], &scales));
    assert_ne!(first, digest(&codes(192), &[126; 12]));
}
