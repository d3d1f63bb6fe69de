//! The samples of a downloaded file, by which the source of a store is identified. They are kept beside the file,
//! because its bytes are released as they are converted.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use larder_os::replace_file;
use larder_store::{ReadAt, Result, StoreError, checksum_of, read_small, samples_of_file};

use crate::released_ranges::ReleasedRanges;

/// The digest of the samples of each tensor of a file.
pub type Samples = BTreeMap<String, String>;

/// Largest file of samples, in bytes.
const LIMIT: u64 = 256 << 20;

/// Takes the samples of the file at `path`, which is complete, and keeps them.
pub fn take(path: &Path) -> Result<Samples> {
    let samples = samples_of_file(&ReadAt::open(path)?)?;
    let json = serde_json::to_string(&samples).expect("text serializes as JSON");
    let kept = kept_at(path);
    let temp = kept.with_extension("tmp");
    fs::write(&temp, format!("{}\n{json}", checksum_of(json.as_bytes())))
        .and_then(|()| replace_file(&temp, &kept))
        .map_err(|e| StoreError::io(&kept, "writing", e))?;
    Ok(samples)
}

/// The samples of the file at `path`: those that were kept, or else those of its bytes. If they were not kept and bytes
/// were released, the file is removed, to be downloaded again.
pub fn taken_or_known(path: &Path, released: &mut ReleasedRanges) -> Result<Option<Samples>> {
    match known(path) {
        Some(samples) => Ok(Some(samples)),
        None if released.is_empty() => take(path).map(Some),
        None => released.forget().map(|()| None),
    }
}

/// The samples that were kept; `None` if there are none, or if they are damaged.
fn known(path: &Path) -> Option<Samples> {
    let text = String::from_utf8(read_small(&kept_at(path), LIMIT).ok()??).ok()?;
    let (checksum, json) = text.split_once('\n')?;
    let samples = (checksum_of(json.as_bytes()) == checksum).then(|| serde_json::from_str(json));
    samples?.ok()
}

fn kept_at(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".samples");
    name.into()
}
