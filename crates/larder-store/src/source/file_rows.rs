//! Rows of a matrix that are read one by one from the files of a source.

use std::sync::Arc;

use larder_core::{TensorMeta, TensorRows, TensorsError};

use crate::{
    error::{Result, StoreError, StoreErrorKind},
    file::ReadAt,
};

/// Consecutive rows of a matrix in a file.
pub(super) struct FilePart {
    pub file: Arc<ReadAt>,
    /// First byte of the first row.
    pub start: u64,
    pub rows: usize,
}

/// A matrix in one or several files.
pub(super) struct FileRows {
    meta: TensorMeta,
    row_bytes: usize,
    /// With the first row of each.
    parts: Vec<(usize, FilePart)>,
}

impl FileRows {
    /// The matrix `meta`, whose rows are those of `parts`, one after the other; `None` if it is no matrix with rows.
    pub fn open(meta: TensorMeta, parts: Vec<FilePart>) -> Option<Arc<dyn TensorRows>> {
        let [_, cols] = meta.shape[..] else { return None };
        let row_bytes = meta.kind.row_bytes(cols).filter(|bytes| *bytes > 0)?;
        let starts = parts.iter().scan(0, |next, part| Some(std::mem::replace(next, *next + part.rows)));
        let parts = starts.collect::<Vec<_>>().into_iter().zip(parts).collect();
        Some(Arc::new(FileRows { meta, row_bytes, parts }))
    }

    /// File and offset of a row.
    fn place(&self, row: usize) -> Result<(&ReadAt, u64)> {
        let after = self.parts.partition_point(|(first, _)| *first <= row);
        // There is a part, and the first begins with row 0.
        let (first, part) = &self.parts[after - 1];
        match row - first < part.rows {
            true => Ok((&part.file, part.start + (row - first) as u64 * self.row_bytes as u64)),
            false => {
                let what = format!("has no row {row} of a matrix of {:?}", self.meta.shape);
                Err(StoreError::new(StoreErrorKind::Missing, part.file.path(), what))
            }
        }
    }
}

impl TensorRows for FileRows {
    fn meta(&self) -> &TensorMeta {
        &self.meta
    }

    fn read_rows(&self, rows: &[usize], into: &mut [u8]) -> Result<(), TensorsError> {
        let places = rows.iter().map(|row| self.place(*row)).collect::<Result<Vec<_>>>()?;
        if let [_, _, ..] = places[..] {
            places.iter().for_each(|(file, at)| file.will_need(*at, self.row_bytes));
        }
        for ((file, at), into) in places.into_iter().zip(into.chunks_exact_mut(self.row_bytes)) {
            file.read(at, into)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use larder_core::NumberFormat;

    use super::*;

    #[test]
    fn rows_are_those_of_the_parts_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            Arc::new(ReadAt::open(&path).unwrap())
        };
        let [first, second] = [file("a", &[9, 0, 1, 2, 3, 4, 5, 9]), file("b", &[6, 7, 8, 9])];
        let part = |file, start, rows| FilePart { file, start, rows };
        let parts = vec![part(first.clone(), 1, 3), part(second, 0, 2)];
        let meta = |shape: &[usize]| TensorMeta::new(NumberFormat::F16, shape.to_vec()).unwrap();
        let rows = FileRows::open(meta(&[5, 1]), parts).unwrap();
        let read = |wanted: &[usize]| {
            let mut bytes = vec![0xff; 2 * wanted.len()];
            rows.read_rows(wanted, &mut bytes).map(|()| bytes).map_err(|e| e.to_string())
        };
        assert_eq!(read(&[4, 0, 2, 3, 0]).unwrap(), [8, 9, 0, 1, 4, 5, 6, 7, 0, 1]);
        assert_eq!(read(&[1]).unwrap(), [2, 3]);
        assert!(read(&[1, 5]).unwrap_err().contains("has no row 5 of a matrix of [5, 1]"));
        assert!(FileRows::open(meta(&[5]), vec![part(first, 0, 5)]).is_none());
    }
}
