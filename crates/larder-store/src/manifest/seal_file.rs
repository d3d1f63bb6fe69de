//! Files `NAME.seal`, which say what the sidecar `NAME` of a store is, and for which store it was made.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{seal, unseal};
use crate::{
    error::{Result, StoreError},
    files::{atomic_file::write_atomically, checksum::checksum_of, read_at::read_small},
};

/// Largest seal in bytes.
const SEAL_LIMIT: u64 = 4096;

/// What a file is, and which store it was made for.
#[derive(PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Seal {
    /// Hash of the store.
    pub store: String,
    /// Length in bytes.
    bytes: u64,
    /// Checksum of the content.
    pub content: String,
}

impl Seal {
    /// The seal of `content` in the store with the hash `store`.
    pub fn of(store: &str, content: &[u8]) -> Self {
        Seal { store: store.to_owned(), bytes: content.len() as u64, content: checksum_of(content) }
    }

    /// Writes the seal of the file `sealed`.
    pub fn write(&self, sealed: &Path) -> Result<()> {
        let json = serde_json::to_string_pretty(self).expect("text and numbers serialize as JSON");
        write_atomically(&seal_path(sealed), &seal(&json))
    }

    /// The seal of the file `sealed`; `None` if it has none.
    pub fn read(sealed: &Path) -> Result<Option<Self>> {
        let path = seal_path(sealed);
        let Some(bytes) = read_small(&path, SEAL_LIMIT)? else { return Ok(None) };
        let damaged = |what: String| StoreError::malformed(&path, format!("is not a valid seal: it {what}"));
        let (json, _) = unseal(&bytes).map_err(|what| damaged(what.to_owned()))?;
        serde_json::from_slice(&json).map(Some).map_err(|e| damaged(format!("is not as expected: {e}")))
    }
}

/// The path of the seal of the file `sealed`.
pub fn seal_path(sealed: &Path) -> PathBuf {
    let mut name = sealed.as_os_str().to_owned();
    name.push(".seal");
    name.into()
}
