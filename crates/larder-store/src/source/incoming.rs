use std::{ops::Range, sync::Arc};

use crate::{error::Result, file::ReadAt};

/// Files of a checkpoint that come one after the other while those before them are already being read.
pub trait IncomingFiles: Send + Sync {
    /// The length of the file `name` and the JSON of its header, which are known before the data are there.
    fn header(&self, name: &str) -> Result<(u64, Vec<u8>)>;

    /// Waits until the bytes `range` of the file `name` are there, and returns the file.
    fn file(&self, name: &str, range: Range<u64>) -> Result<Arc<ReadAt>>;

    /// The bytes `range` of the file `name` will not be asked for again by this conversion.
    fn release(&self, name: &str, range: Range<u64>) -> Result<()>;
}
