//! The second folder of a store, on another drive. The store's `drives.json` says where it is, and its own `drive.json`
//! to which shards it belongs. Both are hints for finding shards, which have their checksums in the manifest, and
//! neither is part of the store: a store can be copied without its second folder, and a folder moves without a change
//! of the hash.

use std::{
    fs,
    path::{Component, Path, PathBuf},
};

use larder_core::ExpertId;
use larder_os::FileId;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::{
        atomic_file::{AtomicFile, sync_folder},
        checksum::checksum_of,
        read_at::read_small,
    },
    manifest::{ExpertChecksums, Manifest},
};

/// Name of the file in a store that says where its second folder is.
pub const DRIVES_FILE: &str = "drives.json";
/// Name of the file in a second folder that says to which shards it belongs.
pub const DRIVE_FILE: &str = "drive.json";
/// Largest of these files in bytes.
const LIMIT: u64 = 16 << 10;

/// How shards are divided between a store and its second folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Division {
    /// Both have every shard.
    Mirror,
    /// Of each layer, the store has every other expert, and the second folder those between.
    Stripe,
}

/// The second folder of a store as it was found.
#[derive(Debug)]
pub struct SecondFolder {
    /// The folder.
    pub folder: PathBuf,
    /// What it holds.
    pub division: Division,
    /// Why nothing is read from it; `None` if it is there and belongs to the store.
    pub fault: Option<StoreError>,
}

/// The content of [`DRIVES_FILE`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DrivesFile {
    division: Division,
    /// Absolute, or relative to the store.
    folder: PathBuf,
}

/// The content of [`DRIVE_FILE`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct DriveFile {
    /// Digest of the checksums of all shards.
    shards: String,
}

impl Division {
    /// Whether the second folder has the shards of an expert.
    pub fn second_has(self, expert: ExpertId) -> bool {
        self == Division::Mirror || !expert.index().is_multiple_of(2)
    }

    /// Whether the store itself has the shards of an expert.
    pub fn store_has(self, expert: ExpertId) -> bool {
        self == Division::Mirror || expert.index().is_multiple_of(2)
    }

    /// The name in files and reports.
    pub fn name(self) -> &'static str {
        match self {
            Division::Mirror => "mirror",
            Division::Stripe => "stripe",
        }
    }
}

impl SecondFolder {
    /// The second folder of the store at `store`; `None` if it has none.
    pub fn of(store: &Path, manifest: &Manifest) -> Result<Option<Self>> {
        let Some(DrivesFile { division, folder }) = read_json(&store.join(DRIVES_FILE))? else { return Ok(None) };
        // An absolute folder replaces the store's.
        let folder = store.join(folder);
        let fault = check(&folder, manifest).err();
        Ok(Some(SecondFolder { folder, division, fault }))
    }

    /// Records in the store at `store` that `folder`, an existing one, is its second.
    pub(crate) fn record(store: &Path, folder: &Path, division: Division) -> Result<()> {
        let found = folder.canonicalize().map_err(|e| StoreError::io(folder, "opening", e))?;
        // JSON holds text only.
        if found.to_str().is_none() {
            return Err(StoreError::new(
                StoreErrorKind::Unsupported,
                folder,
                "has a path that is not UTF-8; rename it",
            ));
        }
        write_json(&store.join(DRIVES_FILE), &DrivesFile { division, folder: found })?;
        sync_folder(store)
    }
}

/// Marks `folder` as one that holds shards of this manifest.
pub(crate) fn mark(folder: &Path, manifest: &Manifest) -> Result<()> {
    write_json(&folder.join(DRIVE_FILE), &DriveFile { shards: shards_digest(manifest) })?;
    sync_folder(folder)
}

/// Whether `folder` says that it holds shards, and if so, whether of this manifest.
pub(crate) fn is_of(folder: &Path, manifest: &Manifest) -> Result<Option<bool>> {
    Ok(shards_of(folder)?.map(|found| found == shards_digest(manifest)))
}

/// The digest of the shards to which `folder` belongs, if it says that it holds shards.
pub(crate) fn shards_of(folder: &Path) -> Result<Option<String>> {
    let found: Option<DriveFile> = read_json(&folder.join(DRIVE_FILE))?;
    Ok(found.map(|found| found.shards))
}

/// Checks that `folder` is there and belongs to this manifest.
fn check(folder: &Path, manifest: &Manifest) -> Result<()> {
    let wrong = |what| Err(StoreError::new(StoreErrorKind::Missing, folder, what));
    match is_of(folder, manifest)? {
        Some(true) => Ok(()),
        Some(false) => {
            let what = "holds the experts of another store, or of this one before it was made anew";
            Err(StoreError::new(StoreErrorKind::Mismatch, folder, what))
        }
        None if folder.is_dir() => wrong("holds no experts of this store (it has no drive.json)"),
        None => wrong("is missing; is its drive connected?"),
    }
}

/// Digest of the checksums of all shards, in order: those of the experts, then those of the smaller copies. Other than
/// the hash of the store, it does not change with the config.
pub(crate) fn shards_digest(manifest: &Manifest) -> String {
    let sets = [Some(&manifest.experts), manifest.small_experts.as_ref()];
    let all = sets.into_iter().flatten().flat_map(|files| files.checksums.iter().flatten());
    checksum_of(all.flat_map(|ExpertChecksums(each)| each).map(String::as_str).collect::<String>().as_bytes())
}

/// Refuses a second folder that lies inside of the store or the store inside of it, or that holds something else.
pub fn check_second_folder(store: &Path, folder: &Path) -> Result<()> {
    // What does not exist yet lies below what does.
    let full = |path: &Path| -> Option<PathBuf> {
        let path = std::path::absolute(path).ok()?;
        let (found, above) =
            path.ancestors().find_map(|above| above.canonicalize().ok().map(|found| (found, above)))?;
        let mut full = found;
        for part in path.strip_prefix(above).ok()?.components() {
            match part {
                Component::ParentDir => drop(full.pop()),
                part => full.push(part),
            }
        }
        Some(full)
    };
    if let (Some(store), Some(second)) = (full(store), full(folder))
        && (store.starts_with(&second) || second.starts_with(&store))
    {
        let what =
            format!("and the store {} lie one inside the other; choose a folder on another drive", store.display());
        return Err(StoreError::new(StoreErrorKind::Taken, folder, what));
    }
    match fs::metadata(folder) {
        Ok(found) if !found.is_dir() => Err(StoreError::new(StoreErrorKind::Taken, folder, "is a file, not a folder")),
        _ => Ok(()),
    }
}

/// Whether two folders are on one file system, where a second copy makes reads no faster.
pub(crate) fn are_on_one_drive(store: &Path, folder: &Path) -> bool {
    let device = |path: &Path| FileId::of(path).map(|found| found.device).ok();
    device(store).is_some() && device(store) == device(folder)
}

fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let Some(bytes) = read_small(path, LIMIT)? else { return Ok(None) };
    let parsed = serde_json::from_slice(&bytes);
    parsed.map(Some).map_err(|e| StoreError::malformed(path, format!("cannot be read: {e}")))
}

/// Writes a small file atomically. The folder may be a stranger's, so a link in its place is replaced and not followed.
fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let mut text = serde_json::to_string_pretty(value).expect("text serializes as JSON");
    text.push('\n');
    let mut atomic_file = AtomicFile::create(path)?;
    atomic_file.write(text.as_bytes())?;
    atomic_file.publish()
}
