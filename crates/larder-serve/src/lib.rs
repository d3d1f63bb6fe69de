//! An OpenAI-compatible HTTP server with a chat page: several requests are generated concurrently on one decoder.
//!
//! A request is parsed and checked ([`request`]), its pictures are read (`http/pictures.rs`), it is tokenised
//! (`prompt/`) and waits in a bounded queue (`queue/`). One thread owns the decoder (`decode/`): it takes requests from
//! the queue, computes steps in which each active one has one token or one chunk of prefill, and sends their text to
//! the HTTP handlers (`http/`), which write it in the format of an API (`reply/`). Sequences whose requests are over
//! stay in the prefix cache, so that the next message of a chat skips the part of prefill that it shares with the last
//! one; those that leave it are saved in a folder if there is one (`sequences/`). `pool/` loads and unloads models, and
//! `page/` is the web page at `/`.
//!
//! This crate opens no files but those of that folder, fetches pictures of hosts that the options name and nothing else
//! (`fetch/`), loads no model and reads no command line. [`serve`] gets a listener that is already bound,
//! [`ServerOptions`], a [`ServedModel`] (tokenizer, chat template, context) and an [`Engine`] (decoder and experts).
//! What clients see of failures is an [`ApiError`].
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

mod decode;
mod engine;
mod error;
mod fetch;
mod http;
mod model;
mod net;
mod options;
mod page;
mod pool;
mod prompt;
mod queue;
mod reply;
pub mod request;
mod sequences;
mod server;
mod state;
mod telemetry;
#[cfg(test)]
mod testing;
mod upstream;

pub use engine::{Engine, EngineStatus, ExpectedLoss, LayerVisit, RoutingChange, RoutingQuality, RoutingRefused};
pub use error::ApiError;
pub use fetch::{ImageHost, ImageHostError};
pub use model::{FilesCheck, ModelFacts, ServedModel, ServedVision};
pub use net::listener::ServerListener;
#[cfg(feature = "tls")]
pub use net::tls::{TlsError, TlsIdentity};
pub use options::{ApiKey, ServerOptions, TOKENIZER_THREADS};
pub use pool::{ModelLoader, ModelSource, OnDemandModels, PlannedModel};
pub use prompt::turns::PINS;
pub use sequences::sessions::SessionDisk;
pub use server::serve;
pub use upstream::{UpstreamAddress, UpstreamOptions};
