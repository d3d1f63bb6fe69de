//! The store that is made beside a GGUF file the first time it is run.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use larder_store::{ConvertOptions, Source, Store, StoreError, StoreErrorKind, convert, identity, open_source_with};

use super::known_content::KnownContent;
use super::{ConvertProgress, is_complete};
use crate::notices::{Notice, Setting};
use crate::open::{ModelOptions, blueprint_of, check_ignored, check_sidecars};
use crate::vision::kept_tower;

/// Whether `path` is an existing GGUF file.
pub fn is_gguf(path: &Path) -> bool {
    path.is_file() && path.extension().is_some_and(|e| e == "gguf")
}

/// The store beside the GGUF file `gguf`, which is made or completed if necessary; the file itself if it cannot be
/// made.
pub(crate) fn store_for_gguf(gguf: &Path, options: &ModelOptions) -> Result<PathBuf> {
    let ModelOptions { cache_folder, notices, .. } = options;
    let store = store_path(gguf);
    if is_complete(&store) {
        check_source(gguf, &store, cache_folder.as_deref())?;
        notices.send(Notice::StoreFound { store: store.clone(), gguf: gguf.to_owned() });
        return Ok(store);
    }
    let source = open_source_with(gguf, options.source())?;
    check_ignored(source.as_ref(), &options.ignored_keys)?;
    let blueprint = blueprint_of(source.as_ref())?;
    check_sidecars(source.as_ref())?;
    notices.send(Notice::StoreBegun(store.clone()));
    let progress = ConvertProgress(notices);
    let (tower, note) = kept_tower(source.as_ref(), options.mmproj.as_deref(), &blueprint)?;
    let keeping = ConvertOptions { tower, ..ConvertOptions::default() };
    let made = convert(source.as_ref(), &blueprint, &store, &keeping, &progress);
    notices.end();
    match made {
        Ok(report) => {
            report.notes.into_iter().chain(note).for_each(|note| notices.send(Notice::Model(note)));
            Ok(store)
        }
        Err(e) if matches!(e.kind, StoreErrorKind::Io | StoreErrorKind::NoSpace) => {
            notices.send(Notice::StoreRefused(e.to_string()));
            Ok(gguf.to_owned())
        }
        Err(e) => Err(e.into()),
    }
}

/// Path of the store of a GGUF file: `model.larder` for both `model.gguf` and `model-00001-of-00003.gguf`.
pub fn store_path(gguf: &Path) -> PathBuf {
    let stem = gguf.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let five = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
    let whole = stem.rsplit_once("-of-").filter(|(_, count)| five(count)).map(|(rest, _)| rest);
    let whole = whole.and_then(|rest| rest.rsplit_once('-')).filter(|(_, number)| five(number)).map(|(name, _)| name);
    gguf.with_file_name(format!("{}.larder", whole.unwrap_or(&stem)))
}

/// Refuses a store that was made of another file.
fn check_source(gguf: &Path, path: &Path, cache: Option<&Path>) -> Result<()> {
    let store = Store::open(path)?;
    let source = open_source_with(gguf, store.manifest().source_options())?;
    if is_made_of(&store, source.as_ref(), cache)? {
        return Ok(());
    }
    let what = format!("is a store that was made of another GGUF file; remove it, or use {}", Setting::NoStore);
    bail!(StoreError::new(StoreErrorKind::Taken, path, what))
}

/// Whether the store was made of the content that `source` has now, which is read unless `cache` knows it.
fn is_made_of(store: &Store, source: &dyn Source, cache: Option<&Path>) -> Result<bool> {
    let Some(made_of) = &store.manifest().source.identity else { return Ok(false) };
    let known = KnownContent::of(source, made_of, cache);
    if known.is_recorded() {
        return Ok(true);
    }
    let is_same = identity(source, &blueprint_of(source)?)? == *made_of;
    if is_same {
        known.record();
    }
    Ok(is_same)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_share_one_store() {
        assert_eq!(store_path(Path::new("/d/m.q4.gguf")), Path::new("/d/m.q4.larder"));
        assert_eq!(store_path(Path::new("m-00002-of-00003.gguf")), Path::new("m.larder"));
        assert_eq!(store_path(Path::new("m-2-of-3.gguf")), Path::new("m-2-of-3.larder"));
    }
}
