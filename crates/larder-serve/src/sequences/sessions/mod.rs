//! Sequences on disk: those that left the prefix cache, and those that clients saved.
//!
//! [`SessionIndex`](index::SessionIndex) knows the tokens of each file, [`SessionFolder`](folder::SessionFolder) reads
//! and writes files, [`SessionWriter`] is the thread that writes. [`Sessions`] is what the decode thread sees of them.

mod folder;
mod index;
mod writer;

use std::io;
use std::sync::Arc;

use larder_core::{common_prefix, printable};
use larder_engine::{Images, SavedSequenceError, Sequence, SequenceOrigin};
use larder_model::Decoder;

pub use folder::{PREFIX_ENDING, SessionDisk, WriteError};
use folder::{SessionFolder, prefix_name};
pub use index::index_bytes;
use writer::{AfterWrite, SessionWriter, WriteTask};

/// Shorter sequences are computed sooner than they are read.
const TOKENS_MIN: usize = 16;

/// Saved sequences of a server.
pub struct Sessions {
    folder: Arc<SessionFolder>,
    writer: SessionWriter,
    context: usize,
}

impl Sessions {
    /// Opens the folder and starts the thread that writes. The pictures of saved sequences get the numbers that
    /// `images` has for them.
    pub fn open(disk: &SessionDisk, origin: &SequenceOrigin, context: usize, images: Images) -> io::Result<Self> {
        let failed = |error| {
            let folder = disk.folder.display();
            io::Error::other(format!("{folder}: {error}; name a folder that can be read with --session-dir"))
        };
        let folder = Arc::new(SessionFolder::open(disk, origin, context, images).map_err(failed)?);
        Ok(Sessions { writer: SessionWriter::start(folder.clone())?, folder, context })
    }

    /// Bytes of all files that were written.
    pub fn written_bytes(&self) -> u64 {
        self.folder.written_bytes()
    }

    /// Waits until all is written, and returns the bytes that were.
    pub fn end(self) -> u64 {
        let folder = self.folder.clone();
        drop(self);
        folder.written_bytes()
    }

    /// Saves a sequence that leaves memory, in the background. Waits for the one before.
    pub fn save(&self, sequence: Sequence, origin: &SequenceOrigin) {
        let is_worth_it = sequence.computed_tokens().len() >= TOKENS_MIN;
        if is_worth_it && !self.folder.index().touch(&prefix_name(&sequence, origin)) {
            self.writer.write(WriteTask { sequence, origin: *origin, named: None });
        }
    }

    /// Saves a sequence to the file that a client named, in the background.
    pub fn save_named(&self, name: String, sequence: Sequence, origin: &SequenceOrigin, after: AfterWrite) {
        self.writer.write(WriteTask { sequence, origin: *origin, named: Some((name, after)) });
    }

    /// The file of the saved sequence that shares most with a prompt, if `is_worth` says so of the shared and of all
    /// tokens of it.
    pub fn find(
        &self,
        prompt: &[u32],
        origin: &SequenceOrigin,
        is_worth: impl Fn(usize, usize) -> bool,
    ) -> Option<String> {
        let shared = |tokens: &[u32]| {
            let shared = common_prefix(tokens, &prompt[..prompt.len().saturating_sub(1)]);
            Some(shared).filter(|shared| *shared >= TOKENS_MIN && is_worth(*shared, tokens.len()))
        };
        let mut index = self.folder.index();
        let (name, _) = index.best(origin, shared)?;
        // Not the next to make room.
        index.touch(&name);
        Some(name)
    }

    /// Reads a sequence that [`find`](Self::find) named. One that cannot be read is reported and found no more.
    pub fn read(&self, name: &str, decoder: &Decoder, origin: &SequenceOrigin) -> Option<Sequence> {
        match self.folder.read(name, decoder, self.context, origin) {
            Ok((sequence, _)) => Some(sequence),
            Err(error) => {
                // It may have made room meanwhile.
                if !error.is_missing() {
                    eprintln!("warning: ignored in {}: {name} {error}", self.folder.path().display());
                }
                self.folder.index().forget(name);
                None
            }
        }
    }

    /// Reads a sequence from the file that a client named, and returns the length of the file with it.
    pub fn read_named(
        &self,
        name: &str,
        decoder: &Decoder,
        origin: &SequenceOrigin,
    ) -> Result<(Sequence, u64), SavedSequenceError> {
        self.folder.read(name, decoder, self.context, origin)
    }
}

/// Checks a name that a client gives to a file: it stays in the folder, and is none of the prefix cache.
pub fn check_name(name: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    // Some file systems tell neither case nor a dot at the end apart.
    let lower = name.to_ascii_lowercase();
    let is_taken = [PREFIX_ENDING, ".tmp", "."].iter().any(|ending| lower.ends_with(ending));
    if name.is_empty() || name.len() > 128 || name.starts_with('.') || is_taken || !name.chars().all(is_plain) {
        return Err(format!(
            "'{}' is not a plain name: up to 128 letters, digits, dots, hyphens and underscores, no dot at the start, and neither a \
             dot nor .prefix nor .tmp at the end",
            printable(name)
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_in_the_folder() {
        for good in ["a", "chat-1.bin", "A_b.c.d", &"x".repeat(128)] {
            assert_eq!(check_name(good), Ok(()), "{good}");
        }
        let long = "x".repeat(129);
        let paths = ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a b", "é", "a\0", "a:b", &long];
        let taken = ["c.prefix", "x.bin.tmp", "c.PREFIX", "c.Tmp", "c.prefix.", "c."];
        for bad in paths.iter().chain(&taken) {
            assert!(check_name(bad).is_err(), "{bad}");
        }
    }
}
