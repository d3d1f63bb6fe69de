//! Gives a finished store the image tower of its source.

use std::path::Path;

use crate::{
    convert::{check_space, lock},
    error::Result,
    files::atomic_file::sync_folder,
    manifest::Manifest,
    progress::Progress,
    source::TowerSource,
    store::tower::{TOWER_FILE, TowerPlan},
};

/// Writes `tower` into the store at `path`, in the place of the one that it may have; returns the bytes of its file.
pub fn add_vision(path: &Path, tower: &TowerSource, progress: &dyn Progress) -> Result<u64> {
    let _lock = lock(path)?;
    let (_, hash) = Manifest::read(path)?;
    let plan = TowerPlan::new(tower)?;
    check_space(path, &[(TOWER_FILE.into(), plan.file_bytes())])?;
    progress.begin(plan.file_bytes());
    let tensors = plan.write_tensors(path, false, progress)?;
    let bytes = tensors.bytes;
    plan.write_record(path, &hash, tensors)?;
    sync_folder(path)?;
    Ok(bytes)
}
