//! Reads sidecars that were added to a finished store, with their seals.

use std::path::Path;

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    files::read_at::read_small,
    manifest::Seal,
};

/// Names of the sidecars that can be written into a finished store.
pub const ADDED_SIDECARS: [&str; 3] = ["evictor.safetensors", "quality.json", VISION];

/// The sidecar that says what the image tower beside it is.
pub const VISION: &str = "vision.json";

/// Largest sidecar of these, in bytes.
pub const ADDED_LIMIT: u64 = 256 << 20;

/// One of [`ADDED_SIDECARS`] of the store at `store` with the hash `hash`; `None` if there is none. One that was
/// changed, or made for another store, is refused.
pub fn read_added(store: &Path, hash: &str, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
    let path = store.join(name);
    let Some(content) = read_small(&path, limit)? else { return Ok(None) };
    let found = Seal::read(&path)?;
    let what = match found {
        Some(found) if found == Seal::of(hash, &content) => return Ok(Some(content)),
        None => "has no seal",
        Some(found) if found.store != hash => "was made for another store, or before this one was changed",
        Some(_) => "does not match its checksum",
    };
    let what = format!("{what}; {}, or accept it as it is with `larder store seal {}`", remedy(name), store.display());
    Err(StoreError::new(StoreErrorKind::Mismatch, &path, what))
}

fn remedy(name: &str) -> &'static str {
    match name {
        "quality.json" => "make it again with `larder tune`",
        VISION => "make it again with `larder store add-vision`",
        _ => "make it again with `larder lab train`",
    }
}
