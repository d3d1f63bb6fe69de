//! A GGUF file as a source: tensors, config and tokenizer in the form of the Hugging Face hub.

use std::{hash::Hasher, path::Path, sync::Arc};

use larder_core::{ExpertNames, TensorMeta, TensorRows, Tensors, TensorsError};
use twox_hash::XxHash3_64;

use self::{
    architectures::Architecture,
    metadata::Metadata,
    names::HubNames,
    parts::GgufParts,
    rope_factors::RopeFactors,
    stored::{HubTensor, Stored},
};
use super::{
    MtpTensors, Source, SourceFile, SourceOptions, TowerSource,
    file_rows::FileRows,
    ignored_note, mmproj_beside,
    mtp::{prediction_note, set_mtp},
    open_mmproj, set_ignored,
};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::ReadAt,
};

mod architectures;
mod cursor;
mod hyperparameters;
mod layer_lists;
mod metadata;
mod names;
mod parts;
mod pretokenizer;
mod reader;
mod remap;
mod rope_factors;
mod scales;
mod stored;
mod tokenizer;
mod weight_names;

pub(crate) use metadata::Value as MetadataValue;
pub(crate) use reader::{DEFAULT_ALIGNMENT, GgufHeader, GgufTensor, MAGIC, tag};
pub(crate) use weight_names::gguf_names;

#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::GgufBuilder;

/// A GGUF model in one file or in several parts.
///
/// Experts keep their names of GGUF, see [`Source::expert_names`]; all other tensors have the names of the hub.
pub struct Gguf {
    /// The files, in the order of the parts.
    files: Vec<Arc<ReadAt>>,
    metadata: Metadata,
    names: HubNames,
    config: serde_json::Value,
    fingerprint: u64,
}

impl Gguf {
    /// Reads and checks the header of the file at `path`, and of the other parts if it is one of several. Tensors are
    /// read on demand. Blocks for multi-token prediction are left out.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_with(path, &SourceOptions::default())
    }

    /// As [`open`](Self::open), with these options: the first block for multi-token prediction is the layer behind the
    /// last.
    pub fn open_with(path: &Path, options: &SourceOptions) -> Result<Self> {
        let mtp = options.mtp;
        let GgufParts { files, header_bytes, metadata, tensors } = GgufParts::open(path)?;
        let arch = metadata.architecture()?;
        let architecture = Architecture::of(arch).ok_or_else(|| {
            let what = format!(
                "has the architecture '{arch}', which is not supported; supported are {}",
                Architecture::supported()
            );
            StoreError::new(StoreErrorKind::Unsupported, path, what)
        })?;
        let layers = hyperparameters::layer_count(&metadata)?;
        let names = HubNames::of(architecture, &metadata, &tensors, (layers, mtp))?;
        let rope_factors = RopeFactors::read(path, &files, &names.rope_factors)?;
        let mut config = architectures::hub_config(&metadata, &names.tensors, &rope_factors)?;
        set_mtp(&mut config, mtp == MtpTensors::Kept);
        set_ignored(&mut config, &options.ignored_keys);
        let fingerprint = fingerprint(&files, &header_bytes)?;
        let files = files.into_iter().map(Arc::new).collect();
        Ok(Gguf { files, metadata, names, config, fingerprint })
    }

    fn tensor(&self, name: &str) -> Result<&HubTensor> {
        let tensor = self.names.tensors.get(name);
        tensor.ok_or_else(|| StoreError::new(StoreErrorKind::Missing, self.path(), format!("has no tensor '{name}'")))
    }
}

fn fingerprint(files: &[ReadAt], header_bytes: &[u64]) -> Result<u64> {
    let mut hash = XxHash3_64::new();
    for (file, header_bytes) in files.iter().zip(header_bytes) {
        hash.write(&file.len().to_le_bytes());
        let mut at = 0;
        while at < *header_bytes {
            let chunk = file.read_vec(at, (header_bytes - at).min(1 << 20))?;
            hash.write(&chunk);
            at += chunk.len() as u64;
        }
    }
    Ok(hash.finish())
}

impl Tensors for Gguf {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.names.tensors.get(name).map(|tensor| &tensor.meta)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let read = self.tensor(name).and_then(|tensor| tensor.read(&self.files[tensor.file], offset, into));
        read.map_err(|e| TensorsError(format!("{e} (tensor '{name}')")))
    }

    fn rows(&self, name: &str) -> Option<Arc<dyn TensorRows>> {
        let HubTensor { meta, file, offset, stored } = self.names.tensors.get(name)?;
        let unchanged = *stored == Stored::Same;
        unchanged.then(|| FileRows::open(meta.clone(), self.files[*file].clone(), *offset)).flatten()
    }
}

impl Source for Gguf {
    fn config(&self) -> &serde_json::Value {
        &self.config
    }

    fn names(&self) -> Vec<&str> {
        self.names.order.iter().map(String::as_str).collect()
    }

    fn expert_names(&self) -> Option<ExpertNames> {
        Some(self.names.experts.clone())
    }

    fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let json = match name {
            _ if self.metadata.text("tokenizer.ggml.model")?.is_none() => return Ok(None),
            "tokenizer.json" => tokenizer::tokenizer(&self.metadata)?,
            "tokenizer_config.json" => tokenizer::tokenizer_config(&self.metadata)?,
            "generation_config.json" => tokenizer::generation_config(&self.metadata)?,
            _ => return Ok(None),
        };
        Ok(Some(json.to_string().into_bytes()))
    }

    /// That of the `mmproj` file in the same folder.
    fn tower(&self) -> Result<Option<TowerSource>> {
        mmproj_beside(self.path()).map(|path| open_mmproj(&path)).transpose()
    }

    fn notes(&self) -> Vec<String> {
        prediction_note(self.names.unused).into_iter().chain(ignored_note(&self.config)).collect()
    }

    fn path(&self) -> &Path {
        self.files[0].path()
    }

    fn use_direct_io(&self) {
        self.files.iter().for_each(|file| file.use_direct_io());
    }

    fn files(&self) -> Vec<SourceFile> {
        self.files.iter().map(|file| SourceFile::of(file)).collect()
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}
