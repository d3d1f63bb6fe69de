//! Number formats: how values are encoded as bytes, and in which order rows lie.

pub(crate) mod block_parts;
pub mod code_books;
pub(crate) mod integers;
pub(crate) mod levels;
pub(crate) mod number_format;
pub(crate) mod row_order;
