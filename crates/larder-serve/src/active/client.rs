//! What a request knows of its client.

use std::time::Instant;

use tokio::sync::mpsc::Sender;

use super::{ActiveRequest, EVENTS_PER_TURN};
use crate::job::GenerationEvent;

/// Tells whether the answer to a request is still wanted, while a step computes.
pub struct ClientWatch {
    events: Sender<GenerationEvent>,
    deadline: Instant,
}

impl ClientWatch {
    /// Whether the client is connected, and the request's time has not run out.
    pub fn is_wanted(&self) -> bool {
        !self.events.is_closed() && Instant::now() < self.deadline
    }
}

impl ActiveRequest<'_> {
    /// Tells whether the answer is still wanted, while the request itself takes part in a step.
    pub fn watch(&self) -> ClientWatch {
        ClientWatch { events: self.events.clone(), deadline: self.deadline }
    }

    /// Whether the client has taken so much of what was sent that a turn may send more.
    pub fn can_send(&self) -> bool {
        self.events.capacity() >= EVENTS_PER_TURN
    }
}
