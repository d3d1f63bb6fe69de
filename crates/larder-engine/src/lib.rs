//! One token end to end: tokenizers, chat templates, sampling and the text that streams out.
//!
//! Nothing here opens a file: the files of a model arrive as bytes.

mod cached_path;
mod detokenizer;
mod detokenizer_steps;
mod double;
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
mod stop;
mod streaming;
mod template;
mod tiered;
mod times;
mod tokenizer;
mod tokenizer_config;
mod utf8;

#[cfg(test)]
mod reference;

pub use cached_path::CachedPath;
pub use detokenizer::Detokenizer;
pub use double::DeviceExpertsDouble;
pub use generate::{FinishReason, GenerateError, Generated, Listener, Request, StepStats, generate};
pub use generation_config::GenerationConfig;
pub use record::Recorder;
pub use rng::Xoshiro256;
pub use routing::Routing;
pub use sampler::{Sampler, SamplerError, Sampling};
pub use sequence::Sequence;
pub use session::{PREFILL_CHUNK, Session};
pub use stop::{StopError, StopMatcher};
pub use streaming::StreamingPath;
pub use template::{ChatInput, ChatTemplate, Moment, TemplateError};
pub use tiered::TieredPath;
pub use times::PhaseTimes;
pub use tokenizer::{EncodeError, Tokenizer};
pub use tokenizer_config::{ConfigError, TokenizerConfig};
