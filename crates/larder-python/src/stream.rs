//! A text while it is generated.

use std::sync::mpsc::{Receiver, Sender};

use larder_runtime::{GeneratedText, PieceListener, TextPiece};
use parking_lot::Mutex;
use pyo3::prelude::*;

use crate::background::{Wanted, wait};
use crate::errors::{or_raise, raised};
use crate::trace::PyTrace;

/// What the thread of a generation tells.
pub enum PieceEvent {
    /// A piece of the text.
    Piece(PyPiece),
    /// The end.
    End(Box<anyhow::Result<GeneratedText>>),
}

/// A piece as Python has it: text, tokens, and the name of its part.
pub type PyPiece = (String, Vec<u32>, &'static str);

/// Sends the pieces of a generation.
pub struct PieceSender {
    /// Where they go.
    pub sender: Sender<PieceEvent>,
    /// Whether the text is still wanted.
    pub wanted: Wanted,
}

impl PieceListener for PieceSender {
    fn piece(&mut self, piece: TextPiece) -> bool {
        let event = PieceEvent::Piece((piece.text.to_owned(), piece.tokens.to_vec(), piece.kind.name()));
        self.sender.send(event).is_ok() && self.wanted.get()
    }

    fn wants_more(&mut self) -> bool {
        self.wanted.get()
    }
}

/// The receiver of a text. Threads that read it get a piece each.
#[pyclass(frozen, name = "Stream", module = "larder._larder")]
pub struct PyStream {
    events: Mutex<Receiver<PieceEvent>>,
    wanted: Wanted,
    end: Mutex<StreamEnd>,
}

/// How a generation ended.
#[derive(Default)]
struct StreamEnd {
    answer: Option<GeneratedText>,
    /// An error that is not raised yet.
    error: Option<anyhow::Error>,
}

impl PyStream {
    /// The receiver of the pieces that a [`PieceSender`] sends.
    pub fn new(events: Receiver<PieceEvent>, wanted: Wanted) -> Self {
        PyStream { events: Mutex::new(events), wanted, end: Mutex::default() }
    }

    /// Adds a piece, or keeps the end.
    fn receive(&self, event: PieceEvent, pieces: &mut Vec<PyPiece>) {
        match event {
            PieceEvent::Piece(piece) => pieces.push(piece),
            PieceEvent::End(end) => match *end {
                Ok(answer) => self.end.lock().answer = Some(answer),
                Err(error) => self.end.lock().error = Some(error),
            },
        }
    }
}

#[pymethods]
impl PyStream {
    /// The next pieces, one at least and those that are there, up to `most`; none at the end. Waits without the
    /// interpreter's lock.
    #[pyo3(signature = (most=1))]
    fn take(&self, py: Python<'_>, most: usize) -> PyResult<Vec<PyPiece>> {
        let mut pieces = Vec::new();
        let mut next = wait(py, &self.events, &self.wanted)?;
        while let Some(event) = next {
            self.receive(event, &mut pieces);
            let more = || self.events.try_lock()?.try_recv().ok();
            next = if pieces.len() < most { more() } else { None };
        }
        match self.end.lock().error.take_if(|_| pieces.is_empty()) {
            Some(error) => Err(raised(error)),
            None => Ok(pieces),
        }
    }

    /// Ends the generation at the next layer.
    fn cancel(&self) {
        self.wanted.cancel();
    }

    /// The answer as JSON, when the text has ended.
    fn answer(&self) -> PyResult<Option<String>> {
        let end = self.end.lock();
        let json = end.answer.as_ref().map(|answer| serde_json::to_string(answer).map_err(anyhow::Error::from));
        or_raise(json.transpose())
    }

    /// The trace of the generation, once.
    fn trace(&self) -> Option<PyTrace> {
        self.end.lock().answer.as_mut().and_then(|answer| answer.trace.take()).map(PyTrace::new)
    }
}

impl Drop for PyStream {
    fn drop(&mut self) {
        self.wanted.cancel();
    }
}
