//! The models of `-m`: paths, names for them, and folders of models.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use larder_runtime::model_name;
use larder_store::MANIFEST_FILE;

use crate::models::named;

/// The most models of a server.
const MODELS_MAX: usize = 256;
/// The ending of stores that are made beside GGUF files.
const STORE_ENDING: &str = "larder";

/// A model's name in the API and its path.
pub type NamedModel = (String, PathBuf);

/// The models that the arguments name. A folder that is no model stands for the models in it, and in the folders in it.
pub fn models_of(arguments: &[PathBuf]) -> Result<Vec<NamedModel>> {
    let mut all = Vec::new();
    for argument in arguments {
        let (name, path) = named(argument);
        match (name, is_folder_of_models(&path)) {
            (None, true) => all.extend(models_in(&path)?),
            (Some(name), true) => bail!("-m {name}={}: a folder of models cannot have a name", path.display()),
            (name, false) => all.push((name.unwrap_or_else(|| model_name(&path)), path)),
        }
    }
    if all.len() > MODELS_MAX {
        bail!("{} models are too many; name at most {MODELS_MAX} with -m", all.len());
    }
    for (i, (name, path)) in all.iter().enumerate() {
        if let Some((_, other)) = all[..i].iter().find(|(earlier, _)| earlier == name) {
            bail!(
                "{} and {} are both named {name}; name one of them with -m NAME=PATH",
                other.display(),
                path.display()
            );
        }
    }
    Ok(all)
}

/// Whether a folder is no model but may have some in it.
pub fn is_folder_of_models(path: &Path) -> bool {
    path.is_dir() && !is_model_folder(path)
}

/// Whether a folder is a store, also one that is not finished, or a checkpoint.
fn is_model_folder(path: &Path) -> bool {
    let has = |name: &str| path.join(name).exists();
    has(MANIFEST_FILE) || has(larder_store::CONVERSION_STATE) || has("config.json")
}

fn models_in(folder: &Path) -> Result<Vec<NamedModel>> {
    let mut found = Vec::new();
    for path in entries(folder)? {
        match is_folder_of_models(&path) {
            true => found.extend(entries(&path)?.into_iter().filter(|path| is_model(path))),
            false if is_model(&path) => found.push(path),
            false => {}
        }
    }
    if found.is_empty() {
        bail!("{}: has no models; name a store, a checkpoint folder or a .gguf file with -m", folder.display());
    }
    Ok(found.into_iter().map(|path| (model_name(&path), path)).collect())
}

/// Whether a path in a folder is a model: not a later part of a split GGUF file, nor the store beside a GGUF file.
fn is_model(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    if path.is_dir() {
        let is_beside = path.extension().is_some_and(|e| e == STORE_ENDING) && has_gguf(path);
        return is_model_folder(path) && !is_beside;
    }
    name.ends_with(".gguf") && !name.starts_with("mmproj") && !is_later_part(name)
}

/// Whether the GGUF file is there of which a store was made.
fn has_gguf(store: &Path) -> bool {
    let Some(stem) = store.file_stem().and_then(OsStr::to_str) else { return false };
    let beside = store.parent().and_then(|folder| fs::read_dir(folder).ok()).into_iter().flatten().flatten();
    beside.filter_map(|entry| entry.file_name().into_string().ok()).any(|name| {
        let rest = name.strip_suffix(".gguf").and_then(|name| name.strip_prefix(stem));
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with("-00001-of-"))
    })
}

/// `NAME-00002-of-00005.gguf` and so on.
fn is_later_part(name: &str) -> bool {
    let Some((before, _)) = name.rsplit_once("-of-") else { return false };
    let number = before.rsplit_once('-').map(|(_, number)| number);
    number.is_some_and(|number| number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit()) && number != "00001")
}

/// The visible entries of a folder, sorted.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let listed = fs::read_dir(folder).with_context(|| format!("{}: listing failed", folder.display()))?;
    let mut paths: Vec<PathBuf> = listed.flatten().map(|entry| entry.path()).collect();
    paths.retain(|path| path.file_name().and_then(OsStr::to_str).is_some_and(|name| !name.starts_with('.')));
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_have_models_and_what_belongs_to_them() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [
            "one/config.json",
            "org/two/config.json",
            "a.larder/larder.json",
            "empty/readme",
            "b.larder/config.json",
            ".hidden/config.json",
        ] {
            fs::create_dir_all(at(name).parent().unwrap()).unwrap();
            fs::write(at(name), "").unwrap();
        }
        fs::write(at("a.larder").join(MANIFEST_FILE), "").unwrap();
        for name in ["a.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "mmproj-a.gguf", "notes.txt"] {
            fs::write(at(name), "").unwrap();
        }
        let names: Vec<String> =
            models_of(&[folder.path().to_owned()]).unwrap().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["a.gguf", "b.larder", "c-00001-of-00002.gguf", "one", "two"]);
        let error = models_of(&[at("one"), at("one")]).unwrap_err().to_string();
        assert!(error.contains("both named one"), "{error}");
        let two = models_of(&[at("one"), PathBuf::from(format!("uno={}", at("one").display()))]).unwrap();
        assert_eq!(two[1].0, "uno");
        assert!(models_of(&[at("empty")]).unwrap_err().to_string().contains("has no models"));
    }
}
