//! What requests do between two steps of the decode thread.

use crate::telemetry::live::NewToken;

/// What a request does before a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Turn {
    /// It has tokens for the step: its prompt, or the token that it has generated now.
    Ready(Option<NewToken>),
    /// It has generated a token that the last step has computed already, as a draft.
    Accepted(NewToken),
    /// Nothing: the client has not yet taken the text that was sent, or pictures are being encoded.
    Stalled,
    /// The request is complete, cancelled or failed.
    Finished(Option<NewToken>),
}
