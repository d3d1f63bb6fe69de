//! Tensors that reach beyond the end of their file, in every kind of source that is converted.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::support::{encoder_decoders, fixture, folders, golden_models, larder_refuses};

/// Checkpoints of all architectures and quantised ones, and GGUF files of all architectures and formats.
fn sources() -> Vec<PathBuf> {
    let gguf = fs::read_dir(fixture("fixtures/gguf")).unwrap().map(|entry| entry.unwrap().path());
    let gguf = gguf.filter(|path| path.extension().is_some_and(|ending| ending == "gguf"));
    let mut all: Vec<PathBuf> = [golden_models(), encoder_decoders(), folders(&fixture("fixtures/quantised"))].concat();
    all.extend(gguf);
    all
}

/// The file of weights of a source: that of a folder, or the last of several.
fn weights_of(source: &Path) -> PathBuf {
    if !source.is_dir() {
        return source.to_owned();
    }
    let names = fs::read_dir(source).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let last = names.filter(|name| name.starts_with("model") && name.ends_with(".safetensors")).max();
    source.join(last.expect("a folder has weights"))
}

/// A copy of a source, in an empty folder, with other bytes in its file of weights.
fn copy(source: &Path, weights: &[u8], to: &Path) -> PathBuf {
    let files: Vec<PathBuf> = match source.is_dir() {
        true => fs::read_dir(source).unwrap().map(|entry| entry.unwrap().path()).collect(),
        false => vec![source.to_owned()],
    };
    for file in &files {
        fs::copy(file, to.join(file.file_name().unwrap())).unwrap();
    }
    let changed = to.join(weights_of(source).file_name().unwrap());
    fs::write(&changed, weights).unwrap();
    if source.is_dir() { to.to_owned() } else { changed }
}

/// The bytes of a safetensors file whose last tensor has a million times as many rows, as its header says.
fn with_more_rows(weights: &[u8]) -> Vec<u8> {
    let length = u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    let (header, data) = weights[8..].split_at(length);
    let mut header: Value = serde_json::from_slice(header).unwrap();
    let tensors = header.as_object_mut().unwrap().iter_mut().filter(|(name, _)| *name != "__metadata__");
    let (_, last) = tensors.max_by_key(|(_, tensor)| tensor["data_offsets"][1].as_u64()).unwrap();
    let [begin, end] = [0, 1].map(|i| last["data_offsets"][i].as_u64().unwrap());
    last["shape"][0] = (last["shape"][0].as_u64().unwrap() << 20).into();
    last["data_offsets"][1] = (begin + ((end - begin) << 20)).into();
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

#[test]
fn they_are_refused_in_every_format_and_architecture() {
    let mut refused = 0;
    for source in sources() {
        let file = weights_of(&source);
        let (whole, name) = (fs::read(&file).unwrap(), file.file_name().unwrap().to_str().unwrap());
        // More than the padding behind the last tensor of a GGUF file.
        let cut = whole[..whole.len() - 33].to_vec();
        for weights in [Some(cut), source.is_dir().then(|| with_more_rows(&whole))].into_iter().flatten() {
            let dir = tempfile::tempdir().unwrap();
            let (copied, store) = (copy(&source, &weights, dir.path()), dir.path().join("store"));
            let said = larder_refuses(&["convert", copied.to_str().unwrap(), store.to_str().unwrap()]);
            assert!(said.contains(name) && said.len() < 400, "{}: {said}", source.display());
            assert!(!store.exists(), "{}: something was left", source.display());
            refused += 1;
        }
    }
    assert!(refused > 140, "only {refused} sources");
}
