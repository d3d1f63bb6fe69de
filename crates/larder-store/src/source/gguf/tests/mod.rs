//! Tests of GGUF files.

mod architectures;
mod builder;
mod hostile;
mod models;
mod parts;
mod tokens;

pub use builder::GgufBuilder;
