//! Checkpoint files that are still being downloaded.

use std::{ops::Range, sync::Arc};

use crate::{error::Result, file::ReadAt};

/// The weight files of a checkpoint that is still being downloaded, file by file, while earlier files are converted.
pub trait IncomingFiles: Send + Sync {
    /// Length of the file `name` in bytes, and the JSON of its header; both are known before the data.
    fn header(&self, name: &str) -> Result<(u64, Vec<u8>)>;

    /// Waits until the bytes `range` of the file `name` are on disk, and returns the file.
    fn file(&self, name: &str, range: Range<u64>) -> Result<Arc<ReadAt>>;

    /// Says that this conversion does not need the bytes `range` of the file `name` again.
    fn release(&self, name: &str, range: Range<u64>) -> Result<()>;
}
