//! Row tables: matrices in files of their own, whose rows are read one by one.
//!
//! `tables/NAME.safetensors` holds the matrix in plain row order, and behind it a checksum of every block of rows. A
//! row is read with its block and checked, so it can be trusted without reading the whole table.

mod file;
mod read;
mod write;

pub use file::TableFile;
pub use read::RowTable;
pub(crate) use write::{TablePlan, check_written, plans, write};

/// Folder of the row tables.
pub(crate) const TABLES: &str = "tables";
/// Rows share a block as long as it has at most this many bytes.
const BLOCK_BYTES: usize = 64 << 10;
/// Bytes of a block's checksum: XXH3 of 128 bits, most significant byte first.
const CHECKSUM_BYTES: usize = 16;

#[cfg(test)]
mod tests;
