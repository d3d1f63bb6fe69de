//! Pure decisions. No bytes, no files, no clocks, no tensors: what is decided here can be replayed and measured.

pub mod eviction;
mod rng;
pub mod routing;
pub mod spec;

pub use spec::PolicyError;
