//! One model on the hub: the files that are needed, and their download.

use std::fs;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use larder_os::{FolderLock, LOCK_FILE, read_regular_text, write_atomically};
use larder_store::{
    Checkpoint, PROCESSORS, QUANTISATION, Result, SIDECARS, StoreError, StoreErrorKind, is_bare_file_name,
};

use crate::DownloadProgress;
use crate::background_download::BackgroundDownload;
use crate::client::Hub;
use crate::download::{self, DownloadRequest};
use crate::errors::{HubError, error};
use crate::listing::{Listing, RemoteFile};
use crate::percent::encoded;

const CONFIG: &str = "config.json";
const INDEX: &str = "model.safetensors.index.json";
/// Most bytes of a file that is not weights.
const MAX_SMALL_FILE_BYTES: u64 = 256 << 20;
const MAX_LISTING_BYTES: u64 = 64 << 20;
/// Name of the file that records the commit of a download.
const COMMIT_FILE: &str = "commit";
/// Its name until it is complete.
const COMMIT_TEMP: &str = "commit.tmp";
/// Maximum length of that file.
const COMMIT_BYTES: u64 = 1 << 10;
/// Most GGUF files that an error lists.
const MAX_NAMES_SHOWN: usize = 6;

/// A model on the hub at a fixed commit, downloaded into a folder.
pub struct Repo {
    hub: Arc<Hub>,
    name: String,
    listing: Listing,
    folder: PathBuf,
    progress: Arc<dyn DownloadProgress>,
    _lock: FolderLock,
}

impl Repo {
    /// Looks up the model `name` (`org/name`) at `revision`, for a download into `folder`. A download that was started
    /// there is resumed at its commit.
    pub fn open(
        hub: Hub,
        name: &str,
        revision: &str,
        folder: &Path,
        progress: Arc<dyn DownloadProgress>,
    ) -> Result<Self> {
        let fresh = !folder.exists();
        fs::create_dir_all(folder).map_err(|e| StoreError::io(folder, "creating the folder", e))?;
        let lock = lock(folder)?;
        let pinned = folder.join(COMMIT_FILE);
        let resumed = read_regular_text(&pinned, COMMIT_BYTES)
            .ok()
            .filter(|c| !c.is_empty() && c.bytes().all(|b| b.is_ascii_hexdigit()));
        let revision = resumed.as_deref().unwrap_or(revision);
        let url = format!("{}/api/models/{name}/revision/{}?blobs=true", hub.endpoint(), encoded(revision));
        let json = hub.with_retries(progress.as_ref(), || read_all(&url, hub.get(&url, None)?.body, MAX_LISTING_BYTES));
        // A name that is not there leaves nothing behind.
        let json = json.inspect_err(|_| _ = fresh.then(|| fs::remove_dir_all(folder)))?;
        let listing = Listing::parse(name, &json)?;
        if resumed.is_none() {
            check_unused(folder)?;
            pin(folder, &listing.commit)?;
        }
        let (name, folder) = (name.to_owned(), folder.to_owned());
        Ok(Repo { hub: Arc::new(hub), name, listing, folder, progress, _lock: lock })
    }

    /// The model as a checkpoint whose weights are downloaded while it is read.
    pub fn checkpoint(&self) -> Result<Checkpoint> {
        let Some(config) = self.listing.get(CONFIG) else { return Err(self.no_checkpoint()) };
        self.small(config)?;
        for name in SIDECARS.into_iter().chain(PROCESSORS).chain([QUANTISATION]) {
            self.listing.get(name).map_or(Ok(()), |file| self.small(file))?;
        }
        let names: Vec<&str> = self.listing.names().filter(|name| is_bare_file_name(name)).collect();
        if !names.contains(&"model.safetensors") {
            self.small(self.listing.get(INDEX).ok_or_else(|| self.no_checkpoint())?)?;
        }
        let weights = Checkpoint::weight_files(&self.folder, &names)?;
        let weights = weights.iter().map(|name| self.remote(name).cloned()).collect::<Result<Vec<_>>>()?;
        let (hub, progress) = (self.hub.clone(), self.progress.clone());
        let download = BackgroundDownload::start(hub, &self.folder, &self.base(), weights, progress)?;
        Checkpoint::incoming(&self.folder, Arc::new(download))
    }

    /// Downloads one GGUF file, or all parts of a split one, and returns the path of the first.
    pub fn gguf(&self, name: &str) -> Result<PathBuf> {
        let plain = |name: &str| name.rsplit('/').next().unwrap_or_default().to_owned();
        let mut first = None;
        for part in parts(name) {
            let file = self.remote(&part)?;
            let local = plain(&part);
            if !is_bare_file_name(&local) {
                return Err(error(StoreErrorKind::Unsupported, format!("'{part}' is not a valid file name")));
            }
            let path = self.folder.join(local);
            self.fetch(file, &path)?;
            first.get_or_insert(path);
        }
        first.ok_or_else(|| error(StoreErrorKind::Missing, format!("{}: has no file '{name}'", self.name)))
    }

    fn remote(&self, name: &str) -> Result<&RemoteFile> {
        let missing = || error(StoreErrorKind::Missing, format!("{}: has no file '{name}'{}", self.name, self.ggufs()));
        self.listing.get(name).ok_or_else(missing)
    }

    fn no_checkpoint(&self) -> StoreError {
        let what = format!("{}: has no config.json with safetensors files{}", self.name, self.ggufs());
        error(StoreErrorKind::Missing, what)
    }

    /// Ends an error with the GGUF files that the model has.
    fn ggufs(&self) -> String {
        let all: Vec<&str> =
            self.listing.names().filter(|name| name.ends_with(".gguf")).take(MAX_NAMES_SHOWN).collect();
        if all.is_empty() {
            String::new()
        } else {
            format!("; choose one of its GGUF files as {}:FILE: {}", self.name, all.join(", "))
        }
    }

    fn base(&self) -> String {
        format!("{}/{}/resolve/{}", self.hub.endpoint(), self.name, self.listing.commit)
    }

    /// Downloads a file that is not weights.
    fn small(&self, file: &RemoteFile) -> Result<()> {
        if file.bytes > MAX_SMALL_FILE_BYTES {
            let what = format!(
                "{}: {} has {} bytes, more than the limit of {MAX_SMALL_FILE_BYTES}",
                self.name, file.name, file.bytes
            );
            return Err(error(StoreErrorKind::Malformed, what));
        }
        self.fetch(file, &self.folder.join(&file.name))
    }

    fn fetch(&self, remote: &RemoteFile, path: &Path) -> Result<()> {
        let url = format!("{}/{}", self.base(), remote.name.split('/').map(encoded).collect::<Vec<_>>().join("/"));
        let (hub, progress, stop) = (self.hub.as_ref(), self.progress.as_ref(), &AtomicBool::new(false));
        download::fetch(&DownloadRequest { hub, url: &url, remote, progress, stop }, path)
    }
}

impl Hub {
    /// Downloads the bytes `range` of `url`.
    pub(crate) fn part(&self, url: &str, range: Range<u64>, progress: &dyn DownloadProgress) -> Result<Vec<u8>> {
        self.with_retries(progress, || {
            let response = self.get(url, Some((range.start, Some(range.end - 1))))?;
            let skip = if response.partial { 0 } else { range.start };
            let mut body = response.body.take(skip + (range.end - range.start));
            let mut bytes = Vec::new();
            let read = std::io::copy(&mut body.by_ref().take(skip), &mut std::io::sink());
            let read = read.and_then(|_| body.read_to_end(&mut bytes));
            read.map_err(|e| HubError::transient(format!("{url}: {e}")))?;
            if bytes.len() as u64 == range.end - range.start {
                Ok(bytes)
            } else {
                Err(HubError::transient(format!("{url}: the connection ended too early")))
            }
        })
    }
}

fn read_all(url: &str, body: impl Read, limit: u64) -> Result<Vec<u8>, HubError> {
    let mut bytes = Vec::new();
    body.take(limit + 1).read_to_end(&mut bytes).map_err(|e| HubError::transient(format!("{url}: {e}")))?;
    if bytes.len() as u64 > limit {
        Err(HubError::permanent(StoreErrorKind::Malformed, format!("{url}: the response has more than {limit} bytes")))
    } else {
        Ok(bytes)
    }
}

/// Refuses a download folder with files of an unknown commit: they are known by name and length only, and could be
/// taken for those of another commit.
fn check_unused(folder: &Path) -> Result<()> {
    let entries = fs::read_dir(folder).map_err(|e| StoreError::io(folder, "listing", e))?;
    let names = entries.flatten().map(|entry| entry.file_name());
    match names.into_iter().find(|name| name != COMMIT_FILE && name != COMMIT_TEMP && name != LOCK_FILE) {
        Some(name) => {
            let name = name.to_string_lossy();
            let what = format!("holds '{name}', but no record of the commit that it belongs to; remove the folder");
            Err(StoreError::new(StoreErrorKind::Taken, folder, what))
        }
        None => Ok(()),
    }
}

/// Records the commit, at once or not at all.
fn pin(folder: &Path, commit: &str) -> Result<()> {
    let path = folder.join(COMMIT_FILE);
    write_atomically(&path, |out| out.write_all(commit.as_bytes())).map_err(|e| StoreError::io(&path, "writing", e))
}

fn lock(folder: &Path) -> Result<FolderLock> {
    FolderLock::take(folder).map_err(|e| match e.kind() {
        io::ErrorKind::WouldBlock => StoreError::new(StoreErrorKind::Taken, folder, "is in use by another download"),
        _ => StoreError::io(folder, "locking", e),
    })
}

/// The names of all parts of a GGUF file; its own name if it is not split.
fn parts(name: &str) -> Vec<String> {
    let numbers = || {
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let five =
            |text: &str| (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok());
        let (_, count): (u32, u32) = (five(number)??, five(count)??);
        Some((stem, count))
    };
    match numbers() {
        Some((stem, count)) => (1..=count).map(|n| format!("{stem}-{n:05}-of-{count:05}.gguf")).collect(),
        None => vec![name.to_owned()],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_listed() {
        assert_eq!(parts("a.gguf"), ["a.gguf"]);
        assert_eq!(parts("d/a-00002-of-00002.gguf"), ["d/a-00001-of-00002.gguf", "d/a-00002-of-00002.gguf"]);
        assert_eq!(parts("a-2-of-3.gguf"), ["a-2-of-3.gguf"]);
    }
}
