//! Checkpoints in the quantised forms of the hub: the numbers of transformers, exact equivalents, and streaming.

use std::path::Path;

use larder_core::{LayerIdx, NumberFormat};
use larder_store::{ExpertSource, Store};
use safetensors::Dtype;
use serde_json::json;

use super::convert::{contents, convert, full_logits, logits_with, relative_error, text};
use crate::support::checkpoint::{NamedTensor, tensors, with_tensors};
use crate::support::reference::{check, check_chunks};
use crate::support::{fixture, larder_ok, larder_refuses};

fn gpt_oss() -> std::path::PathBuf {
    fixture("fixtures/quantised/gpt_oss_mxfp4")
}

fn deepseek_v4() -> std::path::PathBuf {
    fixture("fixtures/quantised/deepseek_v4_fp8")
}

#[test]
fn published_forms_have_the_logits_of_transformers() {
    for model in [gpt_oss(), deepseek_v4()] {
        check(&model, "config.json");
        check(&model, "config.transformers5.json");
        check_chunks(&model);
    }
}

#[test]
fn mxfp4_streams_from_a_store_with_the_bits_of_the_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store");
    convert(&gpt_oss(), &store, &[]);
    larder_ok(&["verify", text(&store)]);
    let opened = Store::open(&store).unwrap();
    let kinds = opened.layout(LayerIdx(0)).kinds();
    assert_eq!(kinds, [NumberFormat::Mxfp4; 3].into());
    assert!(opened.manifest().config.get("quantization_config").is_none());
    let want = logits_with(&gpt_oss(), &dir.path().join("want"), &[]);
    for flags in [&["--cache=all"][..], &["--cache", "4x"], &["--cache", "5x", "-o", "reader=pread"]] {
        assert!(logits_with(&store, &dir.path().join("got"), flags) == want, "{flags:?}");
    }
    // The same numbers to the last bit, where activations are not rounded: f32 holds them all.
    let wide = dir.path().join("wide");
    convert(&gpt_oss(), &wide, &["--experts", "f32"]);
    let [kept, wide] = [&store, &wide].map(|s| full_logits(&logits_with(s, &dir.path().join("out"), &["-oexact"])));
    assert!(relative_error(&kept, &wide) < 1e-5);
}

/// Experts in FP4 are mxfp4, and FP8 with scales that are powers of two is bf16, so that nothing is rounded.
#[test]
fn fp4_and_fp8_of_deepseek_v4_are_kept_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let [store, wide] = ["store", "wide"].map(|name| dir.path().join(name));
    let made = crate::support::larder(&["convert", text(&deepseek_v4()), text(&store)]);
    let printed = String::from_utf8(made.stderr).unwrap();
    assert!(made.status.success() && !printed.contains("round"), "{printed}");
    larder_ok(&["verify", text(&store)]);
    assert_eq!(Store::open(&store).unwrap().layout(LayerIdx(0)).kinds(), [NumberFormat::Mxfp4; 3].into());
    let direct = logits_with(&deepseek_v4(), &dir.path().join("direct"), &[]);
    assert!(logits_with(&store, &dir.path().join("streamed"), &["--cache", "2x"]) == direct);
    convert(&deepseek_v4(), &wide, &["--experts", "f32", "--resident", "f32"]);
    let [kept, wide] = [&store, &wide].map(|s| full_logits(&logits_with(s, &dir.path().join("out"), &["-oexact"])));
    assert!(relative_error(&kept, &wide) < 1e-5);
}

/// The golden mixtral with every expert matrix made anew: `quantise` returns the stored tensors and the values that
/// they stand for. Writes the quantised folder, and beside it the same model in f32.
pub(super) fn twins(
    dir: &Path,
    config: serde_json::Value,
    quantise: impl Fn(&str, &[f32]) -> (Vec<NamedTensor>, Vec<f32>),
) -> [std::path::PathBuf; 2] {
    let golden = fixture("golden/mixtral");
    let (mut stored, mut wide) = (vec![], vec![]);
    for tensor in tensors(&golden) {
        if !tensor.name.contains(".experts.") {
            stored.push(tensor.clone());
            wide.push(tensor);
            continue;
        }
        let name = tensor.name.strip_suffix(".weight").unwrap();
        let (packed, values) = quantise(name, &tensor.values());
        stored.extend(packed);
        wide.push(NamedTensor::f32(tensor.name.clone(), &tensor.shape, &values));
    }
    let folders = ["quantised", "wide"].map(|name| dir.join(name));
    with_tensors(&golden, &folders[0], &stored, |json| json["quantization_config"] = config);
    with_tensors(&golden, &folders[1], &wide, |_| {});
    folders
}

/// Width of the matrices of the golden mixtral's experts, all of which are square.
pub(super) const SIDE: usize = 32;

/// Integers of four bits with a scale per row of 32, as compressed-tensors stores them.
fn int4(name: &str, values: &[f32]) -> (Vec<NamedTensor>, Vec<f32>) {
    let (mut packed, mut scales, mut wide) = (vec![], vec![], vec![]);
    for row in values.chunks(SIDE) {
        let largest = row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let scale = f32::from_bits((largest / 7.0).to_bits() & 0xffff_0000);
        let codes: Vec<u8> = row.iter().map(|v| ((v / scale).round().clamp(-8.0, 7.0) + 8.0) as u8).collect();
        packed.extend(codes.chunks(2).map(|pair| pair[0] | pair[1] << 4));
        scales.extend_from_slice(&scale.to_le_bytes()[2..]);
        wide.extend(codes.iter().map(|code| (f32::from(*code) - 8.0) * scale));
    }
    let tensor = |part: &str, dtype, shape: &[usize], data| NamedTensor {
        name: format!("{name}.weight_{part}"),
        dtype,
        shape: shape.to_vec(),
        data,
    };
    let stored =
        vec![tensor("packed", Dtype::I32, &[SIDE, SIDE / 8], packed), tensor("scale", Dtype::BF16, &[SIDE, 1], scales)];
    (stored, wide)
}

/// FP8 with a scale per block of 16 by 16. The codes need not be the nearest: the values that they stand for are
/// compared.
fn fp8(name: &str, values: &[f32]) -> (Vec<NamedTensor>, Vec<f32>) {
    let decode = |bits: u8| {
        let (exponent, mantissa) = (i32::from(bits >> 3 & 15), f32::from(bits & 7));
        let magnitude = match exponent {
            0 => mantissa * 2f32.powi(-9),
            _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
        };
        if bits & 0x80 == 0 { magnitude } else { -magnitude }
    };
    let scales: Vec<f32> = (0..4).map(|i| 0.0007 + 0.0001 * i as f32).collect();
    let scale = |i: usize| scales[i / SIDE / 16 * 2 + i % SIDE / 16];
    let largest_below = |v: f32| (0..0x7f).take_while(|bits| decode(*bits) <= v.abs()).last().unwrap_or(0);
    let codes: Vec<u8> =
        values.iter().enumerate().map(|(i, v)| largest_below(v / scale(i)) | if *v < 0.0 { 0x80 } else { 0 }).collect();
    let wide = codes.iter().enumerate().map(|(i, bits)| decode(*bits) * scale(i)).collect();
    let weight =
        NamedTensor { name: format!("{name}.weight"), dtype: Dtype::F8_E4M3, shape: vec![SIDE, SIDE], data: codes };
    (vec![weight, NamedTensor::f32(format!("{name}.weight_scale_inv"), &[2, 2], &scales)], wide)
}

fn int4_config() -> serde_json::Value {
    let weights = json!({ "num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 32 });
    json!({
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } }, "ignore": ["lm_head"],
    })
}

fn fp8_config() -> serde_json::Value {
    json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16] })
}

#[test]
fn widened_weights_are_to_the_bit_those_that_the_codes_stand_for() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (config, quantise)) in
        [(int4_config(), int4 as fn(&str, &[f32]) -> _), (fp8_config(), fp8 as _)].into_iter().enumerate()
    {
        let dir = dir.path().join(i.to_string());
        let [quantised, wide] = twins(&dir, config, quantise);
        for kind in ["f32", "q8_0"] {
            let shards = [&quantised, &wide].map(|source| {
                let store = dir.join(format!("{}-{kind}", source.file_name().unwrap().to_string_lossy()));
                convert(source, &store, &["--experts", kind]);
                let all = contents(&store);
                all.into_iter().filter(|(name, _)| name.starts_with("experts")).collect::<Vec<_>>()
            });
            assert!(!shards[0].is_empty() && shards[0] == shards[1], "{kind}");
        }
    }
}

#[test]
fn integers_of_four_bits_are_kept_as_q4_0_with_their_own_values() {
    let dir = tempfile::tempdir().unwrap();
    let [quantised, wide] = twins(dir.path(), int4_config(), int4);
    let store = dir.path().join("store");
    convert(&quantised, &store, &[]);
    larder_ok(&["verify", text(&store)]);
    assert_eq!(Store::open(&store).unwrap().layout(LayerIdx(0)).kinds(), [NumberFormat::Q4_0; 3].into());
    let direct = logits_with(&quantised, &dir.path().join("direct"), &[]);
    assert!(logits_with(&store, &dir.path().join("streamed"), &["--cache", "2x"]) == direct);
    let out = dir.path().join("json");
    let rounding = |flags: &[&str]| {
        let base = ["convert", text(&quantised), text(&out), "--json"];
        let said: serde_json::Value = serde_json::from_str(&larder_ok(&[&base[..], flags].concat())).unwrap();
        std::fs::remove_dir_all(&out).unwrap();
        said["rounding_error"].as_f64().unwrap()
    };
    assert_eq!((rounding(&[]), rounding(&["--experts", "f32"])), (0.0, 0.0));
    let q8_0 = rounding(&["--experts", "q8_0"]);
    assert!(q8_0 > 1e-4 && q8_0 < 0.02, "{q8_0}");
    let [kept, wide] = [&store, &wide].map(|m| full_logits(&logits_with(m, &dir.path().join("out"), &["-oexact"])));
    assert!(relative_error(&kept, &wide) < 1e-5);
}

#[test]
fn fp8_is_kept_as_bf16_and_that_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let [quantised, wide] = twins(dir.path(), fp8_config(), fp8);
    let (store, narrow) = (dir.path().join("store"), dir.path().join("narrow"));
    let said = crate::support::larder(&["convert", text(&quantised), text(&store)]);
    let said = String::from_utf8(said.stderr).unwrap();
    assert!(
        said.contains("note: some quantised weights are rounded to bf16 where no other format is asked for"),
        "{said}"
    );
    assert!(said.contains("rounding: the weights differ by 0."), "{said}");
    convert(&wide, &narrow, &["--experts", "bf16"]);
    let [a, b] = [&store, &narrow].map(|m| logits_with(m, &dir.path().join("out"), &[]));
    assert!(a == b);
    let out = dir.path().join("out");
    assert!(logits_with(&quantised, &out, &[]) == a, "the checkpoint itself");
}

#[test]
fn unknown_methods_are_refused_with_what_is_supported() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("hqq");
    with_tensors(&fixture("golden/mixtral"), &folder, &tensors(&fixture("golden/mixtral")), |json| {
        json["quantization_config"] = json!({ "quant_method": "hqq", "bits": 4 });
    });
    let said = larder_refuses(&["convert", text(&folder), text(&dir.path().join("store"))]);
    assert!(
        said.contains("'hqq', which is not supported; supported are mxfp4, fp8, compressed-tensors, gptq, awq, mlx"),
        "{said}"
    );
}
