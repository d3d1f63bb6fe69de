//! Folders and words of sysfs.

use std::fs;
use std::path::{Path, PathBuf};

/// The subfolders of a folder, sorted; none if it cannot be read.
pub(super) fn folders(path: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(path).into_iter().flatten();
    let mut all: Vec<PathBuf> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
    all.sort();
    all
}

/// The text of a file, without the line break.
pub(super) fn read_word(dir: &Path, name: &str) -> Option<String> {
    Some(fs::read_to_string(dir.join(name)).ok()?.trim().to_owned())
}

#[cfg(test)]
pub(super) mod tests {
    use std::fs;

    /// A folder with these files.
    pub fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        root
    }
}
