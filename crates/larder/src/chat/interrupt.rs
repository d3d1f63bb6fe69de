//! Ctrl-C: it stops an answer, and where none is being written, or a second time, the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// What a shell expects of a program that was interrupted.
const EXIT_CODE: i32 = 130;

/// Hears of Ctrl-C.
pub struct Interrupt {
    received: Arc<AtomicBool>,
    /// Whether the next one ends the program.
    exits: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on.
    pub fn listen() -> Result<Self> {
        let (received, exits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        // In this order: the signal that sets `exits` does not itself end anything.
        flag::register_conditional_shutdown(SIGINT, EXIT_CODE, exits.clone())
            .and_then(|_| flag::register(SIGINT, received.clone()))
            .and_then(|_| flag::register(SIGINT, exits.clone()))
            .context("signals cannot be heard")?;
        Ok(Interrupt { received, exits })
    }

    /// An answer begins, which the next signal stops.
    pub fn arm(&self) {
        self.received.store(false, Ordering::SeqCst);
        self.exits.store(false, Ordering::SeqCst);
    }

    /// The answer is over.
    pub fn disarm(&self) {
        self.exits.store(true, Ordering::SeqCst);
    }

    /// Whether a signal came since the answer began.
    pub fn received(&self) -> bool {
        self.received.load(Ordering::SeqCst)
    }
}
