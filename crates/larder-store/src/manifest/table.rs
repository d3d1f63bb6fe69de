//! What the manifest says about a row table, and the file that follows from it.

use std::path::PathBuf;

use larder_core::{NumberFormat, TensorMeta};
use serde::{Deserialize, Serialize};

use crate::files::{
    describe::{describe, stored_shape},
    safetensors::{DATA_START, Dtype, HeaderWriter, dtype_of},
};

/// Folder of the row tables.
pub const TABLES: &str = "tables";
/// Rows share a block as long as it has at most this many bytes.
pub const BLOCK_BYTES: usize = 64 << 10;
/// Bytes of a block's checksum: XXH3 of 128 bits, most significant byte first.
pub const CHECKSUM_BYTES: usize = 16;
/// Alignment of the checksums in bytes.
const ALIGN: usize = 64;
/// Longest name of a table, so that it is a file name and the header fits.
const NAME_MAX: usize = 128;
/// Name of the tensor with the checksums. It begins with a character that names of tables do not begin with.
const CHECKSUMS: &str = "_checksums";

/// A row table of a store.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableFile {
    /// Name of its tensor, and of the file in `tables/`.
    pub name: String,
    /// Number format of its values.
    pub kind: NumberFormat,
    /// Number of rows.
    pub rows: usize,
    /// Values per row, a whole number of blocks of `kind`.
    pub cols: usize,
    /// Rows that share a checksum: as many as have 64 KiB, at least one.
    pub block_rows: usize,
    /// Checksum of the checksums.
    pub checksum: String,
}

impl TableFile {
    /// A table of this shape, without its checksum; `None` if it has no rows of whole blocks or is too large to
    /// address.
    pub fn new(name: &str, kind: NumberFormat, rows: usize, cols: usize) -> Option<Self> {
        let row_bytes = kind.row_bytes(cols).filter(|bytes| *bytes > 0)?;
        let block_rows = (BLOCK_BYTES / row_bytes).max(1);
        let table = TableFile { name: name.to_owned(), kind, rows, cols, block_rows, checksum: String::new() };
        let data = kind.matrix_bytes(rows, cols)?.checked_next_multiple_of(ALIGN)?;
        let sums = rows.div_ceil(block_rows).checked_mul(CHECKSUM_BYTES)?;
        let end = data.checked_add(sums)?.checked_add(DATA_START)?;
        (rows > 0 && is_name(name) && end <= isize::MAX as usize).then_some(table)
    }

    /// The checks that need only the manifest.
    pub fn check(&self) -> Result<(), String> {
        let expected = TableFile::new(&self.name, self.kind, self.rows, self.cols);
        match expected.map(|table| TableFile { checksum: self.checksum.clone(), ..table }) {
            Some(table) if table == *self => Ok(()),
            _ => Err(format!("lists the table '{}', whose name or sizes are not valid", self.name)),
        }
    }

    /// Number format and shape of the matrix.
    pub fn meta(&self) -> TensorMeta {
        TensorMeta::new(self.kind, vec![self.rows, self.cols]).expect("the size was checked")
    }

    /// Path of the file, relative to the store.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(TABLES).join(format!("{}.safetensors", self.name))
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.kind.row_bytes(self.cols).expect("the size was checked")
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.rows.div_ceil(self.block_rows)
    }

    /// First byte of the checksums.
    pub fn checksums_start(&self) -> usize {
        DATA_START + (self.rows * self.row_bytes()).next_multiple_of(ALIGN)
    }

    /// Bytes of the checksums.
    pub fn checksums_bytes(&self) -> usize {
        self.blocks() * CHECKSUM_BYTES
    }

    /// Length of the file in bytes.
    pub fn file_bytes(&self) -> usize {
        self.checksums_start() + self.checksums_bytes()
    }

    /// The first [`DATA_START`] bytes of the file.
    pub fn header(&self) -> Vec<u8> {
        let meta = self.meta();
        let mut header = HeaderWriter::default();
        header.describe(&self.name, describe(meta.kind, &meta.shape));
        header.describe("block_rows", self.block_rows.to_string());
        header.push(&self.name, dtype_of(meta.kind), &stored_shape(&meta), meta.bytes);
        header.pad_to(self.checksums_start() - DATA_START);
        header.push(CHECKSUMS, Dtype::U8, &[self.blocks(), CHECKSUM_BYTES], self.checksums_bytes());
        let bytes = header.finish(DATA_START);
        assert_eq!(bytes.len(), DATA_START, "a header of three tensors must fit");
        bytes
    }
}

/// Whether `name` can be the name of a table: letters, digits, dots, hyphens and underscores, a letter or digit first.
fn is_name(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    name.len() <= NAME_MAX && name.starts_with(|c: char| c.is_ascii_alphanumeric()) && name.chars().all(plain)
}
