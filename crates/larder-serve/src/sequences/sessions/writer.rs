//! The thread that writes sequences, so that decoding does not wait for the disk.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{self, JoinHandle};

use larder_engine::{Sequence, SequenceOrigin};

use super::folder::{SessionFolder, WriteError};

/// What becomes of the length of a file, or of the reason why there is none.
pub type AfterWrite = Box<dyn FnOnce(Result<u64, WriteError>) + Send>;

/// A sequence to be written.
pub struct WriteTask {
    /// The sequence, whose memory is in use until it is written.
    pub sequence: Sequence,
    /// What it is of.
    pub origin: SequenceOrigin,
    /// A file that a client named; `None` for one of the prefix cache.
    pub named: Option<(String, AfterWrite)>,
}

/// The writing thread. It takes a sequence only when the one before is written, so that the memory of one sequence more
/// is in use, and the thread that brings the next one waits.
pub struct SessionWriter {
    tasks: Option<SyncSender<WriteTask>>,
    thread: Option<JoinHandle<()>>,
}

impl SessionWriter {
    /// Starts the thread.
    pub fn start(folder: Arc<SessionFolder>) -> io::Result<Self> {
        let (to, from) = sync_channel(0);
        let thread = thread::Builder::new().name("sessions".into()).spawn(move || write_all(&folder, &from))?;
        Ok(SessionWriter { tasks: Some(to), thread: Some(thread) })
    }

    /// Hands a sequence over, once the one before is written.
    pub fn write(&self, task: WriteTask) {
        if let Some(tasks) = &self.tasks {
            // The thread ends before only by a panic; then nothing more is written.
            let _ = tasks.send(task);
        }
    }
}

impl Drop for SessionWriter {
    /// Waits until all is written.
    fn drop(&mut self) {
        drop(self.tasks.take());
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

fn write_all(folder: &SessionFolder, tasks: &Receiver<WriteTask>) {
    let mut failed = false;
    for WriteTask { sequence, origin, named } in tasks {
        if let Some((name, after)) = named {
            let written = folder.write_named(&name, &sequence, &origin);
            drop(sequence);
            after(written);
            continue;
        }
        let written = folder.write_prefix(&sequence, &origin);
        if let Err(error) = &written
            && !failed
        {
            eprintln!("warning: sequences cannot be saved in {}: {error}; serving goes on", folder.path().display());
        }
        failed = written.is_err();
    }
}
