//! Verification: checks every byte of a store.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use larder_core::ExpertId;
use parking_lot::Mutex;

use crate::{
    drives::second_folder::{DRIVE_FILE, DRIVES_FILE, Division, SecondFolder},
    error::{Result, StoreError, StoreErrorKind},
    files::{checksum::checksum_of, read_at::read_small, safetensors::DATA_START},
    manifest::{ExpertChecksums, ExpertFiles, MANIFEST_FILE, Manifest, RESIDENT_FILE, TABLES, TableFile, seal_path},
    parallel::parallel,
    progress::Progress,
    resident::ResidentTensors,
    row_table::RowTable,
    shard::{EXPERTS, SMALL_EXPERTS, Shard, layer_folder, set::ShardSet, shard_path_in},
    store::{
        added::{ADDED_SIDECARS, VISION},
        sidecars,
        tower::{TOWER_FILE, check_tower},
    },
};

/// Largest number of problems and of unknown files that are listed; further problems are only counted.
const LISTED: usize = 100;
const THREADS: usize = 2;
/// A file that a store may have without listing it in the manifest.
const SETTINGS: &str = "larder.toml";
/// A file that invites to the first message to a model, in words that suit it. It is no part of the store.
pub const WELCOME: &str = "welcome.json";
/// A file that runs may write into a finished store: which experts they used most. It is a hint and no part of the
/// store.
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
    /// What of these is in the second folder of the store, if it has one.
    pub second: Option<VerifiedFolder>,
}

/// The files that were checked in the second folder of a store.
#[derive(Debug)]
pub struct VerifiedFolder {
    /// The folder.
    pub folder: PathBuf,
    /// What it should hold.
    pub division: Division,
    /// Whether it is there and belongs to the store.
    pub is_usable: bool,
    /// Number of files that were checked.
    pub files: usize,
    /// Bytes that were checked.
    pub bytes: u64,
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

/// Checks every file of the store at `path` and of its second folder: existence, length, header and checksum.
///
/// Fails only if there is no valid manifest; all other problems are in the report.
pub fn verify(path: &Path, progress: &dyn Progress) -> Result<VerifyReport> {
    let (manifest, hash) = Manifest::read(path)?;
    let sets = expert_files(&manifest).map(|(name, files)| ShardSet::listed(path, name, files, &manifest.geometry));
    let sets = sets.collect::<Result<Vec<_>>>()?;
    let second = SecondFolder::of(path, &manifest)?;
    let places = places(path, second.as_ref(), &sets);
    let shard_bytes = |places: &[ShardPlace]| places.iter().map(|place| place.shard.file_bytes as u64).sum::<u64>();
    progress.begin(other_bytes(&manifest) + shard_bytes(&places));
    let report = Mutex::new(VerifyReport::default());
    let note = |bytes, outcome| report.lock().note(bytes, outcome);
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
    match check_tower(path, &hash, progress) {
        Ok(None) => {}
        Ok(Some(bytes)) => note(bytes, Ok(())),
        // That of the sidecar is in the report already.
        Err(_) if sidecars::check(path, &hash, VISION).is_err() => {}
        Err(problem) => note(0, Err(problem)),
    }
    if let Some(SecondFolder { fault: Some(fault), .. }) = &second {
        note(0, Err(StoreError::new(fault.kind, &fault.path, fault.message.clone())));
    }
    parallel(THREADS, places.len(), Vec::new, |data, i| {
        let ShardPlace { path, shard, checksums, .. } = &places[i];
        let file_bytes = shard.file_bytes as u64;
        note(file_bytes, check_shard(path, shard, checksums, data));
        progress.advance(file_bytes);
        Ok(())
    })?;
    let mut report = report.into_inner();
    report.problems.sort_by(|a, b| a.path.cmp(&b.path));
    report.unknown = unknown_files(path, &manifest, second.as_ref());
    report.second = second.map(|SecondFolder { folder, division, fault }| {
        let there: Vec<_> = places.into_iter().filter(|place| place.is_second).collect();
        let (is_usable, files, bytes) = (fault.is_none(), there.len(), shard_bytes(&there));
        VerifiedFolder { folder, division, is_usable, files, bytes }
    });
    Ok(report)
}

/// A shard in one of the folders of a store.
struct ShardPlace<'a> {
    path: PathBuf,
    shard: Shard<'a>,
    checksums: &'a ExpertChecksums,
    is_second: bool,
}

/// Every shard where it should be: in the store, in its second folder, or in both. Nothing is looked for in a second
/// folder that cannot be used.
fn places<'a>(store: &Path, second: Option<&SecondFolder>, sets: &'a [ShardSet]) -> Vec<ShardPlace<'a>> {
    let mut places = Vec::new();
    for set in sets {
        for (shard, checksums) in set.shards_with_checksums() {
            let name = shard_path_in(set.name(), shard.layer, shard.expert);
            let mut add = |root: &Path, is_second| {
                places.push(ShardPlace { path: root.join(&name), shard, checksums, is_second });
            };
            if second.is_none_or(|second| second.division.store_has(shard.expert)) {
                add(store, false);
            }
            let there = |second: &&SecondFolder| second.fault.is_none() && second.division.second_has(shard.expert);
            if let Some(second) = second.filter(there) {
                add(&second.folder, true);
            }
        }
    }
    places
}

/// The sets of shards of a store, by the name of their folder.
pub(crate) fn expert_files(manifest: &Manifest) -> impl Iterator<Item = (&'static str, &ExpertFiles)> {
    let small = manifest.small_experts.iter().map(|files| (SMALL_EXPERTS, files));
    std::iter::once((EXPERTS, &manifest.experts)).chain(small)
}

/// Bytes of the files that a verification reads beside shards and sidecars.
fn other_bytes(manifest: &Manifest) -> u64 {
    let tables = manifest.tables.iter().map(|table| table.file_bytes() as u64);
    tables.fold(manifest.resident.bytes, u64::saturating_add)
}

fn check_shard(path: &Path, shard: &Shard, checksums: &ExpertChecksums, data: &mut Vec<u8>) -> Result<()> {
    // The allocation is bounded by a real file.
    shard.open(path)?;
    data.resize(shard.file_bytes - DATA_START, 0);
    shard.check_file(path, checksums, data)
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

/// Files in the folders of the store, and in its second folder, that are neither listed in the manifest nor optional.
/// Those of the store are relative to it.
fn unknown_files(store: &Path, manifest: &Manifest, second: Option<&SecondFolder>) -> Vec<PathBuf> {
    let mut known: BTreeSet<PathBuf> = [MANIFEST_FILE, RESIDENT_FILE, SETTINGS, WELCOME, HOT_EXPERTS, DRIVES_FILE]
        .into_iter()
        .chain(ADDED_SIDECARS)
        .map(PathBuf::from)
        .collect();
    known.extend(ADDED_SIDECARS.into_iter().map(|name| seal_path(Path::new(name))));
    known.extend(store.join(VISION).exists().then(|| TOWER_FILE.into()));
    known.extend(manifest.sidecars.iter().map(|s| PathBuf::from(&s.name)));
    let mut folders = vec![PathBuf::new()];
    if !manifest.tables.is_empty() {
        folders.push(TABLES.into());
        known.extend(manifest.tables.iter().map(TableFile::path));
    }
    let in_store = |expert| second.is_none_or(|second| second.division.store_has(expert));
    let mut unknown = unknown_in(store, manifest, known, folders, in_store);
    if let Some(second) = second.filter(|second| second.fault.is_none()) {
        let known = [PathBuf::from(DRIVE_FILE)].into();
        let there = |expert| second.division.second_has(expert);
        let there = unknown_in(&second.folder, manifest, known, vec![PathBuf::new()], there);
        unknown.extend(there.into_iter().map(|name| second.folder.join(name)));
        unknown.truncate(LISTED);
    }
    unknown
}

/// Files in `folders` of `root` and in those of shards that are neither known nor shards of the experts that it `has`.
fn unknown_in(
    root: &Path,
    manifest: &Manifest,
    mut known: BTreeSet<PathBuf>,
    mut folders: Vec<PathBuf>,
    has: impl Fn(ExpertId) -> bool,
) -> Vec<PathBuf> {
    let geometry = &manifest.geometry;
    let experts = || (0..geometry.experts).map(|e| ExpertId(e as u16));
    for (set, _) in expert_files(manifest) {
        folders.push(set.into());
        for layer in &geometry.moe_layers {
            folders.push(layer_folder(set, *layer));
            known.extend(experts().filter(|e| has(*e)).map(|expert| shard_path_in(set, *layer, expert)));
        }
    }
    known.extend(folders.iter().cloned());
    let listed = folders.iter().flat_map(|folder| {
        let entries = fs::read_dir(root.join(folder)).into_iter().flatten().flatten();
        entries.map(|e| folder.join(e.file_name()))
    });
    let mut unknown: Vec<PathBuf> = listed.filter(|path| !known.contains(path)).take(LISTED).collect();
    unknown.sort();
    unknown
}

#[cfg(test)]
mod tests;
