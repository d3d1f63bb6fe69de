//! Text on both sides of the model: tokenizers, detokenizers, stop strings, and the files that configure them.

mod detokenizer;
mod detokenizer_steps;
mod difference;
mod fill_in;
mod generation_config;
mod growth;
mod precheck;
mod stop;
mod tokenizer;
mod tokenizer_config;
mod utf8;
mod welcome;

#[cfg(test)]
mod reference;

pub use detokenizer::Detokenizer;
pub use fill_in::FillInTokens;
pub use generation_config::GenerationConfig;
pub(crate) use stop::certain;
pub use stop::{StopError, StopMatcher};
pub use tokenizer::{EncodeError, TOKENISING_BYTES, TokenBytes, Tokenizer};
pub use tokenizer_config::{ConfigError, TokenizerConfig};
pub use welcome::Welcome;
