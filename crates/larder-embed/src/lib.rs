//! A model for programs in other languages: what the C interface and the Python package offer, in Rust.
//!
//! Options are JSON objects with the names of the command's flags, so that another option changes no function. [`EmbeddedModel`] loads,
//! generates, chats and counts; errors are one sentence. A [`PieceListener`] receives text and tokens while they are generated.

mod chat;
mod evaluate;
mod generation;
mod guarded;
mod model;
mod options;
mod piece;
mod stats;

pub use chat::ChatMessages;
pub use generation::GeneratedText;
pub use guarded::guarded;
pub use larder_runtime::{TextCodec, error_message};
pub use model::EmbeddedModel;
pub use options::{GenerateOptions, LoadOptions};
pub use piece::{PieceKind, PieceListener, TextPiece};
pub use stats::{ModelStats, SharedStats};
