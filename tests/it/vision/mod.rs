//! Images in prompts: towers of checkpoints, of `mmproj` files and in stores, against texts of transformers.

mod command;
mod library;
mod sidecars;
mod texts;

use std::path::{Path, PathBuf};

use larder_store::{ConvertOptions, convert, open_source};
use serde_json::Value;

use crate::support::fixture;

/// The folders of references, one per `model_type`.
fn references() -> Vec<PathBuf> {
    let folders = crate::support::folders(&fixture("vision")).into_iter();
    folders.filter(|folder| folder.join("reference.safetensors").is_file()).collect()
}

/// Those of which there are `mmproj` files: a part of Qwen3-Omni has none.
fn mmproj_references() -> Vec<PathBuf> {
    let is_whole = |folder: &PathBuf| config(folder).get("vision_config").is_some();
    references().into_iter().filter(is_whole).collect()
}

fn config(folder: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap()
}

/// The file of a drawn picture.
fn picture(name: &str) -> PathBuf {
    fixture(&format!("vision/images/{name}.png"))
}

/// The prompts of a folder by name, as its `reference.json` has them.
fn prompts(folder: &Path) -> Vec<(String, Value)> {
    let json: Value = serde_json::from_slice(&std::fs::read(folder.join("reference.json")).unwrap()).unwrap();
    json["prompts"].as_object().unwrap().iter().map(|(name, prompt)| (name.clone(), prompt.clone())).collect()
}

/// The greedy text of transformers behind a prompt.
fn generated(folder: &Path, prompt: &str) -> Vec<u32> {
    let bytes = std::fs::read(folder.join("reference.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let ids = file.tensor(&format!("{prompt}.generated_ids")).unwrap();
    ids.data().as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
}

/// A store of the model at `source`, with its image tower if that is wanted.
fn store(source: &Path, to: &Path, with_tower: bool) -> PathBuf {
    let opened = open_source(source).unwrap();
    let blueprint = larder_runtime::blueprint_of(opened.as_ref()).unwrap();
    let (tower, note) = larder_runtime::kept_tower(opened.as_ref(), None, &blueprint).unwrap();
    assert!(tower.is_some() && note.is_none(), "{note:?}");
    let options = ConvertOptions { tower: tower.filter(|_| with_tower), ..ConvertOptions::default() };
    convert(opened.as_ref(), &blueprint, to, &options, &()).unwrap();
    to.to_owned()
}
