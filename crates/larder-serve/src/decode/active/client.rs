//! Whether the client of a request still wants its answer.

use std::time::Instant;

use tokio::sync::mpsc::Sender;

use crate::queue::job::GenerationEvent;

/// Tells whether the answer to a request is still wanted, while it is computed.
pub struct ClientWatch {
    events: Sender<GenerationEvent>,
    deadline: Instant,
}

impl ClientWatch {
    /// For the receiver of these events, until the request's time runs out.
    pub fn new(events: Sender<GenerationEvent>, deadline: Instant) -> Self {
        ClientWatch { events, deadline }
    }

    /// Whether the client is connected, and the request's time has not run out.
    pub fn is_wanted(&self) -> bool {
        !self.events.is_closed() && Instant::now() < self.deadline
    }
}
