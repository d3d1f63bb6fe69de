//! Every architecture against what transformers computed.

use std::path::Path;

use serde_json::Value;

use super::encoder_decoder::check_encoder_decoder;
use crate::support::checkpoint::{NamedTensor, tensors, with_tensors};
use crate::support::reference::{check, check_chunks};
use crate::support::{fixture, folders, golden_models, has_encoder};

#[test]
fn every_model_type_has_a_golden_model() {
    let golden: Vec<String> =
        folders(&fixture("golden")).iter().map(|p| p.file_name().unwrap().to_string_lossy().into_owned()).collect();
    let known: Vec<&str> = larder_model::model_types().collect();
    assert_eq!(golden, known);
}

#[test]
fn golden_models_match_transformers() {
    for folder in golden_models() {
        check(&folder, "config.json");
        check(&folder, "config.transformers5.json");
    }
}

#[test]
fn reading_in_pieces_changes_nothing() {
    golden_models().iter().for_each(|folder| check_chunks(folder));
}

/// The golden model of `name` with each `kv_b_proj` in two halves by head, the first transposed, as GGUF files have it.
fn split_kv_b(name: &str, folder: &Path) {
    let golden = fixture("golden").join(name);
    let config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let [heads, key, value, rank] = ["num_attention_heads", "qk_nope_head_dim", "v_head_dim", "kv_lora_rank"].map(size);
    let mut all = tensors(&golden);
    let whole: Vec<_> = all.extract_if(.., |t| t.name.ends_with("kv_b_proj.weight")).collect();
    assert!(!whole.is_empty());
    for tensor in whole {
        let (mut keys, mut values) = (vec![], vec![]);
        for head in tensor.values().chunks_exact((key + value) * rank) {
            let (first, second) = head.split_at(key * rank);
            keys.extend((0..rank).flat_map(|c| first[c..].iter().step_by(rank)));
            values.extend_from_slice(second);
        }
        let half = |name: &str| tensor.name.replace("kv_b_proj", name);
        all.push(NamedTensor::f32(half("k_b_proj"), &[heads, rank, key], &keys));
        all.push(NamedTensor::f32(half("v_b_proj"), &[heads, value, rank], &values));
    }
    with_tensors(&golden, folder, &all, |config| config["split_kv_b"] = true.into());
}

#[test]
fn the_halves_of_kv_b_give_the_logits_of_the_whole() {
    for name in ["deepseek_v2", "deepseek_v3"] {
        let dir = tempfile::tempdir().unwrap();
        split_kv_b(name, dir.path());
        check(dir.path(), "config.json");
    }
}

/// The golden qwen3_next with each `in_proj_qkvz` in two tensors that are not grouped by key head, as GGUF files have
/// it.
fn split_qkvz(folder: &Path) {
    let golden = fixture("golden/qwen3_next");
    let config: Value = serde_json::from_slice(&std::fs::read(golden.join("config.json")).unwrap()).unwrap();
    let size = |key: &str| config[key].as_u64().unwrap() as usize;
    let (heads, key, hidden) = (size("linear_num_key_heads"), size("linear_key_head_dim"), size("hidden_size"));
    let values = size("linear_num_value_heads") / heads * size("linear_value_head_dim");
    let mut all = tensors(&golden);
    let whole: Vec<_> = all.extract_if(.., |t| t.name.ends_with("in_proj_qkvz.weight")).collect();
    assert!(!whole.is_empty());
    for tensor in whole {
        let part = |from: usize, rows: usize| -> Vec<f32> {
            let groups = tensor.values();
            let groups = groups.chunks_exact(2 * (key + values) * hidden);
            groups.flat_map(|group| group[from * hidden..][..rows * hidden].to_vec()).collect()
        };
        let qkv = [part(0, key), part(key, key), part(2 * key, values)].concat();
        let z = part(2 * key + values, values);
        for (name, rows) in [("in_proj_qkv", qkv), ("in_proj_z", z)] {
            let name = tensor.name.replace("in_proj_qkvz", name);
            all.push(NamedTensor::f32(name, &[rows.len() / hidden, hidden], &rows));
        }
    }
    with_tensors(&golden, folder, &all, |config| config["split_qkvz"] = true.into());
}

#[test]
fn the_split_inputs_of_the_delta_rule_give_the_logits_of_the_whole() {
    let dir = tempfile::tempdir().unwrap();
    split_qkvz(dir.path());
    check(dir.path(), "config.json");
}

/// Opt-in: larger references in a folder of their own.
#[test]
fn references_match_transformers() {
    let Some(root) = std::env::var_os("LARDER_REFERENCE") else {
        println!("skipped: LARDER_REFERENCE names no folder");
        return;
    };
    for folder in folders(Path::new(&root)) {
        if has_encoder(&folder) {
            check_encoder_decoder(&folder, "config.json");
            check_encoder_decoder(&folder, "config.transformers5.json");
        } else {
            check(&folder, "config.json");
            check(&folder, "config.transformers5.json");
            check_chunks(&folder);
        }
        println!("{}: as transformers", folder.display());
    }
}
