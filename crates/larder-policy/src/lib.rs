//! Pure decisions. No bytes, no files, no clocks, no tensors: what is decided here can be replayed and measured.

pub mod eviction;
