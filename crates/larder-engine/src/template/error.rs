use std::{error::Error as _, fmt};

use minijinja::{Error, ErrorKind};

/// A chat that could not be rendered.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum TemplateError {
    /// The template itself refused the chat; this is its message, word for word.
    #[error("{0}")]
    Raised(String),
    /// The template does not follow the language.
    #[error("the chat template is wrong in line {line}: {what}")]
    Syntax {
        /// Line, from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// The template failed on this chat.
    #[error("the chat template failed in line {line}: {what}")]
    Failed {
        /// Line, from 1; 0 if unknown.
        line: usize,
        /// Why.
        what: String,
    },
    /// The template ran longer than any chat needs.
    #[error("the chat template did not end within its limit of steps")]
    TooSlow,
    /// The rendered text is longer than any chat.
    #[error("the chat template wrote more than {limit} bytes")]
    TooLong {
        /// The limit.
        limit: usize,
    },
    /// The template is longer than any template.
    #[error("the chat template has {bytes} bytes, at most {limit} are allowed")]
    Source {
        /// Its length.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// The template is not UTF-8.
    #[error("the chat template is not UTF-8 text")]
    NotText,
    /// There are several templates and none of them is the default.
    #[error("the model has several chat templates and none is named `default`: {names}")]
    NoDefault {
        /// Their names.
        names: String,
    },
    /// The chat itself is not one.
    #[error("{0}")]
    Chat(String),
}

impl TemplateError {
    pub(super) fn from_syntax(error: Error) -> Self {
        TemplateError::Syntax { line: error.line().unwrap_or(0), what: describe(&error) }
    }

    pub(super) fn from_render(error: Error) -> Self {
        if let Some(Raised(message)) = cause(&error) {
            return TemplateError::Raised(message.clone());
        }
        if error.kind() == ErrorKind::OutOfFuel {
            return TemplateError::TooSlow;
        }
        TemplateError::Failed { line: error.line().unwrap_or(0), what: describe(&error) }
    }
}

/// The message that `raise_exception` was called with, carried through the template machine.
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
