//! Sequences whose requests are over: in the prefix cache, and in a folder on disk.

pub mod history;
mod prefix_cache;
pub mod sessions;
pub mod slots;
