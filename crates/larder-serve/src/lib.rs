//! Answers over HTTP in OpenAI's form, several at a time from one decoder.
//!
//! A request is read and checked ([`request`]), turned into tokens (`prompt.rs`), and waits in a bounded queue
//! (`queue.rs`). One thread of its own has the decoder (`decode.rs`): it takes requests from the queue, lets the answers
//! under way (`answer.rs`) take turns token by token, and hands what they write to whoever waits for it (`reply/`).
//! `page/` is what a browser gets to see. Nothing here opens a file.

mod active;
mod connection;
mod decode;
mod engine;
mod error;
mod guard;
mod http;
mod job;
mod live;
mod metrics;
mod model;
mod page;
mod prefix_cache;
mod prompt;
mod queue;
mod reply;
pub mod request;
mod server;

pub use engine::{Engine, EngineStatus, LayerVisit, RoutingQuality};
pub use error::ApiError;
pub use model::ServedModel;
pub use server::{ServerOptions, serve};
