//! Verification: checks every byte of a store.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
};

use larder_core::ExpertId;

use crate::{
    convert::Progress,
    error::{Result, StoreError, StoreErrorKind},
    file::read_small,
    manifest::{ExpertChecksums, ExpertFiles, MANIFEST_FILE, Manifest, RESIDENT_FILE, Seal, seal_path},
    parallel::parallel,
    resident::ResidentTensors,
    row_table::{RowTable, TABLES, TableFile},
    shard::{DATA_START, EXPERTS, SMALL_EXPERTS, Shard, checksum_of, layer_folder, shard_path_in},
    shard_set::ShardSet,
    sidecars::{self, ADDED_SIDECARS},
};

/// Largest number of problems and of unknown files that are listed; further problems are only counted.
const LISTED: usize = 100;
const THREADS: usize = 2;
/// A file that a store may have without listing it in the manifest.
const SETTINGS: &str = "larder.toml";
/// A file that runs may write into a finished store: which experts they used most. It is a hint and no part of the store.
pub const HOT_EXPERTS: &str = "hot-experts";

/// Result of a verification.
#[derive(Debug, Default)]
pub struct VerifyReport {
    /// Number of files that were checked.
    pub files: usize,
    /// Bytes that were checked.
    pub bytes: u64,
    /// The first 100 problems.
    pub problems: Vec<StoreError>,
    /// Number of problems.
    pub problem_count: usize,
    /// The first 100 files that do not belong to the store.
    pub unknown: Vec<PathBuf>,
    /// Whether changes of the manifest itself would go unnoticed: format 1 has no checksum in it, and this store none beside it.
    pub manifest_unchecked: bool,
}

impl VerifyReport {
    /// Whether no problem was found.
    pub fn is_good(&self) -> bool {
        self.problem_count == 0
    }

    fn note(&mut self, bytes: u64, outcome: Result<()>) {
        self.files += 1;
        self.bytes += bytes;
        if let Err(problem) = outcome {
            self.problem_count += 1;
            if self.problems.len() < LISTED {
                self.problems.push(problem);
            }
        }
    }
}

/// Checks every file of the store at `path`: existence, length, header and checksum.
///
/// Fails only if there is no valid manifest; all other problems are in the report.
pub fn verify(path: &Path, progress: &dyn Progress) -> Result<VerifyReport> {
    let (manifest, hash) = Manifest::read(path)?;
    let sets = expert_files(&manifest).map(|(name, files)| ShardSet::listed(path, name, files, &manifest.geometry));
    let sets = sets.collect::<Result<Vec<_>>>()?;
    let shards = sets.iter().flat_map(|set| set.shards_with_checksums().map(move |(shard, sums)| (set, shard, sums)));
    let shards: Vec<(&ShardSet, Shard, &ExpertChecksums)> = shards.collect();
    progress.begin(store_bytes(&manifest));
    let report = Mutex::new(VerifyReport::default());
    let note = |bytes, outcome| report.lock().expect("no thread panics while it holds the lock").note(bytes, outcome);
    note(manifest.resident.bytes, check_resident(path, &manifest, progress));
    for table in &manifest.tables {
        note(table.file_bytes() as u64, check_table(path, table, progress));
    }
    for sidecar in &manifest.sidecars {
        note(sidecar.bytes, check_sidecar(&path.join(&sidecar.name), sidecar.bytes, &sidecar.checksum));
    }
    for name in ADDED_SIDECARS {
        match sidecars::check(path, &hash, name) {
            Ok(None) => {}
            Ok(Some(bytes)) => note(bytes, Ok(())),
            Err(problem) => note(0, Err(problem)),
        }
    }
    parallel(THREADS, shards.len(), Vec::new, |data, i| {
        let (set, shard, checksums) = &shards[i];
        let file_bytes = shard.file_bytes as u64;
        note(file_bytes, check_shard(&set.path(shard), shard, checksums, data));
        progress.advance(file_bytes);
        Ok(())
    })?;
    let mut report = report.into_inner().expect("no thread panicked while it held the lock");
    report.problems.sort_by(|a, b| a.path.cmp(&b.path));
    report.unknown = unknown_files(path, &manifest);
    report.manifest_unchecked = manifest.format < 2 && Seal::read(&path.join(MANIFEST_FILE))?.is_none();
    Ok(report)
}

/// The sets of shards of a store, by the name of their folder.
fn expert_files(manifest: &Manifest) -> impl Iterator<Item = (&'static str, &ExpertFiles)> {
    let small = manifest.small_experts.iter().map(|files| (SMALL_EXPERTS, files));
    std::iter::once((EXPERTS, &manifest.experts)).chain(small)
}

/// Bytes of all files that a verification reads, without sidecars.
fn store_bytes(manifest: &Manifest) -> u64 {
    let shards = expert_files(manifest).filter_map(|(_, files)| files.total_bytes());
    let tables = manifest.tables.iter().map(|table| table.file_bytes() as u64);
    shards.chain(tables).fold(manifest.resident.bytes, u64::saturating_add)
}

fn check_shard(path: &Path, shard: &Shard, checksums: &ExpertChecksums, data: &mut Vec<u8>) -> Result<()> {
    let file = shard.open(path)?;
    file.use_direct_io();
    shard.check_header(&file, checksums)?;
    // The file has this length, so the allocation is bounded by a real file.
    data.resize(shard.file_bytes - DATA_START, 0);
    file.read(DATA_START as u64, data)?;
    let (expert, tail) = data.split_at(shard.layout.bytes);
    shard.check_data(path, expert, checksums)?;
    shard.check_tail(path, tail)
}

fn check_table(store: &Path, table: &TableFile, progress: &dyn Progress) -> Result<()> {
    RowTable::open(store, table)?.check(progress)
}

fn check_resident(store: &Path, manifest: &Manifest, progress: &dyn Progress) -> Result<()> {
    let path = store.join(RESIDENT_FILE);
    let (resident, found) = ResidentTensors::open(&path)?;
    if found != manifest.resident {
        let what = "does not match the manifest: its header or length differs";
        return Err(StoreError::new(StoreErrorKind::Mismatch, &path, what));
    }
    resident.check(progress)
}

fn check_sidecar(path: &Path, bytes: u64, checksum: &str) -> Result<()> {
    let content =
        read_small(path, bytes)?.ok_or_else(|| StoreError::new(StoreErrorKind::Missing, path, "is missing"))?;
    if checksum_of(&content) != checksum {
        return Err(StoreError::new(StoreErrorKind::Mismatch, path, "does not match its checksum"));
    }
    Ok(())
}

/// Files in the store's folders that are neither listed in the manifest nor optional.
fn unknown_files(store: &Path, manifest: &Manifest) -> Vec<PathBuf> {
    let geometry = &manifest.geometry;
    let mut known: BTreeSet<PathBuf> = [MANIFEST_FILE, RESIDENT_FILE, SETTINGS, HOT_EXPERTS]
        .into_iter()
        .chain(ADDED_SIDECARS)
        .map(PathBuf::from)
        .collect();
    known.extend(ADDED_SIDECARS.into_iter().chain([MANIFEST_FILE]).map(|name| seal_path(Path::new(name))));
    let mut folders = vec![PathBuf::new()];
    known.extend(manifest.sidecars.iter().map(|s| PathBuf::from(&s.name)));
    for (set, _) in expert_files(manifest) {
        folders.push(set.into());
        for layer in &geometry.moe_layers {
            folders.push(layer_folder(set, *layer));
            known.extend((0..geometry.experts).map(|e| shard_path_in(set, *layer, ExpertId(e as u16))));
        }
    }
    if !manifest.tables.is_empty() {
        folders.push(TABLES.into());
        known.extend(manifest.tables.iter().map(TableFile::path));
    }
    known.extend(folders.iter().cloned());
    let listed = folders.iter().flat_map(|folder| {
        let entries = fs::read_dir(store.join(folder)).into_iter().flatten().flatten();
        entries.map(|e| folder.join(e.file_name()))
    });
    let mut unknown: Vec<PathBuf> = listed.filter(|path| !known.contains(path)).take(LISTED).collect();
    unknown.sort();
    unknown
}

#[cfg(test)]
mod tests;
