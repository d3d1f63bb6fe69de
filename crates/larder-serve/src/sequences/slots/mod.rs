//! The slots of the server: the prefix cache, the sequences on disk behind it, and what clients do with both.

use std::time::Instant;

use axum::http::StatusCode;
use larder_engine::{Picture, SavedSequenceError, Sequence, SequenceOrigin};
use larder_model::{Decoder, ModelError, TokenPhase};
use serde_json::{Value, json};
use tokio::sync::oneshot;

use crate::error::ApiError;
use crate::sequences::prefix_cache::{Displaced, PrefixCache, Reuse, is_worth_reusing};
use crate::sequences::sessions::{Sessions, WriteError};

/// Tokens that a sequence on disk must share with a prompt beyond one in memory, to be read.
const READ_GAIN: usize = 16;
/// A sequence is saved if it alone has one in as many of its tokens.
const SAVED_SHARE: usize = 8;

/// A client's command to a slot.
pub struct SlotCommand {
    /// Number of the slot.
    pub id: usize,
    /// What to do.
    pub action: SlotAction,
    /// Where the answer goes.
    pub to: oneshot::Sender<Result<Value, ApiError>>,
}

/// What a client may do with a slot. Files have names that were checked.
pub enum SlotAction {
    /// Save its sequence to a file.
    Save(String),
    /// Replace its sequence by that of a file.
    Restore(String),
    /// Drop its sequence.
    Erase,
}

/// A slot that an active request has.
pub struct BusySlot {
    /// Number of the slot.
    pub id: usize,
    /// Number of the request.
    pub request: u64,
    /// Tokens of its sequence.
    pub tokens: usize,
}

/// All slots.
pub struct ServerSlots {
    cache: PrefixCache,
    sessions: Option<Sessions>,
    origin: SequenceOrigin,
    context: usize,
}

impl ServerSlots {
    /// Slots for `count` sequences of `context` tokens. Sequences that leave them are saved if there are `sessions`.
    pub fn new(count: usize, context: usize, origin: SequenceOrigin, sessions: Option<Sessions>) -> Self {
        ServerSlots { cache: PrefixCache::new(count), sessions, origin, context }
    }

    /// A sequence for `prompt` and its slot: one in memory or on disk with a common prefix that is worth reusing, or a
    /// copy of an `active` one, else a new one. It is truncated to the common prefix, which is always shorter than the
    /// prompt; what the KV cache could not keep of it is pending. The caller guarantees that a slot is not taken.
    fn take(&mut self, prompt: &[u32], active: &[&Sequence], decoder: &Decoder) -> (usize, Sequence) {
        let held = self.cache.best(prompt);
        let held_tokens = held.map_or(0, |reuse| reuse.shared);
        let busy = active.iter().map(|sequence| (sequence.reusable_prefix(prompt), sequence));
        let busy = busy.max_by_key(|(shared, _)| *shared).filter(|(shared, _)| *shared > held_tokens);
        if let Some(name) = self.find(prompt, busy.map_or(held_tokens, |(shared, _)| shared)) {
            // The one in memory stays, for a file that cannot be read. What leaves does so before another is read, so
            // that memory for one more is enough.
            let id = self.vacate(held.map(|reuse| reuse.from));
            if let Some(read) = self.sessions.as_ref().and_then(|found| found.read(&name, decoder, &self.origin)) {
                return (id, cut_to(read, prompt));
            }
            // The file will not be found again.
            self.cache.empty(id);
            return self.take(prompt, active, decoder);
        }
        let (id, sequence) = match (busy, held) {
            (Some((_, sequence)), _) => (self.vacate(held.map(|reuse| reuse.from)), sequence.branch()),
            (None, Some(reuse)) => (reuse.to, self.reuse(reuse, decoder)),
            (None, None) => (self.vacate(None), Sequence::new(decoder, self.context)),
        };
        (id, cut_to(sequence, prompt))
    }

    /// A slot for another sequence, of which `kept` is the last choice. What is there leaves.
    fn vacate(&mut self, kept: Option<usize>) -> usize {
        let id = self.cache.place(kept);
        let displaced = self.cache.displace(id);
        self.displace(displaced);
        id
    }

    /// A sequence of `tokens`, whose images are of these pictures, and its slot, as [`take`](Self::take) finds it, with
    /// its number of tokens that need not be computed. With `anew` all are to be computed.
    pub fn take_whole(
        &mut self,
        (tokens, pictures): (&[u32], &[Picture]),
        anew: bool,
        active: &[&Sequence],
        decoder: &Decoder,
    ) -> Result<(usize, Sequence, usize), ModelError> {
        let (slot, mut sequence) = self.take(tokens, active, decoder);
        if anew {
            sequence.rewind(0);
        }
        let common = sequence.tokens().len();
        let cached = common - sequence.pending();
        sequence.show(pictures);
        match sequence.append(decoder, &tokens[common..], TokenPhase::Prefill) {
            Ok(()) => Ok((slot, sequence, cached)),
            Err(error) => {
                self.put_back(slot, sequence);
                Err(error)
            }
        }
    }

    /// The file with a longer common prefix than the `held` tokens in memory.
    fn find(&self, prompt: &[u32], held: usize) -> Option<String> {
        let is_worth = |shared, own| shared >= held + READ_GAIN && is_worth_reusing(shared, own, prompt.len());
        self.sessions.as_ref()?.find(prompt, &self.origin, is_worth)
    }

    /// The sequence that is used again, or a copy of it, which shares memory with it. What leaves a slot is saved, and
    /// so is a sequence that loses more than what is used of it.
    fn reuse(&mut self, Reuse { from, to, shared }: Reuse, decoder: &Decoder) -> Sequence {
        let copy = if from == to { None } else { self.cache.get(from).map(Sequence::branch) };
        let Some(copy) = copy else {
            let sequence = self.cache.take(to).unwrap_or_else(|| Sequence::new(decoder, self.context));
            if sequence.computed_tokens().len() > 2 * shared {
                self.displace(Some(Displaced { alone: sequence.tokens().len(), sequence: sequence.clone() }));
            }
            return sequence;
        };
        let displaced = self.cache.displace(to);
        self.displace(displaced);
        copy
    }

    /// Saves a sequence, unless the others in memory have most of its tokens and are saved after it.
    fn displace(&self, displaced: Option<Displaced>) {
        if let (Some(Displaced { sequence, alone }), Some(sessions)) = (displaced, &self.sessions)
            && SAVED_SHARE * alone >= sequence.tokens().len()
        {
            sessions.save(sequence, &self.origin);
        }
    }

    /// How many tokens of a prompt need not be computed with one of the idle sequences.
    pub fn reusable(&self, prompt: &[u32]) -> usize {
        self.cache.reusable(prompt)
    }

    /// The most tokens that a prompt has in common with an idle sequence.
    pub fn held(&self, prompt: &[u32]) -> usize {
        (0..self.cache.len()).filter_map(|id| Some(self.cache.get(id)?.common_prefix(prompt))).max().unwrap_or(0)
    }

    /// Drops the idle sequence that is worth least, which is saved; false if there is none.
    pub fn drop_least(&mut self) -> bool {
        let least = self.cache.empty_least();
        let is_dropped = least.is_some();
        self.displace(least);
        is_dropped
    }

    /// Bytes of sequences that were written to disk.
    pub fn written_bytes(&self) -> u64 {
        self.sessions.as_ref().map_or(0, Sessions::written_bytes)
    }

    /// Returns a sequence to its slot.
    pub fn put_back(&mut self, id: usize, sequence: Sequence) {
        self.cache.put_back(id, sequence);
    }

    /// Drops all idle sequences, which `origin` replaces by others; they are saved.
    pub fn change_origin(&mut self, origin: SequenceOrigin) {
        self.save_all();
        self.origin = origin;
    }

    /// Drops all idle sequences, and saves them.
    pub fn save_all(&mut self) {
        for sequence in self.cache.clear() {
            self.displace(Some(sequence));
        }
    }

    /// Saves all idle sequences, waits until they are written, and returns the bytes that were.
    pub fn end(&mut self) -> u64 {
        self.save_all();
        self.sessions.take().map_or(0, Sessions::end)
    }

    /// All slots, under the names of llama.cpp's server.
    pub fn list(&self, busy: &[BusySlot]) -> Value {
        let slot = |id: usize| {
            let busy = busy.iter().find(|slot| slot.id == id);
            let idle = self.cache.get(id).map_or(0, |sequence| sequence.tokens().len());
            json!({
                "id": id,
                "id_task": busy.map_or(-1, |slot| slot.request as i64),
                "n_ctx": self.context,
                "speculative": false,
                "is_processing": busy.is_some(),
                "n_tokens": busy.map_or(idle, |slot| slot.tokens),
            })
        };
        (0..self.cache.len()).map(slot).collect()
    }

    /// Executes a command. A sequence is saved in the background, and the command is answered then.
    pub fn execute(&mut self, command: SlotCommand, decoder: &Decoder) {
        let SlotCommand { id, action, to } = command;
        let answer = match (self.check(id), action) {
            (Err(error), _) => Err(error),
            (Ok(()), SlotAction::Save(name)) => return self.save(id, name, to),
            (Ok(()), SlotAction::Restore(name)) => self.restore(id, &name, decoder),
            (Ok(()), SlotAction::Erase) => {
                let erased = self.cache.empty(id).map_or(0, |erased| erased.sequence.tokens().len());
                Ok(json!({"id_slot": id, "n_erased": erased}))
            }
        };
        // The client may have disconnected.
        let _ = to.send(answer);
    }

    fn check(&self, id: usize) -> Result<(), ApiError> {
        let count = self.cache.len();
        if self.sessions.is_none() {
            let message = "Slots cannot be saved, restored or erased; start the server with --session-dir.";
            return Err(ApiError::new(StatusCode::NOT_IMPLEMENTED, "not_supported", message));
        }
        if id >= count {
            let message = format!("There is no slot {id}; slots have the numbers 0 to {}.", count - 1);
            return Err(ApiError::invalid_field("id_slot", "invalid_value", message));
        }
        if self.cache.is_taken(id) {
            let message = format!("Slot {id} is processing a request; try again when that is complete.");
            return Err(ApiError::new(StatusCode::CONFLICT, "slot_busy", message));
        }
        Ok(())
    }

    fn save(&self, id: usize, name: String, to: oneshot::Sender<Result<Value, ApiError>>) {
        let (Some(sequence), Some(sessions)) = (self.cache.get(id), &self.sessions) else {
            let message = format!("Slot {id} is empty: there is no sequence to save.");
            let _ = to.send(Err(ApiError::invalid_field("id_slot", "slot_empty", message)));
            return;
        };
        let (began, tokens) = (Instant::now(), sequence.computed_tokens().len());
        let after = {
            let name = name.clone();
            move |written: Result<u64, WriteError>| {
                let answer = match written {
                    Ok(bytes) => Ok(json!({
                        "id_slot": id, "filename": name, "n_saved": tokens, "n_written": bytes,
                        "timings": {"save_ms": millis(began)},
                    })),
                    Err(error) => Err(not_written(&name, &error)),
                };
                let _ = to.send(answer);
            }
        };
        sessions.save_named(name, sequence.clone(), &self.origin, Box::new(after));
    }

    fn restore(&mut self, id: usize, name: &str, decoder: &Decoder) -> Result<Value, ApiError> {
        let began = Instant::now();
        let Some(sessions) = &self.sessions else { return Err(ApiError::shutting_down()) };
        // Both are in memory for a moment, which is that of a sequence that is being written.
        let (sequence, bytes) =
            sessions.read_named(name, decoder, &self.origin).map_err(|error| not_read(name, &error))?;
        let displaced = self.cache.empty(id);
        self.displace(displaced);
        let tokens = sequence.tokens().len();
        self.cache.put_back(id, sequence);
        Ok(json!({
            "id_slot": id, "filename": name, "n_restored": tokens, "n_read": bytes,
            "timings": {"restore_ms": millis(began)},
        }))
    }
}

/// A sequence up to where a prompt differs.
fn cut_to(mut sequence: Sequence, prompt: &[u32]) -> Sequence {
    sequence.rewind(sequence.common_prefix(prompt));
    sequence
}

fn millis(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

fn not_written(name: &str, error: &WriteError) -> ApiError {
    let message = format!("'{name}' was not written: {error}.");
    ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "not_written", message)
}

fn not_read(name: &str, error: &SavedSequenceError) -> ApiError {
    if error.is_missing() {
        ApiError::new(StatusCode::NOT_FOUND, "file_not_found", format!("There is no saved sequence '{name}'."))
    } else {
        ApiError::invalid_field("filename", "invalid_file", format!("'{name}' {error}."))
    }
}

#[cfg(test)]
mod tests;
