//! Opens a finished store.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use larder_core::{Blueprint, ExpertId, ExpertLayout, LayerIdx, TensorMeta, Tensors, TensorsError};
use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    expert_source::ExpertSource,
    file::{ReadAt, read_small},
    manifest::{Manifest, RESIDENT_FILE},
    resident::{ResidentTensors, check_resident},
    shard::{DATA_START, Shard, checksum_of, shard_path},
    source::{SIDECAR_LIMIT, Source, SourceFile},
};

/// An open store: resident tensors by name, experts by layer and id.
pub struct Store {
    path: PathBuf,
    manifest: Manifest,
    layouts: BTreeMap<LayerIdx, ExpertLayout>,
    resident: ResidentTensors,
    /// Per shard, layer by layer: whether header and checksum were verified in this run.
    checked: Vec<AtomicBool>,
    /// Shards that do not exist.
    missing: BTreeSet<(LayerIdx, ExpertId)>,
    fingerprint: u64,
}

impl Store {
    /// Opens the store in the folder `path`. Every file must exist with the right length; data are checked when they
    /// are first read.
    pub fn open(path: &Path) -> Result<Self> {
        let store = Store::open_partial(path)?;
        store.require_all()?;
        Ok(store)
    }

    /// Opens a store in which shards may be missing, as on a worker that holds only some experts.
    pub fn open_partial(path: &Path) -> Result<Self> {
        let (manifest, bytes) = Manifest::read(path)?;
        let resident_path = path.join(RESIDENT_FILE);
        let (resident, found) = ResidentTensors::open(&resident_path)?;
        if found != manifest.resident {
            let what = "does not match the manifest: its header or length differs";
            return Err(StoreError::new(StoreErrorKind::Mismatch, &resident_path, what));
        }
        let layouts = manifest.layouts().map_err(|what| StoreError::malformed(path, what))?;
        let checked = (0..manifest.geometry.expert_count()).map(|_| AtomicBool::new(false)).collect();
        let fingerprint = xxh3_64(&bytes);
        let missing = BTreeSet::new();
        let mut store = Store { path: path.to_owned(), manifest, layouts, resident, checked, missing, fingerprint };
        let missing = |shard: Shard| {
            let path = store.shard_path(&shard);
            match shard.open(&path) {
                Err(_) if !path.exists() => Some(Ok((shard.layer, shard.expert))),
                opened => opened.err().map(Err),
            }
        };
        store.missing = store.shards().filter_map(missing).collect::<Result<_>>()?;
        Ok(store)
    }

    /// Whether the shard of an expert exists.
    pub fn has(&self, layer: LayerIdx, expert: ExpertId) -> bool {
        self.layouts.contains_key(&layer) && !self.missing.contains(&(layer, expert))
    }

    /// Checks that no shard is missing.
    pub fn require_all(&self) -> Result<()> {
        match self.missing.first() {
            Some((layer, expert)) => {
                let shard = self.shard(*layer, *expert);
                shard.open(&self.shard_path(&shard)).map(drop)
            }
            None => Ok(()),
        }
    }

    /// The manifest of the store.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Checks that the store holds the model that `blueprint` describes.
    pub fn check(&self, blueprint: &Blueprint) -> Result<()> {
        if self.manifest.geometry != blueprint.geometry {
            let what = format!("holds {:?}, but its config describes {:?}", self.manifest.geometry, blueprint.geometry);
            return Err(StoreError::new(StoreErrorKind::Mismatch, &self.path, what));
        }
        check_resident(self, blueprint)
    }

    /// Checks an expert's data and the header of its shard, the first time it is called for the expert in a run.
    pub fn check_expert(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<()> {
        let (checksum, checked) = self.record(layer, expert);
        if checked.load(Ordering::Relaxed) {
            return Ok(());
        }
        let shard = self.shard(layer, expert);
        let path = self.shard_path(&shard);
        shard.check_header(&shard.open(&path)?, checksum)?;
        shard.check_data(&path, data, checksum)?;
        checked.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The file of every expert, layer by layer, and their common length in bytes.
    pub fn shard_files(&self) -> (Vec<PathBuf>, u64) {
        (self.shards().map(|s| self.shard_path(&s)).collect(), self.manifest.experts.file_bytes as u64)
    }

    /// All shards, layer by layer.
    pub(crate) fn shards(&self) -> impl Iterator<Item = Shard<'_>> {
        let experts = self.manifest.geometry.experts;
        self.layouts.keys().flat_map(move |layer| (0..experts).map(|e| self.shard(*layer, ExpertId(e as u16))))
    }

    pub(crate) fn shard_path(&self, shard: &Shard) -> PathBuf {
        self.path.join(shard_path(shard.layer, shard.expert))
    }

    fn shard(&self, layer: LayerIdx, expert: ExpertId) -> Shard<'_> {
        Shard { layer, expert, layout: self.layout(layer), file_bytes: self.manifest.experts.file_bytes }
    }

    /// The checksum of a shard, and whether it was verified.
    fn record(&self, layer: LayerIdx, expert: ExpertId) -> (&str, &AtomicBool) {
        let row = self.layouts.range(..layer).count();
        let checksum = &self.manifest.experts.checksums[row][expert.index()];
        (checksum, &self.checked[row * self.manifest.geometry.experts + expert.index()])
    }
}

impl ExpertSource for Store {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        &self.layouts[&layer]
    }

    fn read_expert(&self, layer: LayerIdx, expert: ExpertId, into: &mut [u8]) -> Result<()> {
        let shard = self.shard(layer, expert);
        assert_eq!(into.len(), shard.layout.bytes, "the buffer must have the layout's length");
        let file: ReadAt = shard.open(&self.shard_path(&shard))?;
        file.read(DATA_START as u64, into)?;
        self.check_expert(layer, expert, into)
    }
}

impl Tensors for Store {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.resident.meta(name)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        self.resident.read(name, offset, into)
    }
}

impl Source for Store {
    fn config(&self) -> &Value {
        &self.manifest.config
    }

    fn names(&self) -> Vec<&str> {
        self.resident.names()
    }

    fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let Some(listed) = self.manifest.sidecars.iter().find(|s| s.name == name) else { return Ok(None) };
        let path = self.path.join(name);
        let bytes = read_small(&path, SIDECAR_LIMIT)?;
        let bytes = bytes
            .ok_or_else(|| StoreError::new(StoreErrorKind::Missing, &path, "is listed in the manifest, but missing"))?;
        if checksum_of(&bytes) != listed.checksum {
            return Err(StoreError::new(StoreErrorKind::Mismatch, &path, "does not match its checksum"));
        }
        Ok(Some(bytes))
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn files(&self) -> Vec<SourceFile> {
        vec![SourceFile { name: RESIDENT_FILE.to_owned(), bytes: self.manifest.resident.bytes }]
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn advise_will_need(&self) {
        self.resident.advise_will_need();
    }
}

#[cfg(test)]
mod tests;
