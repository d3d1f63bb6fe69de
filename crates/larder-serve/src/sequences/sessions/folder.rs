//! The folder of saved sequences: its files, read at the start, written and removed later.

use std::fs::{self, File};
use std::hash::{Hash, Hasher};
use std::io::{self, BufReader};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::SystemTime;

use larder_core::{FIRST_IMAGE_ID, printable};
use larder_engine::{Images, SavedHead, SavedSequenceError, Sequence, SequenceOrigin};
use larder_model::Decoder;
use larder_os::{create_private_folder, open_regular_no_link, write_privately};
use parking_lot::{Mutex, MutexGuard};
use twox_hash::XxHash3_64;

use super::index::{IndexEntry, SessionIndex};

/// How the names of files end that the prefix cache writes.
pub const PREFIX_ENDING: &str = ".prefix";
/// How the names end under which files are written.
const UNFINISHED_ENDING: &str = ".tmp";
/// Bytes of a saved sequence beside its tokens and its state, at most.
const FRAME_BYTES: u64 = 256;
/// Files that are reported one by one when they are ignored.
const REPORTED_FILES: usize = 8;

/// The folder for saved sequences, and the most bytes of its files.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SessionDisk {
    /// The folder, which is made if it is not there.
    pub folder: PathBuf,
    /// The most bytes of all its sequences.
    pub limit_bytes: u64,
}

/// A folder of saved sequences, shared by the thread that decodes and the one that writes.
pub struct SessionFolder {
    path: PathBuf,
    index: Mutex<SessionIndex>,
    /// Gives numbers to the pictures of sequences.
    images: Images,
    /// Bytes of all files that were written.
    written: AtomicU64,
}

/// Why a sequence was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The files that clients named leave no room.
    #[error("there is no room for it; remove files, or raise --session-disk")]
    NoRoom,
    /// The folder or the disk refuses.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl SessionFolder {
    /// Reads the heads of the sequences in a folder. What is not of the model of `origin`, has more than `context`
    /// tokens or is damaged is reported and left alone. `images` has the numbers of pictures.
    pub fn open(disk: &SessionDisk, origin: &SequenceOrigin, context: usize, images: Images) -> io::Result<Self> {
        // Sequences hold what was said.
        create_private_folder(&disk.folder)?;
        let (mut entries, mut ignored, mut index) = (Vec::new(), Vec::new(), SessionIndex::new(disk.limit_bytes));
        for file in fs::read_dir(&disk.folder)? {
            let file = file?;
            let Ok(name) = file.file_name().into_string() else { continue };
            if !name.ends_with(PREFIX_ENDING) {
                let (is_sequence, written) = (is_sequence(&file.path()), name.strip_suffix(UNFINISHED_ENDING));
                if written.is_some_and(|name| is_sequence || name.ends_with(PREFIX_ENDING)) {
                    // What a killed server was writing.
                    let _ = fs::remove_file(file.path());
                } else if is_sequence {
                    index.add_named(&name, file.metadata()?.len());
                }
                continue;
            }
            match entry_of(&file.path(), &name, origin, context, &images) {
                Ok(entry) => entries.push(entry),
                Err(error) => ignored.push(format!("{} {error}", printable(&name))),
            }
        }
        entries.sort_by_key(|(used, _)| *used);
        entries.into_iter().for_each(|(_, entry)| index.add(entry));
        report_ignored(&disk.folder, &ignored);
        let (path, written) = (disk.folder.clone(), AtomicU64::new(0));
        let folder = SessionFolder { path, index: Mutex::new(index), images, written };
        let excess = {
            let mut index = folder.index();
            index.make_room(0, 0, None).unwrap_or_else(|| index.take_all())
        };
        folder.remove(&excess);
        Ok(folder)
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Exclusive access to the index.
    pub fn index(&self) -> MutexGuard<'_, SessionIndex> {
        // No code panics halfway through a change of the index.
        self.index.lock()
    }

    /// The sequence in a file, and the length of the file. The file becomes the most recently used one.
    pub fn read(
        &self,
        name: &str,
        decoder: &Decoder,
        context: usize,
        origin: &SequenceOrigin,
    ) -> Result<(Sequence, u64), SavedSequenceError> {
        let file = open_regular_no_link(&self.path.join(name))?;
        let bytes = file.metadata()?.len();
        let (sequence, _) = Sequence::restore(decoder, context, origin, &self.images, bytes, &mut reader(&file))?;
        // Only the order of removal after the next start depends on the time.
        let _ = file.set_modified(SystemTime::now());
        Ok((sequence, bytes))
    }

    /// Writes a sequence that left memory, and removes what it makes superfluous. One that can never fit is not
    /// written.
    pub fn write_prefix(&self, sequence: &Sequence, origin: &SequenceOrigin) -> Result<(), WriteError> {
        let (name, tokens) = (prefix_name(sequence, origin), sequence.computed_tokens().to_vec());
        let Some(excess) = self.index().make_room(most_bytes(sequence), tokens.len(), None) else { return Ok(()) };
        self.remove(&excess);
        let bytes = self.write(&name, sequence, origin)?;
        let entry = IndexEntry { name, origin: *origin, tokens, bytes };
        let continued = self.index().take_continued(&entry);
        self.remove(&continued);
        self.index().add(entry);
        Ok(())
    }

    /// Writes a sequence to a file that a client named, and returns its length.
    pub fn write_named(&self, name: &str, sequence: &Sequence, origin: &SequenceOrigin) -> Result<u64, WriteError> {
        let excess = self.index().make_room(most_bytes(sequence), 0, Some(name)).ok_or(WriteError::NoRoom)?;
        self.remove(&excess);
        let bytes = self.write(name, sequence, origin)?;
        self.index().add_named(name, bytes);
        Ok(bytes)
    }

    fn write(&self, name: &str, sequence: &Sequence, origin: &SequenceOrigin) -> io::Result<u64> {
        let path = self.path.join(name);
        write_privately(&path, |out| sequence.save(origin, &[], out))?;
        let bytes = fs::symlink_metadata(&path)?.len();
        self.written.fetch_add(bytes, Relaxed);
        Ok(bytes)
    }

    /// Bytes of all files that were written.
    pub fn written_bytes(&self) -> u64 {
        self.written.load(Relaxed)
    }

    /// Removes files. One that cannot be removed is gone from the index only.
    fn remove(&self, names: &[String]) {
        names.iter().for_each(|name| drop(fs::remove_file(self.path.join(name))));
    }
}

/// The name of the file of a sequence: equal sequences have one file.
pub fn prefix_name(sequence: &Sequence, origin: &SequenceOrigin) -> String {
    let mut hash = XxHash3_64::new();
    origin.hash(&mut hash);
    // Another process gives pictures other numbers.
    sequence.computed_tokens().iter().for_each(|id| id.min(&FIRST_IMAGE_ID).hash(&mut hash));
    sequence.pictures().for_each(|picture| picture.hash.hash(&mut hash));
    format!("{:016x}{PREFIX_ENDING}", hash.finish())
}

/// The most bytes of the file of a sequence: its pages need not be full.
fn most_bytes(sequence: &Sequence) -> u64 {
    let tokens = size_of_val(sequence.computed_tokens()) as u64;
    // Each of a layer's parts has a few bytes more.
    let state = sequence.kv_bytes() as u64;
    state + state / 64 + tokens + FRAME_BYTES
}

fn is_sequence(path: &Path) -> bool {
    open_regular_no_link(path).is_ok_and(|mut file| SavedHead::begins(&mut file))
}

fn reader(file: &File) -> BufReader<&File> {
    BufReader::with_capacity(1 << 20, file)
}

/// The index entry of a file, and when it was used.
fn entry_of(
    path: &Path,
    name: &str,
    origin: &SequenceOrigin,
    context: usize,
    images: &Images,
) -> Result<(SystemTime, IndexEntry), SavedSequenceError> {
    let file = open_regular_no_link(path)?;
    let metadata = file.metadata()?;
    let head = SavedHead::read(metadata.len(), context, images, &mut BufReader::new(&file))?;
    if !head.origin.same_model(origin) {
        return Err(SavedSequenceError::OtherModel);
    }
    let SavedHead { origin, tokens, .. } = head;
    let entry = IndexEntry { name: name.to_owned(), origin, tokens, bytes: metadata.len() };
    Ok((metadata.modified()?, entry))
}

fn report_ignored(folder: &Path, ignored: &[String]) {
    let shown = |what: &str| eprintln!("warning: ignored in {}: {what}", folder.display());
    ignored.iter().take(REPORTED_FILES).for_each(|what| shown(what));
    if ignored.len() > REPORTED_FILES {
        shown(&format!("{} more files", ignored.len() - REPORTED_FILES));
    }
}
