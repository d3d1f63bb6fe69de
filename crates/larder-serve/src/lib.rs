//! An OpenAI-compatible HTTP server with a chat page: several requests are generated concurrently on one decoder.
//!
//! A request is parsed and checked ([`request`]), tokenised (`prompt.rs`), and waits in a bounded queue (`queue.rs`).
//! One thread owns the decoder (`decode.rs`): it takes requests from the queue, computes steps in which each active one
//! (`active/`) has one token or one piece of prefill, and sends their text to the HTTP handlers (`reply/`). Sequences
//! whose requests are over stay in the prefix cache (`prefix_cache.rs`), so that the next message of a chat skips the
//! part of prefill that it shares with the last one. Those that leave it are saved in a folder if there is one
//! (`sessions/`); `slots.rs` is both together. `page/` is the web page at `/`, and `formula.rs` converts its formulas.
//!
//! This crate opens no files but those of that folder, loads no model and reads no command line. [`serve`] gets a
//! listener that is already bound, [`ServerOptions`], a [`ServedModel`] (tokenizer, chat template, context) and an
//! [`Engine`] (decoder and experts). What clients see of failures is an [`ApiError`].
//!
//! ```
//! use larder_serve::request::ChatRequest;
//!
//! let body = br#"{"messages": [{"role": "user", "content": "hi"}], "max_tokens": 7, "stop": "\n"}"#;
//! let request = ChatRequest::parse(body)?;
//! assert_eq!((request.params.max_tokens, request.params.stop.len()), (Some(7), 1));
//!
//! // Errors name the field, as OpenAI's do.
//! let error = ChatRequest::parse(br#"{"messages": [], "temperature": "hot"}"#).unwrap_err();
//! assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some("temperature")));
//! # Ok::<(), larder_serve::ApiError>(())
//! ```

mod active;
mod answer_grammar;
mod connection;
mod context;
mod decode;
mod engine;
mod error;
mod error_form;
mod formula;
mod guard;
mod http;
mod job;
mod listener;
mod live;
mod logprobs;
mod metrics;
mod model;
mod notes;
mod options;
mod page;
mod pool;
mod prefix_cache;
mod prompt;
mod queue;
mod reply;
pub mod request;
mod schedule;
mod server;
mod sessions;
mod slots;
mod state;
#[cfg(feature = "tls")]
mod tls;
mod turn;
mod upstream;

pub use engine::{Engine, EngineStatus, ExpectedLoss, LayerVisit, RoutingChange, RoutingQuality};
pub use error::ApiError;
pub use listener::ServerListener;
pub use model::{FilesCheck, ModelFacts, ServedModel};
pub use options::{ApiKey, ServerOptions, TOKENIZER_THREADS};
pub use pool::{ModelLoader, ModelSource, OnDemandModels, PlannedModel};
pub use server::serve;
pub use sessions::SessionDisk;
#[cfg(feature = "tls")]
pub use tls::{TlsError, TlsIdentity};
pub use upstream::{UpstreamAddress, UpstreamOptions};
