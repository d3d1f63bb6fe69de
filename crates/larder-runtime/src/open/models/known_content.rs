//! A cache of which content a source was found to have, so that its samples are not read at each start. An entry holds
//! for files of the same inode, length and times; anything else, also a damaged entry, only means that the content is
//! read.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use larder_os::{change_stamp, replace_file};
use larder_store::{Source, checksum_of, read_small};

/// Folder of the entries, in the user's cache folder.
const FOLDER: &str = "sources";
/// Largest entry in bytes.
const LIMIT: u64 = 1 << 20;
/// A file that was changed this recently, in seconds, could change again without a difference in its times.
const SETTLED_SECONDS: i64 = 2;

/// What an entry says if the source has a certain content.
pub struct KnownContent {
    /// The file of the entry; `None` without a cache, or if the state of the source's files is not known or not
    /// settled.
    path: Option<PathBuf>,
    /// The entry: a line for the content, and one for each file.
    entry: String,
    /// The files of the source.
    files: Vec<PathBuf>,
}

impl KnownContent {
    /// The entry for `source`, should it have `content`, which is one line. The state of its files is that of this
    /// moment.
    pub fn of(source: &dyn Source, content: &str, cache: Option<&Path>) -> Self {
        let files: Vec<PathBuf> = source.files().iter().map(|file| source.path().with_file_name(&file.name)).collect();
        let states = states(&files);
        let place = cache.zip(source.path().canonicalize().ok()).filter(|_| states.is_some());
        let path =
            place.map(|(cache, source)| cache.join(FOLDER).join(checksum_of(source.as_os_str().as_encoded_bytes())));
        KnownContent { path, entry: format!("{content}\n{}", states.unwrap_or_default()), files }
    }

    /// Whether the source was found to have the content, and its files have not been touched since.
    pub fn is_recorded(&self) -> bool {
        let read = |path: &PathBuf| read_small(path, LIMIT).ok().flatten();
        self.path.as_ref().and_then(read).is_some_and(|found| found == self.entry.as_bytes())
    }

    /// Records that the source has the content. A failure to write, and files that were touched since, leave no entry.
    pub fn record(&self) {
        let unchanged = states(&self.files).is_some_and(|states| self.entry.ends_with(&states));
        let Some((path, folder)) = self.path.as_ref().filter(|_| unchanged).and_then(|p| Some((p, p.parent()?))) else {
            return;
        };
        let temp = path.with_extension(std::process::id().to_string());
        let written = fs::create_dir_all(folder).and_then(|()| fs::write(&temp, &self.entry));
        if written.and_then(|()| replace_file(&temp, path)).is_err() {
            let _ = fs::remove_file(&temp);
        }
    }
}

/// The last change of each file, a line for each; `None` if a file cannot be looked at or was changed a moment ago.
fn states(files: &[PathBuf]) -> Option<String> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?.as_secs() as i64;
    let state = |path: &PathBuf| {
        let last = change_stamp(path)?;
        (last.seconds < now - SETTLED_SECONDS).then(|| format!("{}\n", last.text))
    };
    files.iter().map(state).collect()
}
