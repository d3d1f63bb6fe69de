//! Sentences about requests that are logged once: fields and tools that have no effect.

use std::collections::BTreeSet;

use parking_lot::Mutex;

/// The most sentences that are remembered; further ones are not logged.
const NOTES_MAX: usize = 1_000;

/// The sentences so far.
#[derive(Default)]
pub struct Notes(Mutex<BTreeSet<String>>);

impl Notes {
    /// Logs those that are new.
    pub fn log(&self, notes: &[String]) {
        let mut known = self.0.lock();
        for note in notes {
            if known.len() < NOTES_MAX && known.insert(note.clone()) {
                tracing::info!("{note}");
            }
        }
    }
}
