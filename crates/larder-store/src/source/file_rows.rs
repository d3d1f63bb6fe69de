//! Rows of a matrix that are read one by one from a file of a source.

use std::sync::Arc;

use larder_core::{TensorMeta, TensorRows, TensorsError};

use crate::{
    error::{StoreError, StoreErrorKind},
    files::read_at::ReadAt,
};

/// A matrix in a file.
pub(super) struct FileRows {
    meta: TensorMeta,
    row_bytes: usize,
    file: Arc<ReadAt>,
    /// First byte of the first row.
    start: u64,
}

impl FileRows {
    /// The matrix `meta`, which begins at byte `start`; `None` if it is no matrix with rows.
    pub fn open(meta: TensorMeta, file: Arc<ReadAt>, start: u64) -> Option<Arc<dyn TensorRows>> {
        let [_, cols] = meta.shape[..] else { return None };
        let row_bytes = meta.kind.row_bytes(cols).filter(|bytes| *bytes > 0)?;
        Some(Arc::new(FileRows { meta, row_bytes, file, start }))
    }
}

impl TensorRows for FileRows {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    fn read_rows(&self, rows: &[usize], into: &mut [u8]) -> Result<(), TensorsError> {
        if let Some(row) = rows.iter().find(|row| **row >= self.meta.shape[0]) {
            let what = format!("has no row {row} of a matrix of {:?}", self.meta.shape);
            return Err(StoreError::new(StoreErrorKind::Missing, self.file.path(), what).into());
        }
        let place = |row: &usize| self.start + *row as u64 * self.row_bytes as u64;
        if rows.len() > 1 {
            rows.iter().for_each(|row| self.file.will_need(place(row), self.row_bytes));
        }
        for (row, into) in rows.iter().zip(into.chunks_exact_mut(self.row_bytes)) {
            self.file.read(place(row), into)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use larder_core::NumberFormat;

    use super::*;

    #[test]
    fn rows_are_those_of_the_file_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        std::fs::write(&path, [9, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9]).unwrap();
        let file = Arc::new(ReadAt::open(&path).unwrap());
        let meta = |shape: &[usize]| TensorMeta::new(NumberFormat::F16, shape.to_vec()).unwrap();
        let rows = FileRows::open(meta(&[5, 1]), file.clone(), 1).unwrap();
        let read = |wanted: &[usize]| {
            let mut bytes = vec![0xff; 2 * wanted.len()];
            rows.read_rows(wanted, &mut bytes).map(|()| bytes).map_err(|e| e.to_string())
        };
        assert_eq!(read(&[4, 0, 2, 3, 0]).unwrap(), [8, 9, 0, 1, 4, 5, 6, 7, 0, 1]);
        assert_eq!(read(&[1]).unwrap(), [2, 3]);
        assert!(read(&[1, 5]).unwrap_err().contains("has no row 5 of a matrix of [5, 1]"));
        assert!(FileRows::open(meta(&[5]), file, 0).is_none());
    }
}
