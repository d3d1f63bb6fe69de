//! Whose the content of a message is.

/// Whose content it is, which decides on what cannot be read as text: a question about it is refused, a tool's result
/// goes on without it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Author {
    /// A person, or instructions.
    Message,
    /// The model, whose content may be missing.
    Answer,
    /// A tool, whose content may be missing.
    Tool,
}
