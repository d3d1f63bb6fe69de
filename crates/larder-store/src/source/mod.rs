//! Where models come from: every form a model can have on disk, seen as tensors by name.

use std::path::Path;

use larder_core::{ExpertNames, TensorMeta, Tensors};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    file::ReadAt,
};

mod checkpoint;
mod gguf;
mod incoming;

pub use checkpoint::{Checkpoint, is_bare_file_name};
pub use gguf::Gguf;
pub use incoming::IncomingFiles;

/// The files that travel with a model, in the order in which a store lists them.
pub const SIDECARS: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// The longest of them that is read.
pub(crate) const SIDECAR_LIMIT: u64 = 256 << 20;

/// A file that a source consists of.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// Its name, without a folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
}

impl SourceFile {
    /// What is to be said of an open file.
    pub fn of(file: &ReadAt) -> Self {
        let name = file.path().file_name().unwrap_or_default();
        SourceFile { name: name.to_string_lossy().into_owned(), bytes: file.len() }
    }
}

/// A model on disk that can be converted or run.
pub trait Source: Tensors + Send + Sync {
    /// The model's config in the keys of the Hugging Face hub.
    fn config(&self) -> &serde_json::Value;

    /// All tensor names, in a fixed order.
    fn names(&self) -> Vec<&str>;

    /// Where the experts are, if this form of model has names of its own for them.
    fn expert_names(&self) -> Option<ExpertNames> {
        None
    }

    /// The dtype of a tensor that is there and has no [`TensorMeta`] because larder cannot read it.
    fn unsupported_dtype(&self, _name: &str) -> Option<&str> {
        None
    }

    /// The bytes of one of [`SIDECARS`], or `None` if the model has none.
    fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// The file or folder.
    fn path(&self) -> &Path;

    /// Says that all data are about to be read once, so that they need not pass through the page cache.
    fn use_direct_io(&self) {}

    /// All tensors will be read soon, so the system may begin.
    fn advise_will_need(&self) {}

    /// When a tensor comes, if the model is still on its way: those of a lower number are there earlier.
    fn download_rank(&self, _name: &str) -> Option<usize> {
        None
    }

    /// These bytes of a tensor have been converted for good, so a source that owns its files need not keep them.
    fn release(&self, _name: &str, _offset: usize, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// The files that hold the weights.
    fn files(&self) -> Vec<SourceFile>;

    /// A number that changes when the weights may have: over file names, lengths and headers.
    fn fingerprint(&self) -> u64;
}

/// What `name` is, or why it cannot be had.
pub fn require_tensor<'a>(source: &'a dyn Source, name: &str) -> Result<&'a TensorMeta> {
    if let Some(meta) = source.meta(name) {
        return Ok(meta);
    }
    Err(match source.unsupported_dtype(name) {
        Some(dtype) => {
            let what = format!("tensor '{name}' has dtype {dtype}, which larder does not read");
            StoreError::new(StoreErrorKind::Unsupported, source.path(), what)
        }
        None => StoreError::new(StoreErrorKind::Missing, source.path(), format!("has no tensor '{name}'")),
    })
}

/// Opens a checkpoint folder or a GGUF file.
pub fn open_source(path: &Path) -> Result<Box<dyn Source>> {
    let meta = std::fs::metadata(path).map_err(|e| StoreError::io(path, "opening", e))?;
    if meta.is_dir() {
        return Ok(Box::new(Checkpoint::open(path)?));
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("gguf") => Ok(Box::new(Gguf::open(path)?)),
        _ => Err(StoreError::new(StoreErrorKind::Unsupported, path, "is neither a model folder nor a .gguf file")),
    }
}
