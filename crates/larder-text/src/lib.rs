//! Text on both sides of a model: tokenizers, chat templates, what an answer's marks mean, and grammars that an answer
//! keeps to.
//!
//! - Tokens: [`Tokenizer`] and [`Detokenizer`], [`StopMatcher`], [`FillInTokens`]; the files [`TokenizerConfig`],
//!   [`GenerationConfig`] and [`Welcome`].
//! - [`ChatTemplate`]: from messages to a prompt. [`DialogueTurns`] are what a prompt may leave out where a context is
//!   full.
//! - [`ChatFormat`] knows how a model marks reasoning and tool calls; its [`OutputParser`] separates them.
//! - [`Grammar`]: which tokens may follow, so that a text keeps to a [`TextFormat`] (structured output).
//!
//! The crate knows no model, opens no file (files arrive as bytes), and reads the clock only for the date that a
//! template may show. Templates, grammars and texts come from strangers: each has a limit of time and memory.
//!
//! ```
//! use larder_text::StopMatcher;
//!
//! let mut stop = StopMatcher::new(vec!["\nUser:".into()])?;
//! assert_eq!(stop.push("Hello.\nUs"), "Hello."); // "\nUs" may become the stop string
//! assert_eq!(stop.push("er: more"), "");
//! assert_eq!(stop.stopped(), Some(0));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod chat_output;
mod dialogue;
mod grammar;
mod template;
mod tokens;

pub use chat_output::{AllowedCalls, AnswerRules, ChatFormat, OutputParser, OutputPart, ToolSchema};
pub use dialogue::{ContextFull, DialogueTurns, answer_room, kept_tokens};
pub use grammar::{Grammar, GrammarCompiler, GrammarError, TextFormat, grammar_bytes};
pub use template::{ChatInput, ChatTemplate, Moment, TemplateError};
pub use tokens::{
    ConfigError, Detokenizer, EncodeError, FillInTokens, GenerationConfig, StopError, StopMatcher, TOKENISING_BYTES,
    TokenBytes, Tokenizer, TokenizerConfig, Welcome,
};
