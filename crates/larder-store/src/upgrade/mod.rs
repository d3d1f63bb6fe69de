//! Upgrades a store of format 1 to the current format, in place.
//!
//! The data of the shards stay where they are: behind them the padding grows or shrinks, and before them the header is
//! written again. All data are checked before anything is changed. The manifest of format 1 stays until every shard is
//! durable, and what is written depends only on it and on the data; so an interrupted upgrade is simply done again.

use std::{fs, fs::OpenOptions, path::Path};

use larder_os::{FileAt, open_regular_with};

use crate::{
    atomic_file::{sync_folder, write_atomically},
    convert::{Progress, check_space, lock},
    error::{Result, StoreError},
    file::ReadAt,
    manifest::{ExpertChecksums, ExpertClass, ExpertFiles, FORMAT_VERSION, MANIFEST_FILE, Manifest, seal_path},
    parallel::parallel,
    shard::{DATA_START, EXPERTS, Shard},
    shard_set::ShardSet,
    sidecars::reseal,
};

/// Name of the file that marks an unfinished upgrade.
pub const UPGRADE_STATE: &str = "upgrade.json";

/// Threads that each handle one shard at a time.
const THREADS: usize = 2;

/// Result of an upgrade.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UpgradeReport {
    /// Store format before the upgrade.
    pub from: u64,
    /// Store format now.
    pub to: u64,
    /// Number of shards that were upgraded; 0 if the store had the current format.
    pub shards: usize,
    /// Bytes of all shards before and after.
    pub bytes: [u64; 2],
}

/// Upgrades the store in the folder `store` to the current format, or resumes an earlier attempt.
///
/// Changes nothing if a shard is missing or damaged, or if the file system has no room. The embedding stays with the
/// resident weights: only a new conversion makes a row table of it.
pub fn upgrade(store: &Path, progress: &dyn Progress) -> Result<UpgradeReport> {
    let _lock = lock(store)?;
    let (manifest, hash) = Manifest::read_any(store)?;
    let before = manifest.experts.total_bytes().unwrap_or_default();
    let from = manifest.format;
    let mut report = UpgradeReport { from, to: FORMAT_VERSION, shards: 0, bytes: [before; 2] };
    if from < FORMAT_VERSION {
        let upgrade = Upgrade::of(store, &manifest)?;
        check_space(store, &upgrade.files())?;
        let experts = upgrade.experts(&manifest, progress)?;
        report.shards = manifest.geometry.expert_count();
        report.bytes[1] = experts.total_bytes().unwrap_or_default();
        upgrade.write(store, &hash, &Manifest { format: FORMAT_VERSION, experts, ..manifest })?;
    }
    // The new manifest carries its checksum in itself.
    for done in [seal_path(&store.join(MANIFEST_FILE)), store.join(UPGRADE_STATE)] {
        if done.exists() {
            fs::remove_file(&done).map_err(|e| StoreError::io(&done, "removing", e))?;
            sync_folder(store)?;
        }
    }
    Ok(report)
}

struct Upgrade {
    /// The shards as the manifest of format 1 describes them.
    set: ShardSet,
    /// The class of each MoE row in the current format.
    classes: Vec<ExpertClass>,
    /// Experts per MoE layer.
    experts: usize,
}

impl Upgrade {
    fn of(store: &Path, manifest: &Manifest) -> Result<Self> {
        let (files, geometry) = (&manifest.experts, &manifest.geometry);
        let set = ShardSet::listed(store, EXPERTS, files, geometry)?;
        let layouts = files.layouts(geometry).map_err(|what| StoreError::malformed(store, what))?;
        let too_large = || StoreError::malformed(store, "has experts that are too large to address");
        let classes = layouts.values().map(ExpertClass::of).collect::<Option<_>>().ok_or_else(too_large)?;
        Ok(Upgrade { set, classes, experts: geometry.experts })
    }

    /// Every shard with the length that it will have, layer by layer.
    fn shards(&self) -> impl Iterator<Item = Shard<'_>> {
        let file_bytes = |i: usize| self.classes[i / self.experts].file_bytes;
        self.set.shards().enumerate().map(move |(i, shard)| Shard { file_bytes: file_bytes(i), ..shard })
    }

    /// Path and future length of every shard.
    fn files(&self) -> Vec<(std::path::PathBuf, u64)> {
        self.shards().map(|shard| (self.set.path(&shard), shard.file_bytes as u64)).collect()
    }

    /// Compares all data with the checksums of format 1 and computes those of the segments.
    fn experts(&self, manifest: &Manifest, progress: &dyn Progress) -> Result<ExpertFiles> {
        let shards: Vec<_> = self.set.shards_with_checksums().collect();
        progress.begin(shards.iter().map(|(shard, _)| shard.layout.bytes as u64).sum());
        let checksums = parallel(THREADS, shards.len(), Vec::new, |data, i| {
            let (shard, whole) = &shards[i];
            let path = self.set.path(shard);
            // The shard has its old length, or its new one if an upgrade was interrupted.
            let file = ReadAt::open(&path)?;
            if file.len() < (DATA_START + shard.layout.bytes) as u64 {
                return Err(StoreError::malformed(
                    &path,
                    format!("is {} bytes long, too short for {shard}", file.len()),
                ));
            }
            data.resize(shard.layout.bytes, 0);
            file.use_direct_io();
            file.read(DATA_START as u64, data)?;
            shard.check_data(&path, data, whole)?;
            progress.advance(data.len() as u64);
            Ok(ExpertChecksums::of_segments(shard.layout, data))
        })?;
        let checksums = checksums.chunks(self.experts).map(<[_]>::to_vec).collect();
        let mut files = ExpertFiles { classes: vec![], layers: vec![], checksums, ..manifest.experts.clone() };
        for class in &self.classes {
            let known = files.classes.iter().position(|known| known == class);
            files.layers.push(known.unwrap_or(files.classes.len()));
            if known.is_none() {
                files.classes.push(*class);
            }
        }
        Ok(files)
    }

    /// Writes headers and padding of all shards, the seals of sidecars that belong to the store by its hash `before`, and then
    /// the manifest.
    fn write(&self, store: &Path, before: &str, manifest: &Manifest) -> Result<()> {
        write_atomically(&store.join(UPGRADE_STATE), b"{}\n")?;
        sync_folder(store)?;
        let shards: Vec<_> = self.shards().zip(manifest.experts.checksums.iter().flatten()).collect();
        parallel(
            THREADS,
            shards.len(),
            || (),
            |(), i| {
                let (shard, checksums) = &shards[i];
                write_around(&self.set.path(shard), shard, &shard.header(checksums))
            },
        )?;
        let bytes = manifest.to_bytes();
        reseal(store, before, &Manifest::hash_of(&bytes))?;
        write_atomically(&store.join(MANIFEST_FILE), &bytes)?;
        sync_folder(store)
    }
}

/// Writes the header of a shard and sets its length, with zeros behind the data, and makes both durable.
fn write_around(path: &Path, shard: &Shard, header: &[u8]) -> Result<()> {
    let failed = |e| StoreError::io(path, "writing", e);
    let file = open_regular_with(OpenOptions::new().write(true), path).map_err(failed)?;
    file.set_len((DATA_START + shard.layout.bytes) as u64).map_err(failed)?;
    file.set_len(shard.file_bytes as u64).map_err(failed)?;
    file.write_all_at(header, 0).map_err(failed)?;
    file.sync_all().map_err(failed)
}

#[cfg(test)]
mod tests;
