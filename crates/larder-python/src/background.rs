//! Work beside the interpreter: on a thread, without its lock, and ended by Ctrl-C.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use larder_runtime::guarded;
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::errors::or_raise;

/// How often the caller looks for signals while it waits.
const SIGNAL_PERIOD: Duration = Duration::from_millis(50);

/// Whether work is still wanted.
#[derive(Clone, Default)]
pub struct Wanted(Arc<AtomicBool>);

impl Wanted {
    /// Whether it is.
    pub fn get(&self) -> bool {
        !self.0.load(Ordering::Relaxed)
    }

    /// Says that it is not any more.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The result of `work` on a thread of its own. A signal whose handler raises, as Ctrl-C does, cancels it; then its
/// result is dropped.
pub fn compute<T: Send + 'static>(
    py: Python<'_>,
    work: impl FnOnce(&Wanted) -> anyhow::Result<T> + Send + 'static,
) -> PyResult<T> {
    let (wanted, (sender, receiver)) = (Wanted::default(), channel());
    let of_thread = wanted.clone();
    or_raise(spawn(move || drop(sender.send(guarded(|| work(&of_thread))))))?;
    match wait(py, &Mutex::new(receiver), &wanted)? {
        Some(result) => or_raise(result),
        None => or_raise(Err(anyhow::anyhow!("the thread of the model has ended"))),
    }
}

/// Starts a thread.
pub fn spawn(work: impl FnOnce() + Send + 'static) -> anyhow::Result<()> {
    let thread = thread::Builder::new().name("larder".into()).spawn(work);
    thread.map(drop).context("a thread cannot be started")
}

/// The next value of a channel; `None` if there will be none. A signal whose handler raises cancels the work.
pub fn wait<T: Send>(py: Python<'_>, receiver: &Mutex<Receiver<T>>, wanted: &Wanted) -> PyResult<Option<T>> {
    let next = || receiver.lock().recv_timeout(SIGNAL_PERIOD);
    loop {
        match py.detach(next) {
            Ok(value) => return Ok(Some(value)),
            Err(RecvTimeoutError::Disconnected) => return Ok(None),
            Err(RecvTimeoutError::Timeout) => py.check_signals().inspect_err(|_| wanted.cancel())?,
        }
    }
}
