//! Models by name: downloads from the hub in the user's models folder, and stores made beside GGUF files.

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

/// Suffix of a download's folder, beside the store that is made of it.
const DOWNLOAD: &str = ".download";

/// Reads `path` as a name on the hub, if no file or folder of that path exists.
pub fn hub_name(path: &Path) -> Option<HubName> {
    match path.exists() {
        true => None,
        false => HubName::parse(path.to_str()?).ok(),
    }
}

/// The existing store of `model`, which is a path, a name or a GGUF file.
pub fn store_of(model: &Path) -> Option<PathBuf> {
    let store = match hub_name(model) {
        Some(name) => store_path(&name).ok()?,
        None if is_gguf(model) => gguf_store::store_path(model),
        None => model.to_owned(),
    };
    store.is_dir().then_some(store)
}

/// The models folder.
pub fn folder() -> Result<PathBuf> {
    crate::xdg::models().context("there is no models folder: set LARDER_MODELS or HOME")
}

/// Path of a model's store, which may not exist.
pub fn store_path(name: &HubName) -> Result<PathBuf> {
    Ok(folder()?.join(name.folder()))
}

/// The store of a model, downloaded if it does not exist.
pub fn fetch_if_missing(name: &HubName) -> Result<PathBuf> {
    let store = store_path(name)?;
    if !is_complete(&store) {
        fetch(name, &store, &larder_store::ConvertOptions::default())?;
    }
    Ok(store)
}

/// Whether a folder is a completely converted store.
fn is_complete(store: &Path) -> bool {
    store.join(MANIFEST_FILE).exists() && !store.join(CONVERSION_STATE).exists()
}

/// The folder of the download from which `store` is made.
fn download_of(store: &Path) -> PathBuf {
    let mut name = store.as_os_str().to_owned();
    name.push(DOWNLOAD);
    name.into()
}

/// Refuses to download, in builds without the hub.
#[cfg(not(feature = "hub"))]
pub fn fetch(name: &HubName, _: &Path, _: &larder_store::ConvertOptions) -> Result<larder_store::ConvertReport> {
    anyhow::bail!(
        "{name}: not found, neither as a file or folder nor among the downloaded models; this larder was built without \
         downloads (build it with --features hub)"
    )
}
