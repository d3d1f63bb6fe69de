//! Image towers of models: their tensors by name, and what the files say about them. What a tower computes is not known
//! here.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use larder_core::{TensorMeta, Tensors, TensorsError};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use twox_hash::XxHash3_64;

use super::{IncomingFiles, Source, SourceFile};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
};

mod beside;
mod mmproj;

pub use beside::mmproj_beside;
pub use mmproj::open_mmproj;

/// Files of a checkpoint that say how pictures are cut into patches; the first that exists counts.
pub const PROCESSORS: [&str; 2] = ["preprocessor_config.json", "processor_config.json"];

/// Largest of these files, in bytes.
pub(crate) const PROCESSOR_LIMIT: u64 = 1 << 20;

/// The most tensors of a tower.
const MOST_TENSORS: usize = 1 << 16;

/// The description of a tower in its file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum TowerForm {
    /// Part of a checkpoint.
    Checkpoint {
        /// Its `config.json`.
        config: Value,
        /// The file about its processor, if there is one.
        processor: Option<Value>,
    },
    /// An `mmproj` file of GGUF.
    Mmproj {
        /// Its metadata about the tower, under the keys of the file.
        keys: Value,
    },
}

/// The image tower of a model on disk: a source of its own.
#[derive(Clone)]
pub struct TowerSource {
    /// What the file says about it.
    pub form: TowerForm,
    path: PathBuf,
    names: Vec<String>,
    tensors: Arc<dyn Tensors + Send + Sync>,
}

impl TowerSource {
    /// A tower with tensors of these names, in the file or folder at `path`.
    pub fn new(
        path: &Path,
        form: TowerForm,
        names: Vec<String>,
        tensors: Arc<dyn Tensors + Send + Sync>,
    ) -> Result<Self> {
        if names.len() > MOST_TENSORS {
            let what = format!("has an image tower of {} tensors; the limit is {MOST_TENSORS}", names.len());
            return Err(StoreError::malformed(path, what));
        }
        Ok(TowerSource { form, path: path.to_owned(), names, tensors })
    }

    /// Its tensors, which can be read after the model was closed.
    pub fn tensors(&self) -> &Arc<dyn Tensors + Send + Sync> {
        &self.tensors
    }

    /// Bytes of its tensors as they are stored.
    pub fn bytes(&self) -> u64 {
        let metas = self.names.iter().filter_map(|name| self.tensors.meta(name));
        metas.map(|meta| meta.bytes as u64).fold(0, u64::saturating_add)
    }
}

impl Tensors for TowerSource {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.tensors.meta(name)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        self.tensors.read(name, offset, into)
    }
}

impl Source for TowerSource {
    fn config(&self) -> &Value {
        match &self.form {
            TowerForm::Checkpoint { config, .. } => config,
            TowerForm::Mmproj { keys } => keys,
        }
    }

    fn names(&self) -> Vec<&str> {
        self.names.iter().map(String::as_str).collect()
    }

    fn sidecar(&self, _name: &str) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn files(&self) -> Vec<SourceFile> {
        vec![]
    }

    /// A hash of names, formats and shapes of the tensors, and of what the file says.
    fn fingerprint(&self) -> u64 {
        let shape = |name: &String| {
            let meta = self.tensors.meta(name);
            meta.map_or_else(|| name.clone(), |meta| format!("{name} {} {:?}", meta.kind, meta.shape))
        };
        let shapes: Vec<String> = self.names.iter().map(shape).collect();
        let all = serde_json::to_vec(&(&self.form, shapes)).expect("text and numbers serialize as JSON");
        XxHash3_64::oneshot(&all)
    }
}

/// Where a tensor of a tower is.
pub(super) enum TowerPlace {
    /// In a file on disk.
    Local(Arc<ReadAt>),
    /// In the file of this name, which is being downloaded.
    Incoming(Arc<dyn IncomingFiles>, String),
}

/// A tensor of a tower.
pub(super) struct TowerTensor {
    pub meta: TensorMeta,
    pub place: TowerPlace,
    /// First byte in the file.
    pub start: u64,
}

/// The tensors of a tower by name, in files of weights.
#[derive(Default)]
pub(super) struct TowerTensors(pub BTreeMap<String, TowerTensor>);

impl TowerTensors {
    /// The tower at `path` with these tensors.
    pub fn into_source(self, path: &Path, form: TowerForm) -> Result<TowerSource> {
        let names = self.0.keys().cloned().collect();
        TowerSource::new(path, form, names, Arc::new(self))
    }

    fn read_tensor(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<()> {
        let missing = || {
            let what = format!("the image tower has no tensor '{name}'");
            StoreError::new(StoreErrorKind::Missing, Path::new(""), what)
        };
        let TowerTensor { place, start, .. } = self.0.get(name).ok_or_else(missing)?;
        let start = start + offset as u64;
        match place {
            TowerPlace::Local(file) => file.read(start, into),
            TowerPlace::Incoming(files, file) => files.file(file, start..start + into.len() as u64)?.read(start, into),
        }
    }
}

impl Tensors for TowerTensors {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.0.get(name).map(|tensor| &tensor.meta)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        Ok(self.read_tensor(name, offset, into)?)
    }
}
