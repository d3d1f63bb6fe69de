//! The models in the models folder.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use larder_runtime::models::{DOWNLOAD, HubName, download_of, is_complete};

/// A downloaded model.
pub struct InstalledModel {
    /// Name on the hub.
    pub name: HubName,
    /// Path of the store.
    pub path: PathBuf,
    /// Size on disk, including an unfinished download.
    pub bytes: u64,
    /// Whether it can be run without downloading more.
    pub complete: bool,
}

/// All models in the folder, sorted by name.
pub fn installed(folder: &Path) -> Result<Vec<InstalledModel>> {
    let mut found: Vec<InstalledModel> = Vec::new();
    for org in entries(folder)? {
        for entry in entries(&folder.join(&org))? {
            let stem = entry.strip_suffix(DOWNLOAD).unwrap_or(&entry);
            let Some(name) = HubName::of_folder(&org, stem) else { continue };
            if found.iter().any(|model| model.name == name) {
                continue;
            }
            let path = folder.join(name.folder());
            let complete = is_complete(&path);
            let bytes = disk_bytes(&path) + disk_bytes(&download_of(&path));
            found.push(InstalledModel { name, path, bytes, complete });
        }
    }
    found.sort_by_key(|model| model.name.to_string());
    Ok(found)
}

/// Removes a model and its unfinished download.
pub fn remove(path: &Path) -> Result<()> {
    for path in [path.to_owned(), download_of(path)] {
        match fs::remove_dir_all(&path) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(e).with_context(|| format!("{}: removing failed", path.display()));
            }
            _ => {}
        }
    }
    // The organisation's folder stays if it contains other models.
    path.parent().map(fs::remove_dir);
    Ok(())
}

/// Names of the subfolders, sorted; none if the folder does not exist.
fn entries(folder: &Path) -> Result<Vec<String>> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(vec![]),
        Err(e) => return Err(e).with_context(|| format!("{}: listing failed", folder.display())),
    };
    let folders = entries.flatten().filter(|e| e.path().is_dir());
    let mut names: Vec<String> = folders.filter_map(|e| e.file_name().into_string().ok()).collect();
    names.sort();
    Ok(names)
}

/// Size of a folder on disk; holes in sparse files do not count.
fn disk_bytes(folder: &Path) -> u64 {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let of = |entry: fs::DirEntry| match entry.metadata() {
        Ok(meta) if meta.is_dir() => disk_bytes(&entry.path()),
        Ok(meta) => larder_os::disk_bytes(&meta),
        Err(_) => 0,
    };
    entries.flatten().map(of).sum()
}
