//! Models that are named and not only found: those of the hub, kept in a folder of the user's, and stores made beside
//! GGUF files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use larder_store::{CONVERSION_STATE, MANIFEST_FILE};

mod gguf_store;
#[cfg(feature = "hub")]
mod hub;
mod installed;
mod name;

pub use gguf_store::{is_gguf, store_for_gguf};
#[cfg(feature = "hub")]
pub use hub::fetch;
pub use installed::{InstalledModel, installed, remove};
pub use name::HubName;

/// What a download's folder is called beside the store that is made of it.
const DOWNLOAD: &str = ".download";

/// The name that somebody means by `path`, if nothing of that path is here.
pub fn hub_name(path: &Path) -> Option<HubName> {
    match path.exists() {
        true => None,
        false => HubName::parse(path.to_str()?).ok(),
    }
}

/// The folder that `model` leads to, if it is there: of a path, of a name, or beside a GGUF file.
pub fn store_of(model: &Path) -> Option<PathBuf> {
    let store = match hub_name(model) {
        Some(name) => store_path(&name).ok()?,
        None if is_gguf(model) => gguf_store::store_path(model),
        None => model.to_owned(),
    };
    store.is_dir().then_some(store)
}

/// The folder of the models that larder keeps.
pub fn folder() -> Result<PathBuf> {
    crate::xdg::models().context("there is no place for models: neither LARDER_MODELS nor HOME is set")
}

/// Where the store of a model is or would be.
pub fn store_path(name: &HubName) -> Result<PathBuf> {
    Ok(folder()?.join(name.folder()))
}

/// The store of a model, which is fetched unless it is there.
pub fn fetch_if_missing(name: &HubName) -> Result<PathBuf> {
    let store = store_path(name)?;
    if !is_complete(&store) {
        fetch(name, &store, &larder_store::ConvertOptions::default())?;
    }
    Ok(store)
}

/// Whether a folder is a store, its conversion done to the end.
fn is_complete(store: &Path) -> bool {
    store.join(MANIFEST_FILE).exists() && !store.join(CONVERSION_STATE).exists()
}

/// The folder that holds what is fetched for `store` until it is made.
fn download_of(store: &Path) -> PathBuf {
    let mut name = store.as_os_str().to_owned();
    name.push(DOWNLOAD);
    name.into()
}

/// Says that this larder fetches nothing.
#[cfg(not(feature = "hub"))]
pub fn fetch(name: &HubName, _: &Path, _: &larder_store::ConvertOptions) -> Result<larder_store::ConvertReport> {
    anyhow::bail!(
        "{name}: is no file or folder here and no model that was fetched; this larder was built without the hub \
         (cargo build --features hub)"
    )
}
