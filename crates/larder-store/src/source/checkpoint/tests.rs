//! Folders as they are and as they should not be.

use super::*;
use crate::files::safetensors::{Dtype, HeaderWriter};

fn write_weights(path: &Path, tensors: &[(&str, Dtype, u8)]) {
    let mut header = HeaderWriter::default();
    let mut data = vec![];
    for (name, dtype, fill) in tensors {
        let bytes = 4 * dtype.bitsize() / 8;
        header.push(name, *dtype, &[4], bytes);
        data.resize(data.len() + bytes, *fill);
    }
    let mut bytes = header.finish(8);
    bytes.extend(data);
    std::fs::write(path, bytes).unwrap();
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), r#"{"model_type":"x"}"#).unwrap();
    dir
}

fn index(dir: &Path, map: &str) {
    std::fs::write(dir.join(INDEX), format!(r#"{{"metadata":{{}},"weight_map":{map}}}"#)).unwrap();
}

fn refusal(dir: &Path) -> String {
    Checkpoint::open(dir).err().expect("refused").to_string()
}

#[test]
fn a_single_file_may_have_any_name() {
    let dir = folder();
    write_weights(&dir.path().join("other.safetensors"), &[("a", Dtype::F32, 7), ("ids", Dtype::I16, 0)]);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names(), ["a", "ids"]);
    assert_eq!(checkpoint.meta("a").unwrap().shape, [4]);
    assert_eq!((checkpoint.meta("ids"), checkpoint.unsupported_dtype("ids")), (None, Some("I16")));
    let mut two = [0; 2];
    checkpoint.read("a", 14, &mut two).unwrap();
    assert_eq!(two, [7, 7]);
    write_weights(&dir.path().join("third.safetensors"), &[]);
    assert!(refusal(dir.path()).contains("several"));
}

#[test]
fn files_are_joined_by_the_index() {
    let dir = folder();
    write_weights(&dir.path().join("1.safetensors"), &[("a", Dtype::F16, 1), ("b", Dtype::F16, 2)]);
    write_weights(&dir.path().join("2.safetensors"), &[("b", Dtype::F16, 3)]);
    index(dir.path(), r#"{"a":"1.safetensors","b":"2.safetensors"}"#);
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let mut byte = [0];
    checkpoint.read("b", 0, &mut byte).unwrap();
    assert_eq!(byte, [3]);
    let before = checkpoint.fingerprint();
    write_weights(&dir.path().join("2.safetensors"), &[("b", Dtype::F32, 3)]);
    assert_ne!(Checkpoint::open(dir.path()).unwrap().fingerprint(), before);
}

#[test]
fn tensors_for_multi_token_prediction_are_noted() {
    let dir = folder();
    let names = ["model.layers.0.a", "model.layers.1.a", "model.layers.2.eh_proj.weight", "mtp.norm.weight"];
    write_weights(&dir.path().join("model.safetensors"), &names.map(|name| (name, Dtype::F16, 0)));
    std::fs::write(dir.path().join("config.json"), r#"{"model_type":"x","num_hidden_layers":2}"#).unwrap();
    let notes = Checkpoint::open(dir.path()).unwrap().notes();
    assert_eq!(notes, ["2 tensors for multi-token prediction are not used"]);
}

#[test]
fn an_index_with_wrong_entries_or_outside_paths_is_refused() {
    let dir = folder();
    write_weights(&dir.path().join("1.safetensors"), &[("a", Dtype::F16, 1)]);
    index(dir.path(), r#"{"a":"1.safetensors","c":"1.safetensors"}"#);
    assert!(refusal(dir.path()).contains("lists the tensor 'c' in 1.safetensors, which does not contain it"));
    index(dir.path(), r#"{"a":"3.safetensors"}"#);
    assert!(refusal(dir.path()).contains("lists 3.safetensors, which is missing"));
    for name in ["../1.safetensors", "/etc/passwd", "x/1.safetensors", "..", ".", "", "1.safetensors/", r"x\\1"] {
        index(dir.path(), &format!(r#"{{"a":"{name}"}}"#));
        assert!(refusal(dir.path()).contains("not a plain file name"), "{name}");
    }
    index(dir.path(), "[1]");
    assert!(refusal(dir.path()).contains("not valid JSON"));
}

#[test]
fn folders_without_config_or_weights_are_refused() {
    let dir = folder();
    assert!(refusal(dir.path()).contains("has no safetensors file"));
    std::fs::remove_file(dir.path().join("config.json")).unwrap();
    assert!(refusal(dir.path()).contains("has no config.json"));
}

#[test]
fn joined_matrices_of_minimax_m3_are_presented_apart() {
    let dir = folder();
    let names = ["model.layers.0.mlp.gate_up_proj.weight", "model.layers.0.mlp.gate.weight"];
    let shapes = [[4, 2], [3, 2]];
    let mut header = serde_json::Map::new();
    let (mut start, mut data) = (0, Vec::new());
    for (name, [rows, cols]) in names.into_iter().zip(shapes) {
        let end = start + 2 * rows * cols;
        let entry = serde_json::json!({"dtype": "F16", "shape": [rows, cols], "data_offsets": [start, end]});
        header.insert(name.into(), entry);
        data.extend((start..end).map(|i| i as u8));
        start = end;
    }
    let header = serde_json::to_vec(&header).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(dir.path().join("model.safetensors"), file).unwrap();
    std::fs::write(dir.path().join("config.json"), r#"{"text_config":{"model_type":"minimax_m3_vl_text"}}"#).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let wanted = ["block_sparse_moe.gate.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"];
    assert_eq!(checkpoint.names(), wanted.map(|name| format!("model.layers.0.{name}")));
    let mut up = [0; 8];
    checkpoint.read("model.layers.0.mlp.up_proj.weight", 0, &mut up).unwrap();
    assert_eq!(up, [8, 9, 10, 11, 12, 13, 14, 15]);
    assert_eq!(checkpoint.meta("model.layers.0.mlp.gate_proj.weight").unwrap().shape, [2, 2]);
}
