//! Opens a finished store.

pub(crate) mod added;
pub(crate) mod sidecars;
pub(crate) mod tower;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use larder_core::{Blueprint, ExpertId, ExpertLayout, LayerIdx, TensorMeta, TensorRows, Tensors, TensorsError};
use serde_json::Value;

use crate::{
    check_reads::{CheckReads, ReadChecks},
    drives::{
        DriveLog, Drives,
        presence::StorePresence,
        second_folder::{Division, SecondFolder, shards_digest},
    },
    error::{Result, StoreError, StoreErrorKind},
    expert_source::ExpertSource,
    files::{checksum::checksum_of, read_at::read_small},
    manifest::{Manifest, RESIDENT_FILE},
    reader::ShardFiles,
    resident::{ResidentTensors, check_resident},
    row_table::RowTable,
    shard::{EXPERTS, SMALL_EXPERTS, Shard, set::ShardSet},
    source::{
        MtpTensors, SIDECAR_LIMIT, Source, SourceFile, TowerSource, ignored_keys, ignored_note, set_ignored, set_mtp,
    },
    store::tower::open_tower,
};

/// An open store: resident tensors by name, experts by layer and id.
pub struct Store {
    path: PathBuf,
    manifest: Manifest,
    /// The manifest on disk, if the store was opened without some layer.
    whole: Option<Box<Manifest>>,
    hash: String,
    experts: ShardSet,
    small_experts: Option<ShardSet>,
    second: Option<SecondFolder>,
    log: Arc<DriveLog>,
    presence: Arc<StorePresence>,
    resident: ResidentTensors,
    /// Row tables by the name of their tensor.
    tables: BTreeMap<String, Arc<RowTable>>,
}

impl Store {
    /// Opens the store in the folder `path`. Every file must exist with the right length; data are checked when they
    /// are read.
    pub fn open(path: &Path) -> Result<Self> {
        let store = Store::open_partial(path)?;
        store.require_all()?;
        Ok(store)
    }

    /// Opens a store in which shards may be missing, as on a worker that holds only some experts.
    pub fn open_partial(path: &Path) -> Result<Self> {
        let (manifest, hash) = Manifest::read(path)?;
        let resident_path = path.join(RESIDENT_FILE);
        let (resident, found) = ResidentTensors::open(&resident_path)?;
        if found != manifest.resident {
            let what = "does not match the manifest: its header or length differs";
            return Err(StoreError::new(StoreErrorKind::Mismatch, &resident_path, what));
        }
        let second = second_folder(path, &manifest)?;
        let usable = second.as_ref().filter(|second| second.fault.is_none()).map(|second| second.folder.as_path());
        let mut experts = ShardSet::open(path, usable, EXPERTS, &manifest.experts, &manifest.geometry)?;
        let small = manifest.small_experts.as_ref();
        let small = small.map(|files| ShardSet::open(path, usable, SMALL_EXPERTS, files, &manifest.geometry));
        let mut small_experts = small.transpose()?;
        let (checks, log) = (Arc::new(ReadChecks::new()), Arc::<DriveLog>::default());
        [Some(&mut experts), small_experts.as_mut()].into_iter().flatten().for_each(|set| set.share_checks(&checks));
        let digest = shards_digest(&manifest);
        let presence = Arc::new(StorePresence::new(experts.roots(), &hash, &digest, checks, log.clone()));
        let mut tables = BTreeMap::new();
        for table in &manifest.tables {
            if resident.meta(&table.name).is_some() {
                let what = format!("lists '{}' as a table, which {RESIDENT_FILE} holds too", table.name);
                return Err(StoreError::new(StoreErrorKind::Mismatch, path, what));
            }
            let mut opened = RowTable::open(path, table)?;
            opened.watch(&presence);
            tables.insert(table.name.clone(), Arc::new(opened));
        }
        let path = path.to_owned();
        let store = Store {
            path,
            manifest,
            whole: None,
            hash,
            experts,
            small_experts,
            second,
            log,
            presence,
            resident,
            tables,
        };
        Ok(store)
    }

    /// The same store as it would be without its layer for multi-token prediction, if it has one: sizes and config are
    /// those of the other layers.
    pub fn without_mtp(mut self) -> Self {
        if self.manifest.mtp() == MtpTensors::Kept {
            self.whole = Some(Box::new(self.manifest.clone()));
            let geometry = &mut self.manifest.geometry;
            geometry.layers = geometry.layers.saturating_sub(1);
            let layers = geometry.layers;
            geometry.moe_layers.retain(|layer| layer.index() < layers);
            set_mtp(&mut self.manifest.config, false);
        }
        self
    }

    /// The same store, which also ignores these keys of its config.
    pub fn ignoring(mut self, keys: &[String]) -> Self {
        if keys.is_empty() {
            return self;
        }
        let mut all = ignored_keys(&self.manifest.config);
        all.extend(keys.iter().filter(|key| !all.contains(key)).cloned().collect::<Vec<_>>());
        self.whole.get_or_insert_with(|| Box::new(self.manifest.clone()));
        set_ignored(&mut self.manifest.config, &all);
        self
    }

    /// The manifest on disk, also with a layer that the store was opened without.
    pub fn stored_manifest(&self) -> &Manifest {
        self.whole.as_deref().unwrap_or(&self.manifest)
    }

    /// The second folder of the store, if it has one.
    pub fn second_folder(&self) -> Option<&SecondFolder> {
        self.second.as_ref()
    }

    /// The folders that shards are read from, each on its drive.
    pub fn drive_folders(&self) -> &[PathBuf] {
        self.experts.roots()
    }

    /// Bytes read from each drive, and notes about drives.
    pub fn drive_log(&self) -> &Arc<DriveLog> {
        &self.log
    }

    /// Fails with a sentence while a drive is away without which experts cannot be read, or holds another store now.
    /// Takes no time unless a read has failed.
    pub fn require_drives(&self) -> Result<()> {
        let found = (0..self.experts.roots().len()).map(|root| self.presence.generation(root).map(drop));
        let is_mirrored = self.second.as_ref().is_some_and(|second| second.division == Division::Mirror);
        if is_mirrored && found.len() > 1 { found.reduce(Result::or).unwrap_or(Ok(())) } else { found.collect() }
    }

    /// A sentence for each reason why some shards are read from one drive only, although the store has a mirror.
    pub fn drive_notes(&self) -> Vec<String> {
        let mirror = self.second.iter().filter(|second| second.division == Division::Mirror);
        let mut notes = Vec::new();
        for SecondFolder { fault, .. } in mirror {
            if let Some(fault) = fault {
                notes.push(format!("the second copy of the experts is not used: {fault}"));
                continue;
            }
            for (root, folder) in self.experts.roots().iter().enumerate() {
                let (all, held) = (self.experts.held().len(), self.experts.held());
                let lacking = held.iter().filter(|held| **held & (1 << root) == 0).count();
                if lacking > 0 {
                    let folder = folder.display();
                    notes.push(format!(
                        "{folder} lacks {lacking} of {all} experts; `larder convert` with --also copies them"
                    ));
                }
            }
        }
        notes
    }

    /// Whether the shard of an expert exists.
    pub fn has(&self, layer: LayerIdx, expert: ExpertId) -> bool {
        self.experts.has(layer, expert)
    }

    /// Checks that no shard is missing.
    pub fn require_all(&self) -> Result<()> {
        self.experts.require_all()?;
        self.small_experts.as_ref().map_or(Ok(()), ShardSet::require_all)
    }

    /// The manifest of the store.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Identifies the whole content of the store: the manifest's checksum over itself, which covers the checksums of
    /// all files.
    pub fn hash(&self) -> &str {
        &self.hash
    }

    /// The shards of the smaller copies of all experts, if the store has them.
    pub fn small_shards(&self) -> Option<&ShardSet> {
        self.small_experts.as_ref()
    }

    /// The second, smaller copies of all experts, if the store has them.
    pub fn small_experts(&self) -> Option<&dyn ExpertSource> {
        self.small_experts.as_ref().map(|set| set as &dyn ExpertSource)
    }

    /// The matrix `name` as rows that are read one by one, if it is stored so.
    pub fn row_table(&self, name: &str) -> Option<&Arc<RowTable>> {
        self.tables.get(name)
    }

    /// Checks that the store holds the model that `blueprint` describes.
    pub fn check(&self, blueprint: &Blueprint) -> Result<()> {
        if self.manifest.geometry != blueprint.geometry {
            let what = format!("holds {:?}, but its config describes {:?}", self.manifest.geometry, blueprint.geometry);
            return Err(StoreError::new(StoreErrorKind::Mismatch, &self.path, what));
        }
        self.check_tensors(blueprint)
    }

    /// Checks that the store holds the tensors that `blueprint` describes.
    pub(crate) fn check_tensors(&self, blueprint: &Blueprint) -> Result<()> {
        if self.experts.has_gates() != blueprint.experts.matrices.gate.is_some() {
            let what = "holds experts with another number of matrices than its config describes";
            return Err(StoreError::new(StoreErrorKind::Mismatch, &self.path, what));
        }
        check_resident(self, blueprint)
    }

    /// Which reads of experts and of row tables are checked from now on; all by default. Resident tensors are read
    /// once, and always checked.
    pub fn set_check_reads(&self, checks: CheckReads) {
        self.presence.checks().set(checks);
    }

    /// Checks an expert's data, if they are to be checked, and the header of its shard the first time it is called for
    /// the expert in a run.
    pub fn check_expert(&self, layer: LayerIdx, expert: ExpertId, data: &[u8]) -> Result<()> {
        self.experts.check_expert(layer, expert, data)
    }

    /// As [`check_expert`](Self::check_expert) for one segment, given with all data of the expert.
    pub fn check_part(&self, layer: LayerIdx, expert: ExpertId, part: usize, data: &[u8]) -> Result<()> {
        self.experts.check_part(layer, expert, part, data)
    }

    /// As [`check_expert`](Self::check_expert) for one segment of an expert (see [`ExpertLayout::segments`]).
    pub fn check_segment(&self, layer: LayerIdx, expert: ExpertId, segment: usize, bytes: &[u8]) -> Result<()> {
        self.experts.check_segment(layer, expert, segment, bytes)
    }

    /// The shards of all experts, layer by layer, and then those of their smaller copies, for a reader; on two drives
    /// if the store has a second folder.
    pub fn shard_files(&self) -> Result<ShardFiles> {
        let sets = || std::iter::once(&self.experts).chain(&self.small_experts);
        let roots = self.experts.roots();
        let of = |root, set: &ShardSet| -> Vec<_> {
            set.shards().map(|shard| (set.path_on(root, &shard), shard.file_bytes as u64)).collect()
        };
        let files: Vec<_> = (0..roots.len()).flat_map(|root| sets().flat_map(move |set| of(root, set))).collect();
        let held = sets().flat_map(|set| set.held().iter().copied()).collect();
        let drives = Drives::new(roots.to_vec(), held, self.log.clone());
        Ok(ShardFiles::on_drives(drives, move |file| files[file].clone())?.watched(self.presence.clone()))
    }

    /// The path of every shard, layer by layer, on the first drive that has it.
    pub fn shard_paths(&self) -> Vec<PathBuf> {
        self.experts.shards().map(|s: Shard| self.experts.path(&s)).collect()
    }
}

/// The second folder of a store, which must be usable if half of the experts are in it.
fn second_folder(store: &Path, manifest: &Manifest) -> Result<Option<SecondFolder>> {
    match SecondFolder::of(store, manifest)? {
        Some(SecondFolder { division: Division::Stripe, fault: Some(fault), .. }) => {
            let what = format!(
                "{}; half of the experts are there: connect its drive, or name the folder where it is now with `larder convert {} \
                 {} --stripe FOLDER`",
                fault.message,
                store.display(),
                store.display()
            );
            Err(StoreError { message: what, ..fault })
        }
        second => Ok(second),
    }
}

impl ExpertSource for Store {
    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        self.experts.layout(layer)
    }

    fn read_expert(&self, layer: LayerIdx, expert: ExpertId, into: &mut [u8]) -> Result<()> {
        self.experts.read_expert(layer, expert, into)
    }
}

impl Tensors for Store {
    fn meta(&self, name: &str) -> Option<&TensorMeta> {
        self.resident.meta(name).or_else(|| self.tables.get(name).map(|table| table.meta()))
    }

    fn rows(&self, name: &str) -> Option<Arc<dyn TensorRows>> {
        self.tables.get(name).map(|table| table.clone() as Arc<dyn TensorRows>)
    }

    fn read(&self, name: &str, offset: usize, into: &mut [u8]) -> Result<(), TensorsError> {
        match self.tables.get(name) {
            Some(table) => Ok(table.read(offset, into)?),
            None => self.resident.read(name, offset, into),
        }
    }
}

impl Source for Store {
    fn config(&self) -> &Value {
        &self.manifest.config
    }

    fn names(&self) -> Vec<&str> {
        self.resident.names().into_iter().chain(self.tables.keys().map(String::as_str)).collect()
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

    fn tower(&self) -> Result<Option<TowerSource>> {
        open_tower(&self.path, &self.hash)
    }

    fn notes(&self) -> Vec<String> {
        ignored_note(&self.manifest.config).into_iter().collect()
    }

    fn path(&self) -> &Path {
        &self.path
    }

    fn files(&self) -> Vec<SourceFile> {
        vec![SourceFile { name: RESIDENT_FILE.to_owned(), bytes: self.manifest.resident.bytes }]
    }

    fn fingerprint(&self) -> u64 {
        twox_hash::XxHash3_64::oneshot(self.hash.as_bytes())
    }

    /// Applies to the resident weights, which are read once.
    fn use_direct_io(&self) {
        self.resident.use_direct_io();
    }
}

#[cfg(test)]
mod tests;
