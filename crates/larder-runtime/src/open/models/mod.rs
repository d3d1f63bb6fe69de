//! Models by name: downloads from the hub in a models folder, and stores made beside GGUF files.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use larder_store::{CONVERSION_STATE, ConvertOptions, MANIFEST_FILE, SourceOptions};

mod gguf_store;
#[cfg(feature = "hub")]
mod hub;
mod known_content;
mod name;

pub(crate) use gguf_store::{is_gguf, store_for_gguf};
#[cfg(feature = "hub")]
pub use hub::fetch;
pub use name::HubName;

use crate::notices::{Notice, Notices, Setting};

/// Suffix of a download's folder, beside the store that is made of it.
pub const DOWNLOAD: &str = ".download";

/// Reads `path` as a name on the hub, if no file or folder of that path exists.
pub fn hub_name(path: &Path) -> Option<HubName> {
    if path.exists() { None } else { HubName::parse(path.to_str()?).ok() }
}

/// The existing store of `model`, which is a path, a name in the models `folder`, or a GGUF file.
pub fn store_of(model: &Path, folder: Option<&Path>) -> Option<PathBuf> {
    let store = match hub_name(model) {
        Some(name) => folder?.join(name.folder()),
        None if is_gguf(model) => gguf_store::store_path(model),
        None => model.to_owned(),
    };
    store.is_dir().then_some(store)
}

/// The store of a model in the models `folder`, downloaded if it does not exist.
pub fn fetch_if_missing(
    name: &HubName,
    folder: Option<&Path>,
    opening: &SourceOptions,
    notices: &Notices,
) -> Result<PathBuf> {
    let folder = folder.with_context(no_folder)?;
    let store = folder.join(name.folder());
    if !is_complete(&store) {
        let report = fetch(name, &store, &ConvertOptions::default(), opening, notices);
        let again = || format!("{name} is not here yet, and `larder pull {name}` can try again");
        let report = if cfg!(feature = "hub") { report.with_context(again)? } else { report? };
        report.notes.into_iter().for_each(|note| notices.send(Notice::Model(note)));
    }
    Ok(store)
}

/// Why a name cannot be looked up without a models folder.
pub fn no_folder() -> String {
    format!("there is no models folder: set {}", Setting::ModelsFolder)
}

/// Whether a folder is a completely converted store.
pub fn is_complete(store: &Path) -> bool {
    store.join(MANIFEST_FILE).exists() && !store.join(CONVERSION_STATE).exists()
}

/// The folder of the download from which `store` is made.
pub fn download_of(store: &Path) -> PathBuf {
    let mut name = store.as_os_str().to_owned();
    name.push(DOWNLOAD);
    name.into()
}

/// Passes the progress of a conversion on.
struct ConvertProgress<'a>(&'a Notices);

impl larder_store::Progress for ConvertProgress<'_> {
    fn begin(&self, bytes: u64) {
        self.0.begin("converting", bytes, 0);
    }

    fn advance(&self, bytes: u64) {
        self.0.advance(bytes);
    }
}

/// Refuses to download, in builds without the hub.
#[cfg(not(feature = "hub"))]
pub fn fetch(
    name: &HubName,
    _: &Path,
    _: &ConvertOptions,
    _: &SourceOptions,
    _: &Notices,
) -> Result<larder_store::ConvertReport> {
    anyhow::bail!(
        "{name}: not found, neither as a file or folder nor among the downloaded models; this larder was built without \
         downloads (build it with its default features, or --features hub)"
    )
}
