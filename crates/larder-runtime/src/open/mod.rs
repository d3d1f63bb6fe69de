//! Finds and opens a model: a store, a checkpoint folder, a GGUF file, or a name on the hub.

mod model;
pub mod models;
mod mtp;
mod options;
mod preload;
mod sources;

pub use model::{FormatBytes, ModelExperts, OpenModel, model_name};
pub use options::{ModelOptions, MtpUse};
pub use sources::{TextCodec, blueprint_of, check_ignored, check_sidecars};
