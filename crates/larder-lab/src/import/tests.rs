//! Tests of both import formats.

use std::fs;

use larder_core::UNUSED;

use super::*;
use crate::{SyntheticRouting, export};

fn csv(text: &str) -> Result<Trace, String> {
    csv_of(text, None)
}

fn csv_of(text: &str, experts: Option<usize>) -> Result<Trace, String> {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.csv");
    fs::write(&path, text).unwrap();
    import(&path, &ImportOptions { experts, ..ImportOptions::default() }).map_err(|e| e.to_string())
}

#[test]
fn layers_are_renumbered_and_choices_sorted_by_rank() {
    let text = "layer,expert,token,rank\n7,1,5,1\n7,3,5,0\n3,0,5,0\n\n3,2,9,0\n7,0,9,0\n";
    let trace = csv(text).unwrap();
    assert_eq!((trace.rows, trace.experts, trace.top_k), (2, 4, 2));
    assert_eq!(trace.ids, [0, UNUSED, 3, 1, 2, UNUSED, 0, UNUSED]);
    assert_eq!((trace.passes, trace.sequences), (vec![1, 1], vec![2]));
    assert_eq!(csv_of(text, Some(16)).unwrap().experts, 16);
}

#[test]
fn sequences_and_passes_are_kept_apart() {
    let trace = csv("sequence,pass,token,layer,expert\n0,0,0,0,1\n0,0,1,0,0\n0,1,2,0,1\n1,1,0,0,1\n").unwrap();
    assert_eq!((trace.passes, trace.sequences), (vec![2, 1, 1], vec![3, 1]));
}

#[test]
fn malformed_files_are_refused_with_the_line() {
    let error = |text: &str| csv(text).unwrap_err();
    assert!(error("").contains("no column 'token'"));
    assert!(error("token,layer\n").contains("no column 'expert'"));
    assert!(error("token,layer,expert\n").contains("no tokens"));
    assert!(error("token,layer,expert\n0,0,x\n").contains("'x' instead of a number for expert in line 2"));
    assert!(error("token,layer,expert\n0,0\n").contains("line 2"));
    assert!(error("token,layer,expert\n0,0,70000\n").contains("too large"));
    assert!(error("token,layer,expert\n1,0,1\n0,0,1\n").contains("after a later one in line 3"));
    assert!(error("token,layer,expert\n0,0,1\n0,1,1\n1,0,1\n").contains("some layer of token 1"));
    assert!(error("token,layer,expert\n0,0,1\n0,0,1\n").contains("twice"));
    assert!(error(&"x".repeat(10_000)).contains("line 1 is not text"));
    assert!(csv_of("token,layer,expert\n0,0,5\n", Some(4)).unwrap_err().contains("expert 5, but only 4"));
}

#[test]
fn an_export_is_imported_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.csv");
    let mut trace =
        SyntheticRouting { tokens: 7, rows: 3, sequences: 2, ..SyntheticRouting::default() }.generate().unwrap();
    trace.weights = (0..trace.ids.len()).map(|i| half::f16::from_f32(i as f32 / 8.0)).collect();
    export::trace_csv(&trace, &path).unwrap();
    let again = import(&path, &ImportOptions { experts: Some(32), ..ImportOptions::default() }).unwrap();
    assert_eq!(again, Trace { meta: again.meta.clone(), ..trace });
}

fn folder(index: &str, files: &[(&str, Vec<u8>)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("index.json"), index).unwrap();
    files.iter().for_each(|(name, bytes)| fs::write(dir.path().join(name), bytes).unwrap());
    dir
}

fn sequence(dtype: safetensors::Dtype, shape: &[usize], data: &[u8]) -> Vec<u8> {
    let view = safetensors::tensor::TensorView::new(dtype, shape.to_vec(), data).unwrap();
    safetensors::serialize([("expert_ids", view)], None).unwrap()
}

#[test]
fn a_folder_is_read_as_its_index_says() {
    let index = r#"{"model": "m", "layers": 1, "experts": 4, "top_k": 2, "sequences":
        [{"file": "a.safetensors"}, {"file": "b.safetensors", "has_repetition": true}]}"#;
    let a = sequence(safetensors::Dtype::U8, &[2, 1, 2], &[0, 1, 3, 2]);
    let b = sequence(safetensors::Dtype::I32, &[1, 1, 2], &[1, 0, 0, 0, 2, 0, 0, 0]);
    let dir = folder(index, &[("a.safetensors", a), ("b.safetensors", b)]);
    let trace = import(dir.path(), &ImportOptions::default()).unwrap();
    assert_eq!((trace.ids, trace.sequences), (vec![0, 1, 3, 2, 1, 2], vec![2, 1]));
    assert_eq!(trace.meta["model"], "m");
    let fewer = import(dir.path(), &ImportOptions { skip_repetitive: true, ..ImportOptions::default() }).unwrap();
    assert_eq!(fewer.sequences, [2]);
}

#[test]
fn inconsistent_folders_are_refused() {
    let error = |file: &str, bytes: Vec<u8>| {
        let index = format!(r#"{{"layers": 1, "experts": 4, "top_k": 2, "sequences": [{{"file": "{file}"}}]}}"#);
        let dir = folder(&index, &[("a", bytes)]);
        import(dir.path(), &ImportOptions::default()).unwrap_err().to_string()
    };
    let of = |shape: &[usize], data: &[u8]| sequence(safetensors::Dtype::U8, shape, data);
    assert!(error("../a", Vec::new()).contains("not a file in the same folder"));
    assert!(error("/etc/passwd", Vec::new()).contains("not a file in the same folder"));
    assert!(error("b", Vec::new()).contains("opening failed"));
    assert!(error("a", b"nothing".to_vec()).contains("not a safetensors file"));
    assert!(error("a", of(&[2], &[0, 1])).contains("not [tokens, layers, k]"));
    assert!(error("a", of(&[1, 2, 1], &[0, 1])).contains("its index says 2 in 1"));
    assert!(error("a", of(&[1, 1, 2], &[0, 4])).contains("expert 4 of 4"));
    let negative = sequence(safetensors::Dtype::I64, &[1, 1, 2], &[0xff; 16]);
    assert!(error("a", negative).contains("invalid expert id"));
    let dir = folder("[]", &[]);
    assert!(import(dir.path(), &ImportOptions::default()).unwrap_err().to_string().contains("not a trace index"));
}
