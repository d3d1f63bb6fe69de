//! Sidecars that are written into a finished store: trained weights for eviction, the calibration of lossy
//! routing, and what is known of an image tower.
//!
//! They are not in the manifest, because they may be replaced. Beside each lies its seal, `NAME.seal`: the hash of the
//! store that it was made for, and its own length and checksum.

use std::path::Path;

use super::added::{ADDED_LIMIT, ADDED_SIDECARS, read_added};
use crate::{
    error::Result,
    files::read_at::read_small,
    manifest::{MANIFEST_FILE, Manifest, Seal},
    source::Source,
    store::Store,
};

impl Store {
    /// The content of one of [`ADDED_SIDECARS`], of at most `limit` bytes; `None` if the store has none. One that was
    /// changed, or made for another store, is refused.
    pub fn added_sidecar(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        read_added(self.path(), self.hash(), name, limit)
    }
}

/// Checks one of [`ADDED_SIDECARS`]; returns its length, or `None` if there is none.
pub(crate) fn check(store: &Path, hash: &str, name: &str) -> Result<Option<u64>> {
    Ok(read_added(store, hash, name, ADDED_LIMIT)?.map(|content| content.len() as u64))
}

/// Seals the sidecar at `path`, which has just been written, if it is one of [`ADDED_SIDECARS`] in a store.
pub fn seal_if_in_store(path: &Path) -> Result<()> {
    let name = path.file_name().and_then(|name| name.to_str()).filter(|name| ADDED_SIDECARS.contains(name));
    let folder = match path.parent() {
        Some(folder) if folder.as_os_str().is_empty() => Path::new("."),
        Some(folder) => folder,
        None => return Ok(()),
    };
    match name.filter(|_| folder.join(MANIFEST_FILE).exists()) {
        Some(name) => seal_one(folder, &Manifest::read(folder)?.1, name).map(drop),
        None => Ok(()),
    }
}

/// Accepts the sidecars that lie in the store at `store`, whatever they were made for; returns their names.
pub fn seal_sidecars(store: &Path) -> Result<Vec<&'static str>> {
    let (_, hash) = Manifest::read(store)?;
    let sealed = ADDED_SIDECARS.into_iter().map(|name| Ok(seal_one(store, &hash, name)?.then_some(name)));
    sealed.filter_map(Result::transpose).collect()
}

/// Seals a sidecar for the store with this hash; returns whether there is one.
fn seal_one(store: &Path, hash: &str, name: &str) -> Result<bool> {
    let path = store.join(name);
    let Some(content) = read_small(&path, ADDED_LIMIT)? else { return Ok(false) };
    Seal::of(hash, &content).write(&path)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::manifest::seal_path;
    use crate::testing::{ExpertForm, small_store};

    const NAME: &str = "quality.json";

    fn store(dir: &Path, name: &str, form: ExpertForm) -> Store {
        Store::open(&small_store(&dir.join(name), form)).unwrap()
    }

    #[test]
    fn a_sidecar_is_read_by_the_store_that_it_was_made_for() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (store(dir.path(), "a", ExpertForm::Separate), store(dir.path(), "b", ExpertForm::Halves));
        assert_eq!(a.added_sidecar(NAME, 100).unwrap(), None);
        let path = a.path().join(NAME);
        fs::write(&path, "{}").unwrap();
        let refused = |store: &Store| store.added_sidecar(NAME, 100).unwrap_err().to_string();
        assert!(refused(&a).contains("has no seal; make it again with `larder tune`"), "{}", refused(&a));
        seal_if_in_store(&path).unwrap();
        assert_eq!(a.added_sidecar(NAME, 100).unwrap().unwrap(), b"{}");
        assert!(a.added_sidecar(NAME, 1).is_err());
        // Replaced by the program that makes it.
        fs::write(&path, "{\"a\": 1}").unwrap();
        assert!(refused(&a).contains("does not match its checksum"), "{}", refused(&a));
        seal_if_in_store(&path).unwrap();
        assert_eq!(a.added_sidecar(NAME, 100).unwrap().unwrap(), b"{\"a\": 1}");
        // Copied into another store, with its seal.
        fs::copy(&path, b.path().join(NAME)).unwrap();
        fs::copy(seal_path(&path), seal_path(&b.path().join(NAME))).unwrap();
        assert!(refused(&b).contains("made for another store"), "{}", refused(&b));
        assert_eq!(seal_sidecars(b.path()).unwrap(), [NAME]);
        assert_eq!(b.added_sidecar(NAME, 100).unwrap().unwrap(), b"{\"a\": 1}");
    }

    #[test]
    fn a_changed_byte_of_sidecar_or_seal_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path(), "a", ExpertForm::Separate);
        let path = store.path().join(NAME);
        fs::write(&path, "{\"delta\": [1, 2]}").unwrap();
        seal_if_in_store(&path).unwrap();
        for file in [path.clone(), seal_path(&path)] {
            let good = fs::read(&file).unwrap();
            for at in 0..good.len() {
                let mut bad = good.clone();
                bad[at] ^= 1;
                fs::write(&file, bad).unwrap();
                assert!(store.added_sidecar(NAME, 100).is_err(), "{} byte {at}", file.display());
            }
            fs::write(&file, good).unwrap();
        }
        store.added_sidecar(NAME, 100).unwrap().unwrap();
    }

    #[test]
    fn other_files_and_folders_are_not_sealed() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path(), "a", ExpertForm::Separate);
        for path in [store.path().join("weights.safetensors"), dir.path().join(NAME)] {
            fs::write(&path, "{}").unwrap();
            seal_if_in_store(&path).unwrap();
            assert!(!seal_path(&path).exists());
        }
    }
}
