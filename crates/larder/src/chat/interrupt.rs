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
    came: Arc<AtomicBool>,
    /// Whether the next one ends the program.
    ends: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on.
    pub fn listen() -> Result<Self> {
        let (came, ends) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(true)));
        // In this order: the signal that sets `ends` does not itself end anything.
        flag::register_conditional_shutdown(SIGINT, EXIT_CODE, ends.clone())
            .and_then(|_| flag::register(SIGINT, came.clone()))
            .and_then(|_| flag::register(SIGINT, ends.clone()))
            .context("signals cannot be heard")?;
        Ok(Interrupt { came, ends })
    }

    /// An answer begins, which the next signal stops.
    pub fn arm(&self) {
        self.came.store(false, Ordering::SeqCst);
        self.ends.store(false, Ordering::SeqCst);
    }

    /// The answer is over.
    pub fn disarm(&self) {
        self.ends.store(true, Ordering::SeqCst);
    }

    /// Whether a signal came since the answer began.
    pub fn came(&self) -> bool {
        self.came.load(Ordering::SeqCst)
    }
}
