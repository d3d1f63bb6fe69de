//! A file of a store that is opened again after its drive was away.

use std::{path::Path, sync::Arc};

use parking_lot::Mutex;

use crate::{
    drives::presence::StorePresence,
    error::{Result, StoreError},
    files::read_at::ReadAt,
};

/// A file that is read at scattered offsets while a model runs.
pub(crate) struct WatchedFile {
    /// The open file, and the generation of the folder that it was opened in.
    open: Mutex<(Arc<ReadAt>, u64)>,
    /// The store in whose first folder the file is.
    presence: Option<Arc<StorePresence>>,
}

impl WatchedFile {
    /// A file that stays open, unless its store is watched.
    pub fn new(file: ReadAt) -> Self {
        file.advise_random();
        WatchedFile { open: Mutex::new((Arc::new(file), 0)), presence: None }
    }

    /// Opens it again from now on when the drive of its store was away.
    pub fn watch(&mut self, presence: Arc<StorePresence>) {
        self.presence = Some(presence);
    }

    /// The open file, which is not opened again.
    pub fn opened(&self) -> Arc<ReadAt> {
        self.open.lock().0.clone()
    }

    /// Fills `into` from byte `offset` on.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.current().and_then(|file| file.read(offset, into)).map_err(|error| match &self.presence {
            Some(presence) => presence.failed(0, error),
            None => error,
        })
    }

    /// The open file, opened again if its drive was away.
    fn current(&self) -> Result<Arc<ReadAt>> {
        let Some(presence) = &self.presence else { return Ok(self.opened()) };
        let generation = presence.generation(0)?;
        let mut open = self.open.lock();
        if open.1 != generation {
            let (path, bytes) = (open.0.path(), open.0.len());
            let file = ReadAt::open(path)?;
            check_len(path, file.len(), bytes)?;
            file.advise_random();
            *open = (Arc::new(file), generation);
        }
        Ok(open.0.clone())
    }
}

fn check_len(path: &Path, found: u64, expected: u64) -> Result<()> {
    if found == expected {
        Ok(())
    } else {
        Err(StoreError::malformed(path, format!("is {found} bytes long, expected {expected}")))
    }
}
