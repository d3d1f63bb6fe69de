//! Requests whose clients do not read: they leave their slots to requests that wait, and go on once they are read
//! again.

use std::time::Duration;

use larder_engine::Sequence;
use larder_model::Decoder;

use super::ActiveRequest;
use crate::sequences::slots::ServerSlots;

/// How long a client may keep its request waiting while others wait for the slot.
const PATIENCE: Duration = Duration::from_secs(1);

/// Requests without slots, in the order in which they left them.
#[derive(Default)]
pub struct StalledRequests<'m> {
    requests: Vec<StalledRequest<'m>>,
}

/// A request without a slot, and the tokens of its sequence, which the prefix cache may still have.
pub struct StalledRequest<'m> {
    /// The request.
    pub request: ActiveRequest<'m>,
    /// Tokens of prompt and answer so far.
    pub tokens: Vec<u32>,
}

impl<'m> StalledRequests<'m> {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Takes at most `most` requests whose clients do not read out of the `active` ones, and gives their slots back.
    pub fn take_from(
        &mut self,
        active: &mut Vec<ActiveRequest<'m>>,
        most: usize,
        slots: &mut ServerSlots,
        decoder: &Decoder,
    ) {
        // An encoder reads prompt and answer differently, so that such a sequence cannot be appended at once.
        let most = if decoder.encoder_layers() > 0 { 0 } else { most };
        for mut request in active.extract_if(.., |request| request.stalled_for() >= PATIENCE).take(most) {
            let (slot, sequence) = request.leave_slot(Sequence::new(decoder, 0));
            let tokens = sequence.tokens().to_vec();
            slots.put_back(slot, sequence);
            self.requests.push(StalledRequest { request, tokens });
        }
    }

    /// Takes those out that have failed, or whose clients have gone.
    pub fn take_over(&mut self) -> Vec<ActiveRequest<'m>> {
        let over = self.requests.extract_if(.., |stalled| stalled.request.is_over());
        over.map(|stalled| stalled.request).collect()
    }

    /// Takes the first out whose client reads again, if its tokens fit.
    pub fn take_read(&mut self, fits: impl Fn(usize) -> bool) -> Option<StalledRequest<'m>> {
        let first = self.requests.iter().position(|stalled| stalled.request.can_send())?;
        fits(self.requests[first].tokens.len()).then(|| self.requests.remove(first))
    }
}

impl ActiveRequest<'_> {
    /// How long its client keeps it waiting.
    fn stalled_for(&self) -> Duration {
        self.stalled.filter(|_| !self.can_send()).map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Leaves its slot, and puts the sequence of another in the place of its own.
    fn leave_slot(&mut self, empty: Sequence) -> (usize, Sequence) {
        self.span.in_scope(|| tracing::info!(tokens = self.tokens(), "waits for its client"));
        self.decoding.drop_drafts(&mut self.sequence);
        self.pictures.drop_encoded(&mut self.sequence);
        self.decodes = false;
        (self.slot, std::mem::replace(&mut self.sequence, empty))
    }

    /// Goes on in a slot with a sequence of its tokens.
    pub fn enter_slot(&mut self, slot: usize, sequence: Sequence) {
        self.ahead_before = sequence.ahead_counts();
        (self.slot, self.sequence, self.stalled) = (slot, sequence, None);
    }
}
