//! The image tower of a store: `vision.safetensors`, in the form of the resident weights, and `vision.json`, a sealed
//! sidecar that says what it is and has the checksum of its header.

use std::{path::Path, sync::Arc};

use serde::{Deserialize, Serialize};

use super::added::{VISION, read_added};
use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::atomic_file::write_atomically,
    manifest::{ResidentFile, Seal},
    progress::Progress,
    resident::{self, ResidentPlan, ResidentTensors},
    source::{TowerForm, TowerSource},
};

/// The file of the tower's tensors.
pub const TOWER_FILE: &str = "vision.safetensors";

/// The version of [`VISION`].
const TOWER_FORMAT: u64 = 1;
/// Largest [`VISION`], in bytes.
const RECORD_LIMIT: u64 = 32 << 20;

/// The content of [`VISION`].
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TowerRecord {
    format: u64,
    /// The file of the tensors.
    tensors: ResidentFile,
    /// What the source said about the tower.
    tower: TowerForm,
}

/// The tower of the store at `store` with the hash `hash`; `None` if it has none. Each tensor is compared with its
/// checksum when it is read.
pub fn open_tower(store: &Path, hash: &str) -> Result<Option<TowerSource>> {
    let Some((form, tensors, _)) = open(store, hash)? else { return Ok(None) };
    let names = tensors.names().into_iter().map(str::to_owned).collect();
    TowerSource::new(&store.join(TOWER_FILE), form, names, Arc::new(tensors)).map(Some)
}

fn open(store: &Path, hash: &str) -> Result<Option<(TowerForm, ResidentTensors, u64)>> {
    let path = store.join(VISION);
    let Some(json) = read_added(store, hash, VISION, RECORD_LIMIT)? else { return Ok(None) };
    let broken = |e| StoreError::malformed(&path, format!("is not as expected: {e}"));
    let TowerRecord { format, tensors, tower } = serde_json::from_slice(&json).map_err(broken)?;
    if format != TOWER_FORMAT {
        let what =
            format!("has format {format}, but this larder reads only {TOWER_FORMAT}; update larder, or make it again");
        return Err(StoreError::new(StoreErrorKind::OtherFormat, &path, what));
    }
    let path = store.join(TOWER_FILE);
    let (opened, found) = ResidentTensors::open(&path)?;
    if found != tensors {
        let what = format!(
            "does not match {VISION}: its header or length differs; make both again with `larder store add-vision`"
        );
        return Err(StoreError::new(StoreErrorKind::Mismatch, &path, what));
    }
    Ok(Some((tower, opened, found.bytes)))
}

/// Checks every byte of the tensors of the tower; returns their number, or `None` if there is no tower.
pub(crate) fn check_tower(store: &Path, hash: &str, progress: &dyn Progress) -> Result<Option<u64>> {
    let Some((_, tensors, bytes)) = open(store, hash)? else { return Ok(None) };
    tensors.check(progress)?;
    Ok(Some(bytes))
}

/// The tensors of a tower as they will be written.
pub(crate) struct TowerPlan<'a> {
    tower: &'a TowerSource,
    plan: ResidentPlan,
}

impl<'a> TowerPlan<'a> {
    /// Plans to keep every tensor of `tower` as it is.
    pub fn new(tower: &'a TowerSource) -> Result<Self> {
        Ok(TowerPlan { tower, plan: ResidentPlan::unchanged(tower)? })
    }

    /// Length of the file of tensors.
    pub fn file_bytes(&self) -> u64 {
        self.plan.file_bytes() as u64
    }

    /// Writes the file of tensors into `store`, unless it is there already and `may_exist`.
    pub fn write_tensors(&self, store: &Path, may_exist: bool, progress: &dyn Progress) -> Result<ResidentFile> {
        let path = store.join(TOWER_FILE);
        let found = if may_exist { resident::check_written(&self.plan, &path).ok() } else { None };
        if let Some(written) = found {
            progress.advance(written.bytes);
            return Ok(written);
        }
        resident::write(self.tower, &self.plan, &path, progress)
    }

    /// Writes and seals what is said about the tensors that were written, for the store with the hash `hash`.
    pub fn write_record(&self, store: &Path, hash: &str, tensors: ResidentFile) -> Result<()> {
        let record = TowerRecord { format: TOWER_FORMAT, tensors, tower: self.tower.form.clone() };
        let json = serde_json::to_vec_pretty(&record).expect("text and numbers serialize as JSON");
        let path = store.join(VISION);
        write_atomically(&path, &json)?;
        Seal::of(hash, &json).write(&path)
    }
}
