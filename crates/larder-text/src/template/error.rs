//! The errors of chat templates.

use std::{error::Error as _, fmt};

use minijinja::{Error, ErrorKind};

use super::{MAX_BYTES, budget::Budget};

/// The reason why a chat could not be rendered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template refused the chat with `raise_exception`; its message, unchanged.
    #[error("{0}")]
    Raised(String),
    /// The template has a syntax error.
    #[error("the chat template has a syntax error in line {line}: {what}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// The engine's message.
        what: String,
    },
    /// Rendering failed on this chat.
    #[error("the chat template failed in line {line}: {what}")]
    Failed {
        /// Line, from 1; 0 if unknown.
        line: usize,
        /// The engine's message.
        what: String,
    },
    /// Rendering took too many steps, or too long.
    #[error("the chat template takes too long, in line {line}; it may have an endless loop")]
    TooSlow {
        /// Line, from 1; 0 if unknown.
        line: usize,
    },
    /// The template made too many or too large values, the rendered text among them.
    #[error("the chat template makes more than {} MiB of text and values, in line {line}", limit >> 20)]
    TooLarge {
        /// Line, from 1; 0 if unknown.
        line: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The template itself is too long.
    #[error("the chat template has {bytes} bytes; at most {limit} are supported")]
    Source {
        /// Length of the template in bytes.
        bytes: usize,
        /// The limit in bytes.
        limit: usize,
    },
    /// The template is not UTF-8.
    #[error("the chat template is not UTF-8 text")]
    NotText,
    /// The model has several templates, and none of them is the default.
    #[error("the model has several chat templates, and none is named `default`: {names}")]
    NoDefault {
        /// The names of the templates.
        names: String,
    },
    /// The messages or documents are invalid.
    #[error("{0}")]
    Chat(String),
}

impl TemplateError {
    pub(super) fn from_syntax(error: Error) -> Self {
        TemplateError::Syntax { line: error.line().unwrap_or(0), what: describe(&error) }
    }

    pub(super) fn from_render(error: Error, budget: &Budget) -> Self {
        let line = error.line().unwrap_or(0);
        if budget.is_out_of_memory() {
            return TemplateError::TooLarge { line, limit: MAX_BYTES };
        }
        if budget.is_out_of_time() || error.kind() == ErrorKind::OutOfFuel {
            return TemplateError::TooSlow { line };
        }
        if let Some(Raised(message)) = cause(&error) {
            return TemplateError::Raised(message.clone());
        }
        TemplateError::Failed { line, what: describe(&error) }
    }
}

/// The message of `raise_exception`, carried through the template engine.
#[derive(Debug)]
pub(super) struct Raised(pub(super) String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

fn cause(error: &Error) -> Option<&Raised> {
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(raised) = error.downcast_ref() {
            return Some(raised);
        }
        source = error.source();
    }
    None
}

fn describe(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}, {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}
