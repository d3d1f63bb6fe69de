//! A model for programs in other languages: what the C interface offers, in Rust.
//!
//! Options are JSON objects with the names of the command's flags, so that another option changes no function. [`EmbeddedModel`] loads,
//! generates and counts; errors are one sentence.

mod model;
mod options;
mod stats;

pub use model::{EmbeddedModel, GeneratedText};
pub use options::{GenerateOptions, LoadOptions};
pub use stats::ModelStats;
