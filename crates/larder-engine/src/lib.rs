//! One token end to end: tokenizers, chat templates, sampling and the text that streams out.
//!
//! Nothing here opens a file: the files of a model arrive as bytes.

mod cached;
mod decoder;
mod double;
mod generate;
mod generation;
mod outline;
mod overlap;
mod record;
mod rng;
mod routing;
mod sampler;
mod sequence;
mod session;
mod stop;
mod stream;
mod streaming;
mod template;
mod tiered;
mod times;
mod tokenizer;
mod tokenizer_config;
mod utf8;

#[cfg(test)]
mod reference;

pub use cached::Cached;
pub use double::BenchDouble;
pub use generate::{Finish, GenerateError, Listener, Request, Step, Written, generate};
pub use generation::GenerationConfig;
pub use record::Recorder;
pub use rng::Rng;
pub use routing::Routing;
pub use sampler::{Sampler, SamplerError, Sampling};
pub use sequence::Sequence;
pub use session::{CHUNK, Session};
pub use stop::{StopError, StopMatcher};
pub use stream::Detokenizer;
pub use streaming::Streaming;
pub use template::{ChatInput, ChatTemplate, Moment, TemplateError};
pub use tiered::Tiered;
pub use times::Times;
pub use tokenizer::{EncodeError, Tokenizer};
pub use tokenizer_config::{ConfigError, TokenizerConfig};
