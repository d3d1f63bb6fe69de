//! Reads rows of a table.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use larder_core::TensorMeta;
use parking_lot::Mutex;
use twox_hash::XxHash3_128;

use crate::{
    check_reads::ReadChecks,
    drives::{presence::StorePresence, watched_file::WatchedFile},
    error::{Result, StoreError, StoreErrorKind},
    files::{checksum::checksum_of, read_at::ReadAt, safetensors::DATA_START},
    manifest::{CHECKSUM_BYTES, TableFile},
    progress::Progress,
};

/// An open row table.
pub struct RowTable {
    file: WatchedFile,
    table: TableFile,
    meta: TensorMeta,
    /// The checksums of all blocks.
    checksums: Vec<u8>,
    /// Per block, whether it was verified in this run.
    verified: Vec<AtomicBool>,
    checks: Arc<ReadChecks>,
    /// The block that is being checked.
    buffer: Mutex<Vec<u8>>,
}

impl RowTable {
    /// Opens a table of the store at `store`: checks its length, its header and the checksums of its blocks.
    ///
    /// The caller guarantees that `table` passed [`TableFile::check`].
    pub fn open(store: &Path, table: &TableFile) -> Result<Self> {
        let path = store.join(table.path());
        let (opened, found) = Self::open_unlisted(&path, table)?;
        if found != table.checksum {
            let what = "does not match the manifest: the checksums of its rows differ";
            return Err(StoreError::new(StoreErrorKind::Mismatch, &path, what));
        }
        Ok(opened)
    }

    /// As [`open`](Self::open), also returns the checksum that the manifest should have.
    pub(super) fn open_unlisted(path: &Path, table: &TableFile) -> Result<(Self, String)> {
        let file = ReadAt::open(path)?;
        if file.len() != table.file_bytes() as u64 {
            let what = format!("is {} bytes long, expected {}", file.len(), table.file_bytes());
            return Err(StoreError::malformed(path, what));
        }
        if file.read_vec(0, DATA_START as u64)? != table.header() {
            let what = "does not match the manifest: its header differs";
            return Err(StoreError::new(StoreErrorKind::Mismatch, path, what));
        }
        let checksums = file.read_vec(table.checksums_start() as u64, table.checksums_bytes() as u64)?;
        let found = checksum_of(&checksums);
        let verified = (0..table.blocks()).map(|_| AtomicBool::new(false)).collect();
        let (meta, table, checks) = (table.meta(), table.clone(), Arc::new(ReadChecks::new()));
        let file = WatchedFile::new(file);
        Ok((RowTable { file, meta, table, checksums, verified, checks, buffer: Mutex::default() }, found))
    }

    /// Opens the table again from now on when the drive of its store was away, and checks reads as the store says.
    pub(crate) fn watch(&mut self, presence: &Arc<StorePresence>) {
        self.checks = presence.checks().clone();
        self.file.watch(presence.clone());
    }

    /// Which reads are checked from now on.
    #[cfg(test)]
    pub fn set_checks(&self, checks: crate::check_reads::CheckReads) {
        self.checks.set(checks);
    }

    /// Number format and shape, `[rows, cols]`.
    pub fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.table.row_bytes()
    }

    /// Reads row `row`, whose length `into` must have.
    pub fn read_row(&self, row: usize, into: &mut [u8]) -> Result<()> {
        self.read_rows(&[row], into)
    }

    /// Reads several rows, one after the other into `into`. The SSD reads them at the same time.
    pub fn read_rows(&self, rows: &[usize], into: &mut [u8]) -> Result<()> {
        let bytes = self.row_bytes();
        assert_eq!(into.len(), rows.len() * bytes, "the buffer must have the length of the rows");
        if let Some(row) = rows.iter().find(|row| **row >= self.table.rows) {
            let what = format!("has no row {row}; it has {}", self.table.rows);
            return Err(StoreError::new(StoreErrorKind::Missing, self.file.opened().path(), what));
        }
        // Rows that follow each other are read together, so that a block of them is checked once.
        let runs = || rows.chunk_by(|row, next| *next == row + 1);
        if runs().nth(1).is_some() {
            runs().for_each(|run| self.announce(run[0], run.len()));
        }
        let mut rest = into;
        runs().try_for_each(|run| {
            let piece = rest.split_off_mut(..run.len() * bytes).expect("the length was checked");
            self.read(run[0] * bytes, piece)
        })
    }

    /// Starts reading some rows, with their blocks if these are checked.
    fn announce(&self, first: usize, count: usize) {
        let (bytes, each, end) = (self.row_bytes(), self.table.block_rows, first + count);
        let (from, to) = if (first / each..=(end - 1) / each).all(|block| self.is_trusted(block)) {
            (first, end)
        } else {
            (first / each * each, end.next_multiple_of(each))
        };
        self.file.opened().will_need((DATA_START + from * bytes) as u64, (to - from) * bytes);
    }

    /// Whether a block was verified and is not to be verified again.
    fn is_trusted(&self, block: usize) -> bool {
        self.verified[block].load(Ordering::Relaxed) && !self.checks.again()
    }

    /// Reads bytes of the matrix from byte `offset` on. A block that is checked is read as a whole, see
    /// [`CheckReads`](crate::CheckReads).
    ///
    /// The caller guarantees that the range lies inside the matrix.
    pub fn read(&self, offset: usize, into: &mut [u8]) -> Result<()> {
        let block_bytes = self.table.block_rows * self.row_bytes();
        let (mut at, mut rest) = (offset, into);
        while !rest.is_empty() {
            let (block, within) = (at / block_bytes, at % block_bytes);
            let (piece, after) = rest.split_at_mut(rest.len().min(block_bytes - within));
            if self.is_trusted(block) {
                self.file.read((DATA_START + at) as u64, piece)?;
            } else {
                let mut buffer = self.buffer.lock();
                piece.copy_from_slice(&self.verified_block(block, &mut buffer)?[within..][..piece.len()]);
            }
            at += piece.len();
            rest = after;
        }
        Ok(())
    }

    /// Reads a block into `buffer` and compares it with its checksum; returns its bytes.
    fn verified_block<'a>(&self, block: usize, buffer: &'a mut Vec<u8>) -> Result<&'a [u8]> {
        let block_bytes = self.table.block_rows * self.row_bytes();
        let start = block * block_bytes;
        let len = block_bytes.min(self.meta.bytes - start);
        // The file had this length when it was opened, so the allocation is bounded by a real file.
        buffer.resize(len, 0);
        let bytes = buffer.as_mut_slice();
        self.file.read((DATA_START + start) as u64, bytes)?;
        if XxHash3_128::oneshot(bytes).to_be_bytes() != self.checksums[block * CHECKSUM_BYTES..][..CHECKSUM_BYTES] {
            let first = block * self.table.block_rows;
            let at = DATA_START + start;
            let what = format!("rows {first} and following, {len} bytes at {at}, do not match their checksum");
            return Err(StoreError::new(StoreErrorKind::Mismatch, self.file.opened().path(), what));
        }
        self.verified[block].store(true, Ordering::Relaxed);
        Ok(bytes)
    }

    /// Reads everything and compares it with the checksums.
    pub(crate) fn check(&self, progress: &dyn Progress) -> Result<()> {
        let mut buffer = vec![];
        for block in 0..self.table.blocks() {
            progress.advance(self.verified_block(block, &mut buffer)?.len() as u64);
        }
        let end = DATA_START + self.meta.bytes;
        let pad = self.file.opened().read_vec(end as u64, (self.table.checksums_start() - end) as u64)?;
        match pad.iter().position(|b| *b != 0) {
            None => Ok(()),
            Some(at) => {
                let what = format!("the padding is not zero at byte {}", end + at);
                Err(StoreError::new(StoreErrorKind::Mismatch, self.file.opened().path(), what))
            }
        }
    }
}

impl larder_core::TensorRows for RowTable {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    fn read_rows(&self, rows: &[usize], into: &mut [u8]) -> Result<(), larder_core::TensorsError> {
        Ok(RowTable::read_rows(self, rows, into)?)
    }

    fn kept_bytes(&self) -> usize {
        self.checksums.len() + self.verified.len()
    }
}
