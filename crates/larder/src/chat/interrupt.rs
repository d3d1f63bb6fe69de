//! Ctrl-C: stops an answer; without one, or a second time, ends the program.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use signal_hook::consts::SIGINT;
use signal_hook::flag;

/// Exit code of an interrupted program, by convention of shells.
const EXIT_CODE: i32 = 130;

/// Listens for Ctrl-C.
pub struct Interrupt {
    received: Arc<AtomicBool>,
    /// Whether the next signal ends the program.
    exits: Arc<AtomicBool>,
}

impl Interrupt {
    /// Registers the signal handlers.
    pub fn listen() -> Result<Self> {
        let (received, exits) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        // In this order: the signal that sets `exits` does not itself end anything.
        flag::register_conditional_shutdown(SIGINT, EXIT_CODE, exits.clone())
            .and_then(|_| flag::register(SIGINT, received.clone()))
            .and_then(|_| flag::register(SIGINT, exits.clone()))
            .context("signal handlers cannot be registered")?;
        Ok(Interrupt { received, exits })
    }

    /// Marks the start of an answer: the next signal stops it.
    pub fn arm(&self) {
        self.received.store(false, Ordering::SeqCst);
        self.exits.store(false, Ordering::SeqCst);
    }

    /// Marks the end of an answer: the next signal ends the program.
    pub fn disarm(&self) {
        self.exits.store(true, Ordering::SeqCst);
    }

    /// Whether a signal was received since the answer started.
    pub fn received(&self) -> bool {
        self.received.load(Ordering::SeqCst)
    }
}
