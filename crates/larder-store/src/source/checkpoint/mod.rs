//! A checkpoint folder in the form of the Hugging Face hub: `config.json` and one or more safetensors files.

use std::{
    collections::BTreeMap,
    hash::Hasher,
    path::{Path, PathBuf},
    sync::Arc,
};

use larder_core::{RowOrder, TensorMeta, TensorRows, Tensors, TensorsError};
use serde_json::Value;
use twox_hash::XxHash3_64;

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{
        checksum::checksum_of,
        read_at::{ReadAt, read_small},
        safetensors::{Dtype, SafetensorsHeader, TensorEntry, kind_of},
    },
    source::{
        IncomingFiles, MtpTensors, PROCESSORS, SIDECAR_LIMIT, SIDECARS, Source, SourceFile, SourceOptions, TowerForm,
        TowerSource,
        config_json::{self, text_value},
        file_rows::FileRows,
        ignored_note,
        index::{INDEX, SINGLE, not_json, read_map, single_file, weight_map},
        integers::{self, StoredInteger},
        minimax_m3,
        mtp::{is_prediction, is_used, prediction_note, set_mtp, uses_mtp, usual_name},
        set_ignored,
        text_names::{TextNames, is_of_other_inputs, is_of_tower, other_inputs_note, same_tensor},
        tower::{PROCESSOR_LIMIT, TowerPlace, TowerTensor, TowerTensors},
    },
};

const CONFIG_LIMIT: u64 = 16 << 20;

/// An open checkpoint folder.
pub struct Checkpoint {
    path: PathBuf,
    config: Value,
    files: Vec<WeightFile>,
    incoming: Option<Arc<dyn IncomingFiles>>,
    /// Digest of the checksums of the files that are being downloaded.
    published: Option<String>,
    /// By their names in a model of text.
    tensors: BTreeMap<String, TensorLocation>,
    fingerprint: u64,
}

/// A file of weights.
enum WeightFile {
    Local(Arc<ReadAt>),
    /// Not complete: still being downloaded, or partly deleted after conversion.
    Incoming(SourceFile),
}

/// File and offset of a tensor.
struct TensorLocation {
    file: usize,
    /// Its name in the file.
    name: String,
    stored: TensorEntry,
    /// Format and shape, or the name of a dtype that is not supported.
    meta: Result<TensorMeta, String>,
}

impl TensorLocation {
    /// The upper and the lower half of the rows of a matrix; `None` if there are none.
    fn halves(&self) -> Option<[TensorLocation; 2]> {
        let TensorEntry { dtype, start, bytes, .. } = self.stored;
        let [rows, cols] = self.stored.shape[..] else { return None };
        let half = |start: u64| {
            let stored = TensorEntry { dtype, shape: vec![rows / 2, cols], start, bytes: bytes / 2 };
            let meta = meta_of(&stored).ok_or_else(|| format!("{dtype:?}"));
            TensorLocation { file: self.file, name: self.name.clone(), stored, meta }
        };
        (rows.is_multiple_of(2) && bytes.is_multiple_of(2)).then(|| [half(start), half(start + bytes as u64 / 2)])
    }
}

impl Checkpoint {
    /// Opens a folder. Reads its config and all headers, but no data.
    pub fn open(path: &Path) -> Result<Self> {
        Self::load(path, None)
    }

    /// Opens a folder whose small files exist, and whose weight files are still being downloaded.
    pub fn incoming(path: &Path, incoming: Arc<dyn IncomingFiles>) -> Result<Self> {
        Self::load(path, Some(incoming))
    }

    /// The weight files that the folder at `path` needs, out of the files `listed` that can be downloaded.
    pub fn weight_files(path: &Path, listed: &[&str]) -> Result<Vec<String>> {
        if listed.contains(&SINGLE) {
            return Ok(vec![SINGLE.to_owned()]);
        }
        let map = read_map(path, |file| listed.contains(&file))?;
        let map = map.ok_or_else(|| StoreError::new(StoreErrorKind::Missing, path, "has no safetensors file"))?;
        let mut files: Vec<String> = map.into_values().collect();
        files.sort_unstable();
        files.dedup();
        Ok(files)
    }

    fn load(path: &Path, incoming: Option<Arc<dyn IncomingFiles>>) -> Result<Self> {
        let mut fingerprint = XxHash3_64::new();
        let config_path = path.join("config.json");
        let config = read_small(&config_path, CONFIG_LIMIT)?
            .ok_or_else(|| StoreError::new(StoreErrorKind::Missing, path, "has no config.json"))?;
        fingerprint.write(&config);
        for name in SIDECARS {
            let bytes = read_small(&path.join(name), SIDECAR_LIMIT)?.unwrap_or_default();
            fingerprint.write(&(bytes.len() as u64).to_le_bytes());
            fingerprint.write(&bytes);
        }
        let config = config_json::parse(&config).map_err(|e| not_json(&config_path, &e))?;
        let map = match &incoming {
            Some(_) => read_map(path, |_| true)?,
            None => weight_map(path)?,
        };
        let (path, files, tensors) = (path.to_owned(), vec![], BTreeMap::new());
        let mut checkpoint = Checkpoint { path, config, files, incoming, published: None, tensors, fingerprint: 0 };
        match map {
            Some(map) => checkpoint.add_indexed(&map, &mut fingerprint)?,
            None if checkpoint.incoming.is_some() => checkpoint.add_file(SINGLE, &mut fingerprint, |_| true)?,
            None => checkpoint.add_file(&single_file(&checkpoint.path)?, &mut fingerprint, |_| true)?,
        }
        checkpoint.take_usual_names()?;
        checkpoint.fingerprint = fingerprint.finish();
        checkpoint.published = checkpoint.incoming.as_deref().map(|i| published(&checkpoint.files, i)).transpose()?;
        Ok(checkpoint)
    }

    /// The same checkpoint with these options.
    pub fn with(mut self, options: &SourceOptions) -> Result<Self> {
        set_ignored(&mut self.config, &options.ignored_keys);
        match options.mtp {
            MtpTensors::LeftOut => Ok(self),
            MtpTensors::Kept => self.with_mtp(),
        }
    }

    /// The same checkpoint, which presents the first layer for multi-token prediction as the layer behind the last.
    fn with_mtp(mut self) -> Result<Self> {
        let layers = self.layers();
        if !self.tensors.keys().any(|name| is_prediction(name, layers)) {
            let what = "has no layer for multi-token prediction";
            return Err(StoreError::new(StoreErrorKind::Missing, &self.path, what));
        }
        self.rename(|name| usual_name(name, layers))?;
        set_mtp(&mut self.config, true);
        Ok(self)
    }

    /// Decoder layers by the config.
    fn layers(&self) -> u64 {
        text_value(&self.config, "num_hidden_layers").as_u64().unwrap_or(u64::MAX)
    }

    /// Gives tensors the names that they have in most models of text, and those of MiniMax-M3 the published ones.
    fn take_usual_names(&mut self) -> Result<()> {
        if let Some(names) = TextNames::of(self.tensors.keys().map(String::as_str)) {
            self.rename(|stored| Some(names.usual(stored)))?;
        }
        if minimax_m3::is_model_type(text_value(&self.config, "model_type")) {
            self.take_apart(minimax_m3::JOINED, minimax_m3::APART);
            self.rename(minimax_m3::published_name)?;
        }
        Ok(())
    }

    /// Presents each matrix whose name ends with `joined` as two of half its rows, with these endings.
    fn take_apart(&mut self, joined: &str, apart: [&str; 2]) {
        for (name, location) in std::mem::take(&mut self.tensors) {
            match (name.strip_suffix(joined), location.halves()) {
                (Some(start), Some(halves)) => {
                    let names = apart.map(|end| format!("{start}{end}"));
                    self.tensors.extend(names.into_iter().zip(halves));
                }
                _ => drop(self.tensors.insert(name, location)),
            }
        }
    }

    /// Gives tensors the names that `usual` has for them, if it has one.
    fn rename(&mut self, usual: impl Fn(&str) -> Option<String>) -> Result<()> {
        for (stored, location) in std::mem::take(&mut self.tensors) {
            let usual = usual(&stored).unwrap_or_else(|| stored.clone());
            if let Some(other) = self.tensors.insert(usual, location) {
                let what = format!("has the tensors '{}' and '{stored}', which are the same one", other.name);
                return Err(StoreError::malformed(&self.path, what));
            }
        }
        Ok(())
    }

    fn add_indexed(&mut self, map: &BTreeMap<String, String>, fingerprint: &mut XxHash3_64) -> Result<()> {
        let mut shards: Vec<&str> = map.values().map(String::as_str).collect();
        shards.sort_unstable();
        shards.dedup();
        for shard in shards {
            self.add_file(shard, fingerprint, |tensor| map.get(tensor).is_some_and(|file| file == shard))?;
        }
        match map.iter().find(|(tensor, _)| !self.tensors.contains_key(*tensor)) {
            Some((tensor, shard)) => {
                let what = format!("lists the tensor '{tensor}' in {shard}, which does not contain it");
                Err(StoreError::new(StoreErrorKind::Mismatch, &self.path.join(INDEX), what))
            }
            None => Ok(()),
        }
    }

    fn add_file(&mut self, name: &str, fingerprint: &mut XxHash3_64, wanted: impl Fn(&str) -> bool) -> Result<()> {
        let path = self.path.join(name);
        let (file, bytes, json) = match &self.incoming {
            Some(incoming) => {
                let (bytes, json) = incoming.header(name)?;
                (WeightFile::Incoming(SourceFile { name: name.to_owned(), bytes }), bytes, json)
            }
            None => {
                let file = ReadAt::open(&path)?;
                let (bytes, json) = (file.len(), SafetensorsHeader::read_json(&file)?);
                (WeightFile::Local(Arc::new(file)), bytes, json)
            }
        };
        fingerprint.write(&bytes.to_le_bytes());
        fingerprint.write(&json);
        for (tensor, entry) in SafetensorsHeader::parse(&path, bytes, &json)?.tensors {
            if wanted(&tensor) {
                let meta = meta_of(&entry).ok_or_else(|| format!("{:?}", entry.dtype));
                let location = TensorLocation { file: self.files.len(), name: tensor.clone(), stored: entry, meta };
                self.tensors.insert(tensor, location);
            }
        }
        self.files.push(file);
        Ok(())
    }
}

impl Checkpoint {
    /// The tensor `name` as it is stored, of any dtype; `None` if there is none.
    pub(super) fn find(&self, name: &str) -> Option<&TensorEntry> {
        self.get(name).map(|location| &location.stored)
    }

    /// The tensor `name` as it is stored, of any dtype, which must exist.
    pub(super) fn stored(&self, name: &str) -> Result<&TensorEntry> {
        self.location(name).map(|location| &location.stored)
    }

    fn location(&self, name: &str) -> Result<&TensorLocation> {
        let missing = || StoreError::new(StoreErrorKind::Missing, &self.path, format!("has no tensor '{name}'"));
        self.get(name).ok_or_else(missing)
    }

    fn read_stored(&self, location: &TensorLocation, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let start = location.stored.start + offset as u64;
        match (&self.files[location.file], &self.incoming) {
            (WeightFile::Local(file), _) => file.read(start, into)?,
            (WeightFile::Incoming(file), incoming) => {
                let incoming = incoming.as_ref().expect("incoming files have a downloader");
                incoming.file(&file.name, start..start + into.len() as u64)?.read(start, into)?;
            }
        }
        Ok(())
    }

    /// Whether there is an image tower that the config describes.
    fn has_tower(&self) -> bool {
        let nests = [&self.config["thinker_config"], &self.config];
        nests.iter().any(|nest| nest["vision_config"].is_object()) && self.tensors.keys().any(|name| is_of_tower(name))
    }

    /// The file about the processor of images, if there is one.
    fn processor(&self) -> Result<Option<Value>> {
        for name in PROCESSORS {
            let path = self.path.join(name);
            if let Some(bytes) = read_small(&path, PROCESSOR_LIMIT)? {
                return serde_json::from_slice(&bytes).map(Some).map_err(|e| not_json(&path, &e));
            }
        }
        Ok(None)
    }

    /// A tensor of the tower; `None` if its dtype is not supported.
    fn tower_tensor(&self, location: &TensorLocation) -> Option<TowerTensor> {
        let (meta, start) = (location.meta.clone().ok()?, location.stored.start);
        let place = match (&self.files[location.file], &self.incoming) {
            (WeightFile::Incoming(file), Some(incoming)) => TowerPlace::Incoming(incoming.clone(), file.name.clone()),
            (file, _) => TowerPlace::Local(file.local()?.clone()),
        };
        (location.stored.dtype != Dtype::I64).then_some(TowerTensor { meta, place, start })
    }

    fn get(&self, name: &str) -> Option<&TensorLocation> {
        let own = self.tensors.get(name);
        own.or_else(|| same_tensor(name).into_iter().find_map(|other| self.tensors.get(&other)))
    }
}

impl Tensors for Checkpoint {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.get(name)?.meta.as_ref().ok()
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        let location = self.location(name)?;
        let read = |offset, into: &mut [u8]| self.read_stored(location, offset, into);
        match location.stored.dtype {
            Dtype::I64 => integers::read(StoredInteger::I64, offset, into, read),
            _ => read(offset, into),
        }
    }

    fn rows(&self, name: &str) -> Option<Arc<dyn TensorRows>> {
        let location = self.get(name).filter(|location| kind_of(location.stored.dtype).is_some())?;
        let file = self.files[location.file].local()?.clone();
        FileRows::open(location.meta.clone().ok()?, file, location.stored.start)
    }
}

impl Source for Checkpoint {
    fn config(&self) -> &Value {
        &self.config
    }

    fn names(&self) -> Vec<&str> {
        self.tensors.keys().map(String::as_str).collect()
    }

    fn unsupported_dtype(&self, name: &str) -> Option<&str> {
        self.get(name)?.meta.as_ref().err().map(String::as_str)
    }

    fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>> {
        read_small(&self.path.join(name), SIDECAR_LIMIT)
    }

    fn tower(&self) -> Result<Option<TowerSource>> {
        if !self.has_tower() {
            return Ok(None);
        }
        let form = TowerForm::Checkpoint { config: self.config.clone(), processor: self.processor()? };
        let of_tower = self.tensors.iter().filter(|(name, _)| is_of_tower(name));
        let tensors = of_tower.filter_map(|(name, location)| Some((name.clone(), self.tower_tensor(location)?)));
        TowerTensors(tensors.collect()).into_source(&self.path, form).map(Some)
    }

    fn notes(&self) -> Vec<String> {
        let (layers, used) = (self.layers(), uses_mtp(&self.config));
        let count = |wanted: &dyn Fn(&str) -> bool| self.tensors.keys().filter(|name| wanted(name)).count();
        let sees = self.has_tower();
        let others = count(&|name| is_of_other_inputs(name) && !(sees && is_of_tower(name)));
        let other_inputs = other_inputs_note(others, sees);
        let unused = count(&|name| is_prediction(name, layers) && !(used && is_used(name, layers)));
        let ignored = ignored_note(&self.config);
        other_inputs.into_iter().chain(prediction_note(unused)).chain(ignored).collect()
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn use_direct_io(&self) {
        self.files.iter().filter_map(WeightFile::local).for_each(|file| file.use_direct_io());
    }

    fn download_rank(&self, name: &str) -> Option<usize> {
        let location = self.get(name)?;
        matches!(self.files[location.file], WeightFile::Incoming(_)).then_some(location.file)
    }

    fn samples(&self, name: &str) -> Result<Option<String>> {
        let location = self.location(name)?;
        match (&self.files[location.file], &self.incoming) {
            (WeightFile::Incoming(file), Some(incoming)) => incoming.sampled(&file.name, &location.name).map(Some),
            _ => Ok(None),
        }
    }

    fn published(&self) -> Option<String> {
        self.published.clone()
    }

    fn release(&self, name: &str, offset: usize, bytes: usize) -> Result<()> {
        let location = self.location(name)?;
        let (offset, bytes) = match location.stored.dtype {
            Dtype::I64 => integers::stored_range(StoredInteger::I64, offset, bytes),
            _ => (offset, bytes),
        };
        let start = location.stored.start + offset as u64;
        match (&self.files[location.file], &self.incoming) {
            (WeightFile::Incoming(file), Some(incoming)) => incoming.release(&file.name, start..start + bytes as u64),
            _ => Ok(()),
        }
    }

    fn files(&self) -> Vec<SourceFile> {
        self.files.iter().map(WeightFile::described).collect()
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }
}

impl WeightFile {
    fn local(&self) -> Option<&Arc<ReadAt>> {
        match self {
            WeightFile::Local(file) => Some(file),
            WeightFile::Incoming(_) => None,
        }
    }

    fn described(&self) -> SourceFile {
        match self {
            WeightFile::Local(file) => SourceFile::of(file),
            WeightFile::Incoming(file) => file.clone(),
        }
    }
}

/// Format and shape in which a stored tensor is presented; `None` if its dtype is not supported.
fn meta_of(entry: &TensorEntry) -> Option<TensorMeta> {
    if entry.dtype == Dtype::I64 {
        return integers::meta(&entry.shape);
    }
    let (kind, shape) = (kind_of(entry.dtype)?, entry.shape.clone());
    Some(TensorMeta { kind, order: RowOrder::Plain, shape, bytes: entry.bytes })
}

/// Digest of the names and checksums under which `files` are published.
fn published(files: &[WeightFile], incoming: &dyn IncomingFiles) -> Result<String> {
    let names = files.iter().map(|file| file.described().name);
    let all = names.map(|name| Ok((incoming.checksum(&name)?, name))).collect::<Result<Vec<_>>>()?;
    Ok(checksum_of(&serde_json::to_vec(&all).expect("text serializes as JSON")))
}

#[cfg(test)]
mod tests;
