//! Tests of GGUF files.

mod architectures;
mod builder;
mod hostile;
mod models;
mod parts;
mod state_space;
mod tokens;
mod typed_layers;

pub use builder::GgufBuilder;
