//! The folder that a conversion writes to: lock, state, free space.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use larder_core::{ExpertId, NumberFormat};
use larder_os::{FileId, FolderLock, LOCK_FILE, free_bytes};
use serde::{Deserialize, Serialize};

use super::options::ConvertOptions;
use crate::{
    drives::second_folder::Division,
    error::{Result, StoreError, StoreErrorKind},
    files::{
        atomic_file::{sync_folder, temp_path, write_atomically},
        read_at::read_small,
    },
    format_mix::FormatMix,
    manifest::{CONVERSION_STATE, MANIFEST_FILE},
    source::Source,
};

const STATE_LIMIT: u64 = 1 << 20;

/// Identity of a conversion; only a conversion with the same identity is resumed.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ConversionState {
    larder: String,
    fingerprint: String,
    experts: Option<NumberFormat>,
    resident: Option<NumberFormat>,
    #[serde(default, skip_serializing_if = "FormatMix::is_empty")]
    mix: FormatMix,
    /// Digest of the importance matrix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    imatrix: Option<String>,
    small_experts: Option<NumberFormat>,
    /// Fingerprint of the image tower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tower: Option<u64>,
    /// Whether every other expert lies in a second folder.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    stripe: bool,
}

impl ConversionState {
    pub fn new(fingerprint: String, options: &ConvertOptions) -> Self {
        ConversionState {
            larder: env!("CARGO_PKG_VERSION").to_owned(),
            fingerprint,
            experts: options.experts,
            resident: options.resident,
            mix: options.mix.clone(),
            imatrix: options.importance.as_ref().map(|importance| importance.digest()),
            small_experts: options.small_experts,
            tower: options.tower.as_ref().map(Source::fingerprint),
            stripe: options.stripe.is_some(),
        }
    }
}

/// The folders that a conversion writes to.
pub(super) struct Targets {
    /// Becomes the store.
    pub store: Target,
    /// Becomes its second folder.
    pub stripe: Option<Target>,
}

impl Targets {
    /// The folder that gets the shards of an expert.
    pub fn of(&self, expert: ExpertId) -> &Target {
        self.stripe.as_ref().filter(|_| Division::Stripe.second_has(expert)).unwrap_or(&self.store)
    }

    pub fn all(&self) -> impl Iterator<Item = &Target> {
        std::iter::once(&self.store).chain(&self.stripe)
    }
}

/// The folder that becomes a store, or its second folder, locked against other conversions while this value lives.
pub(super) struct Target {
    path: PathBuf,
    resumed: bool,
    _lock: FolderLock,
}

impl Target {
    /// Locks and checks the folder. Returns `None` if nothing is left to do, because an earlier attempt was stopped
    /// right after its last step. `files` are the files to be written and their lengths.
    pub fn prepare(path: &Path, state: &ConversionState, files: &[(PathBuf, u64)]) -> Result<Option<Self>> {
        let created = create_folder(path)?;
        let locked = lock_existing(path)?;
        let lock = locked.try_clone().map_err(|e| StoreError::io(path, "locking", e))?;
        let prepared = Self::take(path, lock, state, files);
        if created && prepared.is_err() {
            locked.remove_if_empty(path);
        }
        prepared
    }

    fn take(path: &Path, lock: FolderLock, state: &ConversionState, files: &[(PathBuf, u64)]) -> Result<Option<Self>> {
        let found = read_small(&path.join(CONVERSION_STATE), STATE_LIMIT)?;
        let same_conversion = found
            .as_ref()
            .map(|bytes| serde_json::from_slice(bytes).is_ok_and(|found: ConversionState| found == *state));
        let target = Target { path: path.to_owned(), resumed: found.is_some(), _lock: lock };
        let taken = |what: &str| Err(StoreError::new(StoreErrorKind::Taken, path, what));
        match (path.join(MANIFEST_FILE).exists(), same_conversion) {
            (true, Some(true)) => target.finish().map(|()| None),
            (true, _) => taken("already holds a store; remove it or choose another target"),
            (false, Some(false)) => taken(
                "holds an unfinished conversion of another model, of a source that has changed since, or with other options; \
                 remove the folder or choose another target",
            ),
            (false, same_conversion) => {
                if same_conversion.is_none() {
                    check_empty(path)?;
                }
                check_space(path, files)?;
                if same_conversion.is_none() {
                    let state = serde_json::to_vec(state).expect("text serializes as JSON");
                    write_atomically(&path.join(CONVERSION_STATE), &state)?;
                    sync_folder(path)?;
                }
                Ok(Some(target))
            }
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether an earlier attempt may have left finished files.
    pub fn is_resumed(&self) -> bool {
        self.resumed
    }

    pub fn create_folder(&self, name: &Path) -> Result<()> {
        let path = self.path.join(name);
        fs::create_dir_all(&path).map_err(|e| StoreError::io(&path, "creating the folder", e))
    }

    /// Makes the names of all files in `folders` durable.
    pub fn sync(&self, folders: &[PathBuf]) -> Result<()> {
        folders.iter().try_for_each(|folder| sync_folder(&self.path.join(folder)))?;
        sync_folder(&self.path)
    }

    /// Removes the mark of an unfinished conversion.
    pub fn finish(&self) -> Result<()> {
        remove_state(&self.path)
    }
}

/// Removes the mark of an unfinished conversion from a folder.
pub(super) fn remove_state(folder: &Path) -> Result<()> {
    let path = folder.join(CONVERSION_STATE);
    fs::remove_file(&path).map_err(|e| StoreError::io(&path, "removing", e))?;
    sync_folder(folder)
}

/// Creates a folder and those above it; returns whether it did not exist.
fn create_folder(path: &Path) -> Result<bool> {
    let failed = |e: io::Error| match e.kind() {
        io::ErrorKind::AlreadyExists | io::ErrorKind::NotADirectory => {
            StoreError::new(StoreErrorKind::Taken, path, "is a file, not a folder")
        }
        _ => StoreError::io(path, "creating the folder", e),
    };
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    match fs::create_dir(path) {
        Ok(()) => Ok(true),
        Err(_) if path.is_dir() => Ok(false),
        Err(e) => Err(failed(e)),
    }
}

/// Locks the folder at `path`, which another conversion that created it may just have removed again.
fn lock_existing(path: &Path) -> Result<FolderLock> {
    let folder = lock(path)?;
    if folder.is_at(path) {
        Ok(folder)
    } else {
        Err(StoreError::new(StoreErrorKind::Taken, path, "was removed by another conversion; try again"))
    }
}

/// Refuses a target inside the folder of its own source, or that folder itself.
pub(super) fn check_outside(source: &Path, target: &Path) -> Result<()> {
    let id = |path: &Path| path.is_dir().then(|| FileId::of(path).ok()).flatten();
    let Some(of_source) = id(source) else { return Ok(()) };
    // What does not exist yet cannot lead out of the part that does.
    let existing = target.ancestors().map(|above| if above.as_os_str().is_empty() { Path::new(".") } else { above });
    let existing = existing.into_iter().find_map(|above| above.canonicalize().ok()).unwrap_or_default();
    if existing.ancestors().any(|above| id(above) == Some(of_source)) {
        let what = format!("lies inside its source {}; choose a folder elsewhere", source.display());
        Err(StoreError::new(StoreErrorKind::Taken, target, what))
    } else {
        Ok(())
    }
}

/// Locks a folder against other programs that write to it, while the result lives.
pub(crate) fn lock(path: &Path) -> Result<FolderLock> {
    FolderLock::take(path).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => {
            StoreError::new(StoreErrorKind::Taken, path, "is being written by another conversion")
        }
        _ => StoreError::io(path, "locking", e),
    })
}

/// Checks that a folder is empty, except for the temporary file of a conversion that was stopped at its first step.
fn check_empty(path: &Path) -> Result<()> {
    let first = temp_path(Path::new(CONVERSION_STATE));
    let mut entries = fs::read_dir(path).map_err(|e| StoreError::io(path, "listing", e))?.flatten();
    match entries.find(|e| e.file_name() != first.as_os_str() && e.file_name() != LOCK_FILE) {
        Some(entry) => {
            let name = entry.file_name();
            let what = format!("is not empty (it holds '{}'); choose an empty or new folder", name.to_string_lossy());
            Err(StoreError::new(StoreErrorKind::Taken, path, what))
        }
        None => Ok(()),
    }
}

/// Checks that the file system has space for the files, which have these lengths in the end.
pub(crate) fn check_space(path: &Path, files: &[(PathBuf, u64)]) -> Result<()> {
    let existing = |name: &Path| fs::metadata(path.join(name)).map_or(0, |m| m.len());
    let needed: u64 = files.iter().map(|(name, bytes)| bytes.saturating_sub(existing(name))).sum();
    let free = free_bytes(path).map_err(|e| StoreError::io(path, "querying free space", e))?;
    if needed <= free {
        return Ok(());
    }
    let gb = |bytes: u64| bytes as f64 / 1e9;
    let what = format!("needs {:.2} GB more, but the file system has {:.2} GB free", gb(needed), gb(free));
    Err(StoreError::new(StoreErrorKind::NoSpace, path, what))
}
