//! Sources: models as they were published, in any supported form, as tensors by name.

use std::{ops::Range, path::Path, sync::Arc};

use larder_core::{ExpertNames, NumberFormat, TensorMeta, Tensors};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
};

mod checkpoint;
mod config_json;
mod expert_names;
mod file_rows;
mod gguf;
pub(crate) mod identity;
mod index;
mod integers;
pub(crate) mod matrix_scale;
mod minimax_m3;
mod mtp;
mod options;
mod quantised;
pub(crate) mod tensor_slice;
mod text_names;
pub(crate) mod tower;

pub use checkpoint::Checkpoint;
pub(crate) use expert_names::expert_names;
pub use gguf::Gguf;
#[cfg(test)]
pub(crate) use gguf::GgufBuilder;
pub(crate) use gguf::{DEFAULT_ALIGNMENT, GgufHeader, GgufTensor, MAGIC, gguf_names, tag};
pub use index::is_bare_file_name;
pub(crate) use mtp::{set_mtp, uses_mtp};
pub use options::SourceOptions;
pub(crate) use options::{ignored_keys, ignored_note, set_ignored};
pub use quantised::plain;
pub use tower::{PROCESSORS, TowerForm, TowerSource, mmproj_beside, open_mmproj};

/// The files that are copied unchanged with a model, in the order in which a store lists them.
pub const SIDECARS: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// A file that some quantised checkpoints have instead of a key of the config.
pub const QUANTISATION: &str = "hf_quant_config.json";

/// Largest sidecar that is read, in bytes.
pub(crate) const SIDECAR_LIMIT: u64 = 256 << 20;

/// A file of a source.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceFile {
    /// File name, without a folder.
    pub name: String,
    /// Length in bytes.
    pub bytes: u64,
}

impl SourceFile {
    /// Name and length of an open file.
    pub fn of(file: &ReadAt) -> Self {
        let name = file.path().file_name().unwrap_or_default();
        SourceFile { name: name.to_string_lossy().into_owned(), bytes: file.len() }
    }
}

/// A model on disk that can be converted or run: a checkpoint, a GGUF file or a store.
pub trait Source: Tensors + Send + Sync {
    /// The model's config, with the keys of the Hugging Face hub.
    fn config(&self) -> &serde_json::Value;

    /// All tensor names, in a fixed order.
    fn names(&self) -> Vec<&str>;

    /// Where the experts are stored, if this form of model has its own tensor names for them.
    fn expert_names(&self) -> Option<ExpertNames> {
        None
    }

    /// The dtype of a tensor that exists, but has no [`TensorMeta`] because its dtype is not supported.
    fn unsupported_dtype(&self, _name: &str) -> Option<&str> {
        None
    }

    /// The same model with each tensor that is converted from a quantised form widened to f32, from which it can be
    /// rounded to any format; `None` if there are no such tensors.
    fn as_floats(&self) -> Option<&dyn Source> {
        None
    }

    /// The bytes of one of [`SIDECARS`], or `None` if the model has none.
    fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>>;

    /// The model's image tower; `None` if it has none.
    fn tower(&self) -> Result<Option<TowerSource>> {
        Ok(None)
    }

    /// What of the model is not used, a sentence each.
    fn notes(&self) -> Vec<String> {
        vec![]
    }

    /// Path of the file or folder.
    fn path(&self) -> &Path;

    /// Announces that all data will be read once, so that reads can bypass the page cache.
    fn use_direct_io(&self) {}

    /// The position of a tensor in the order of download; `None` if it is on disk. Lower ranks arrive earlier.
    fn download_rank(&self, _name: &str) -> Option<usize> {
        None
    }

    /// Says that these bytes of a tensor are converted and durable, so a source that owns its files may delete them.
    fn release(&self, _name: &str, _offset: usize, _bytes: usize) -> Result<()> {
        Ok(())
    }

    /// The digest of samples of the tensor `name`, where they are not simply read: of a tensor that is being downloaded
    /// they were taken when its file arrived, after waiting for that, and of one that is stored in another form they
    /// are those of that form. See [`identity`](crate::identity).
    fn samples(&self, _name: &str) -> Result<Option<String>> {
        Ok(None)
    }

    /// A digest of the checksums under which the files are published, while they are being downloaded; `None` if they
    /// are on disk. It stands for their content until they have arrived.
    fn published(&self) -> Option<String> {
        None
    }

    /// The files that hold the weights.
    fn files(&self) -> Vec<SourceFile>;

    /// A hash of the lengths and headers of the files of weights and of all other files that are used. It does not
    /// depend on the weights themselves; [`identity`](crate::identity) does.
    fn fingerprint(&self) -> u64;
}

/// Format and shape of the tensor `name`, or an error that says why it cannot be read.
pub fn require_tensor<'a>(source: &'a dyn Source, name: &str) -> Result<&'a TensorMeta> {
    if let Some(meta) = source.meta(name) {
        return Ok(meta);
    }
    Err(match source.unsupported_dtype(name) {
        Some(dtype) => {
            let what = format!("tensor '{name}' has dtype {dtype}, which is not supported");
            StoreError::new(StoreErrorKind::Unsupported, source.path(), what)
        }
        None => StoreError::new(StoreErrorKind::Missing, source.path(), format!("has no tensor '{name}'")),
    })
}

/// The view of `source` in which the tensor `name` can be stored as `wanted`, where `None` keeps its format: as floats,
/// if it would have to be rounded from a quantised form.
pub(crate) fn view_for<'a>(source: &'a dyn Source, name: &str, wanted: Option<NumberFormat>) -> &'a dyn Source {
    let kept = source.meta(name).map(|meta| meta.kind);
    match source.as_floats() {
        Some(floats) if wanted.is_some() && wanted != kept => floats,
        _ => source,
    }
}

/// Whether a source is opened with the tensors of its layer for multi-token prediction.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub enum MtpTensors {
    /// Without them.
    #[default]
    LeftOut,
    /// With those of the first such layer, which must exist.
    Kept,
}

/// Opens a checkpoint folder or a GGUF file, without layers for multi-token prediction.
pub fn open_source(path: &Path) -> Result<Box<dyn Source>> {
    open_source_with(path, MtpTensors::LeftOut)
}

/// As [`open_source`], with these options.
pub fn open_source_with(path: &Path, options: impl Into<SourceOptions>) -> Result<Box<dyn Source>> {
    let options = options.into();
    let meta = std::fs::metadata(path).map_err(|e| StoreError::io(path, "opening", e))?;
    if meta.is_dir() {
        return plain(Checkpoint::open(path)?.with(&options)?);
    }
    match path.extension().and_then(|e| e.to_str()) {
        Some("gguf") => Ok(Box::new(Gguf::open_with(path, &options)?)),
        _ => Err(StoreError::new(StoreErrorKind::Unsupported, path, "is neither a model folder nor a .gguf file")),
    }
}

/// The weight files of a checkpoint that is still being downloaded, file by file, while earlier files are converted.
pub trait IncomingFiles: Send + Sync {
    /// Length of the file `name` in bytes, and the JSON of its header; both are known before the data.
    fn header(&self, name: &str) -> Result<(u64, Vec<u8>)>;

    /// The checksum under which the file `name` is published, or else the revision that it belongs to.
    fn checksum(&self, name: &str) -> Result<String>;

    /// The digest of samples of the tensor `tensor` in the file `name`, as [`samples_of_file`](crate::samples_of_file)
    /// gives it. Waits until the file is on disk, unless it was before; its bytes may have been released since.
    fn sampled(&self, name: &str, tensor: &str) -> Result<String>;

    /// Waits until the bytes `range` of the file `name` are on disk, and returns the file.
    fn file(&self, name: &str, range: Range<u64>) -> Result<Arc<ReadAt>>;

    /// Says that this conversion does not need the bytes `range` of the file `name` again.
    fn release(&self, name: &str, range: Range<u64>) -> Result<()>;
}
