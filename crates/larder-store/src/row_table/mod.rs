//! Row tables: matrices in files of their own, whose rows are read one by one.
//!
//! `tables/NAME.safetensors` holds the matrix in plain row order, and behind it a checksum of every block of rows. A
//! row is read with its block and checked, so it can be trusted without reading the whole table.

mod read;
mod write;

pub use read::RowTable;
pub(crate) use write::{TablePlan, check_written, plans, write};

#[cfg(test)]
mod tests;
