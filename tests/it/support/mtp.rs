//! Golden models with a layer for multi-token prediction.

use std::path::Path;

use super::checkpoint::{NamedTensor, tensors, tensors_of, with_tensors};
use super::fixture;

/// The golden models that have such a layer in `tests/mtp`.
pub const MODELS: [&str; 5] = ["bailing_moe_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "hy_v3"];

/// The golden model of `name` with the tensors of a layer for multi-token prediction, as `change` makes them.
fn with_layer(name: &str, to: &Path, change: impl FnOnce(&mut Vec<NamedTensor>)) {
    let golden = fixture("golden").join(name);
    let mut all = tensors(&golden);
    all.extend(tensors_of(&fixture("mtp").join(name).join("layer.safetensors")));
    change(&mut all);
    let tied = all.iter().all(|tensor| tensor.name != "lm_head.weight");
    with_tensors(&golden, to, &all, |config| {
        config["num_nextn_predict_layers"] = 1.into();
        config["tie_word_embeddings"] = tied.into();
    });
}

/// Replaces the values of the tensors whose names end so.
pub fn set(all: &mut [NamedTensor], end: &str, value: impl Fn(usize, f32) -> f32) {
    for tensor in all.iter_mut().filter(|tensor| tensor.name.ends_with(end)) {
        let values: Vec<f32> = tensor.values().into_iter().enumerate().map(|(i, v)| value(i, v)).collect();
        *tensor = NamedTensor::f32(tensor.name.clone(), &tensor.shape, &values);
    }
}

/// Makes the next token nearly always depend on the last one alone, and the layer know it.
pub fn predict_well(all: &mut Vec<NamedTensor>) {
    predict(all, 0.02);
}

/// Makes the next token often depend on the last one alone, and the layer know it.
pub fn predict_often(all: &mut Vec<NamedTensor>) {
    predict(all, 0.1);
}

/// Multiplies what layers add to the embedding by `share`, and lets the layer pass the embedding on.
fn predict(all: &mut Vec<NamedTensor>, share: f32) {
    for part in ["o_proj", "attention.dense", "down_proj"] {
        for kind in ["weight", "bias"] {
            set(all, &format!("{part}.{kind}"), |_, value| value * share);
        }
    }
    let find = |part: &str| all.iter().find(|tensor| tensor.name.contains(part)).expect("a tensor").clone();
    let norm = find("model.norm.weight").values();
    let hidden = norm.len();
    if all.iter().all(|tensor| tensor.name != "lm_head.weight") {
        // A head that is the embedding would repeat the last token.
        let embedding = find("embed");
        let mut rows = embedding.values();
        rows.rotate_left(7 * hidden);
        all.push(NamedTensor::f32("lm_head.weight", &embedding.shape, &rows));
    }
    set(all, "lm_head.weight", |_, value| value * 5.0);
    set(all, ".enorm.weight", |_, _| 1.0);
    for name in ["shared_head.norm.weight", "final_layernorm.weight"] {
        set(all, name, |i, _| norm[i]);
    }
    set(all, ".eh_proj.weight", |i, value| {
        let (row, column) = (i / (2 * hidden), i % (2 * hidden));
        if row == column { 1.0 } else { 0.1 * share * value }
    });
}

/// The golden model of `name` with its layer, as [`with_layer`] makes it.
pub fn folder(name: &str, change: impl FnOnce(&mut Vec<NamedTensor>)) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    with_layer(name, dir.path(), change);
    dir
}
