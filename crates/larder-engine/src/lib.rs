//! Text generation on top of a decoder: tokenizer, chat template, prefill, decode, sampling, detokenizer, stop strings.
//!
//! - Text: [`Tokenizer`] and [`Detokenizer`], [`ChatTemplate`], [`StopMatcher`]; the files [`TokenizerConfig`] and
//!   [`GenerationConfig`].
//! - Generation: a [`Session`] is a [`Sequence`] (tokens with their KV cache) with a decoder and an expert path;
//!   [`step()`] computes pending tokens of any number of sequences. [`generate()`] runs prefill and decode of one session;
//!   a [`Writer`] draws tokens with a [`Sampler`] and turns them into text; a [`Listener`] is told.
//! - Expert paths: [`StreamingPath`] takes experts from a cache in main memory, [`TieredPath`] from device memory and
//!   main memory; both are a [`CachedPath`] and route by a [`Routing`]. A [`Recorder`] collects a trace of the routing.
//! - Files beside a model for its policies: [`Calibration`] of the strategy `prior`, [`evictor_from_bytes`].
//!
//! This crate never opens a file (the files of a model arrive as bytes), never prints, and reads the clock only to
//! measure and for the date that a chat template may show.
//!
//! ```
//! use larder_engine::{Sampler, Sampling, StopMatcher};
//!
//! let mut logits = [0.5, 3.0, 1.0];
//! let mut greedy = Sampler::new(Sampling::default(), 7)?;
//! assert_eq!(greedy.sample(&mut logits, &[])?, 1);
//!
//! let mut stop = StopMatcher::new(vec!["\nUser:".into()])?;
//! assert_eq!(stop.push("Hello.\nUs"), "Hello."); // "\nUs" may become the stop string
//! assert_eq!(stop.push("er: more"), "");
//! assert_eq!(stop.stopped(), Some(0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cached_path;
mod calibration;
mod detokenizer;
mod detokenizer_steps;
mod double;
mod evictor_file;
mod generate;
mod generation_config;
mod overlap;
mod precheck;
mod record;
mod rng;
mod routing;
mod sampler;
mod sequence;
mod session;
mod step;
mod stop;
mod streaming;
mod template;
mod tiered;
mod times;
mod token_input;
mod tokenizer;
mod tokenizer_config;
mod utf8;
mod writer;

#[cfg(test)]
mod reference;

pub use cached_path::CachedPath;
pub use calibration::Calibration;
pub use detokenizer::Detokenizer;
pub use double::DeviceExpertsDouble;
pub use evictor_file::{EVICTOR_BYTES_MAX, EVICTOR_FILE, SidecarError, evictor_arrays, evictor_from_bytes};
pub use generate::{GenerateError, Generated, Listener, Request, StepStats, generate};
pub use generation_config::GenerationConfig;
pub use record::Recorder;
pub use rng::Xoshiro256;
pub use routing::Routing;
pub use sampler::{Sampler, SamplerError, Sampling};
pub use sequence::Sequence;
pub use session::Session;
pub use step::{StepPart, step};
pub use stop::{StopError, StopMatcher};
pub use streaming::StreamingPath;
pub use template::{ChatInput, ChatTemplate, Moment, TemplateError};
pub use tiered::TieredPath;
pub use times::PhaseTimes;
pub use token_input::{PREFILL_CHUNK, TokenInput};
pub use tokenizer::{EncodeError, Tokenizer};
pub use tokenizer_config::{ConfigError, TokenizerConfig};
pub use writer::{FinishReason, Writer, WrittenToken};
