//! Generating text with one sequence: a session, its decode steps, the writer of the text, and the loop over them.

mod decode;
mod generate;
mod session;
mod writer;

pub use decode::{Decoding, SessionDecoding, StepStats};
pub use generate::{GenerateError, Generated, Listener, Request, generate};
pub use session::Session;
pub use writer::{FinishReason, Writer, WrittenToken};
