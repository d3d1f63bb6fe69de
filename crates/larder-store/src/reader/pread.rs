//! Blocking reads on a few threads: the reader `pread`, which works on every system, and the threads of `overlapped`.

use std::{
    collections::VecDeque,
    io,
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread::{self, JoinHandle},
};

use larder_os::FileAt;
use parking_lot::{Condvar, Mutex};

use super::files::OpenFile;
use super::retry::Failures;
use super::{ReadCompletion, ReadRequest, Reader, ShardFiles};
use crate::error::{Result, StoreError};

/// Per drive, enough to keep an SSD busy; a blocked thread costs nothing.
const THREADS: usize = 8;
/// Reads in flight per drive: one per thread, and a few queued for each.
const CAPACITY: usize = 4 * THREADS;

/// One attempt to fill a buffer from a file at an offset; returns the bytes that it got.
type ReadOnce = fn(&OpenFile, &mut [u8], u64) -> io::Result<usize>;

/// A bounded queue of reads for each drive, and the threads that perform them: those of a drive that is slow or hangs
/// keep none of the others waiting.
pub(super) struct Pread {
    name: &'static str,
    read_once: ReadOnce,
    files: Arc<ShardFiles>,
    queues: Vec<Arc<Queue>>,
    done: Receiver<ReadCompletion>,
    in_flight: usize,
    workers: Vec<JoinHandle<()>>,
}

impl Pread {
    /// Starts the threads of `pread`.
    pub fn open(files: &Arc<ShardFiles>) -> Result<Self> {
        Self::with(files, "pread", |file, into, offset| file.file.read_at(into, offset))
    }

    /// Starts the threads of `overlapped`.
    #[cfg(windows)]
    pub fn open_overlapped(files: &Arc<ShardFiles>) -> Result<Self> {
        Self::with(files, "overlapped", |file, into, offset| file.handles.read(into, offset))
    }

    /// Starts threads that read as `read_once` does.
    fn with(files: &Arc<ShardFiles>, name: &'static str, read_once: ReadOnce) -> Result<Self> {
        let queues: Vec<Arc<Queue>> = (0..files.drives().count()).map(|_| Arc::default()).collect();
        let (finished, done) = channel();
        let mut reader = Pread { name, read_once, files: files.clone(), queues, done, in_flight: 0, workers: vec![] };
        for drive in 0..reader.queues.len() {
            for _ in 0..THREADS.min(files.open_max()) {
                let worker = reader.spawn(drive, finished.clone());
                let worker = worker.map_err(|e| StoreError::io(Path::new(""), "starting a reader thread", e))?;
                reader.workers.push(worker);
            }
        }
        Ok(reader)
    }

    /// Number of threads.
    pub fn threads(&self) -> usize {
        self.workers.len()
    }

    fn spawn(&self, drive: usize, finished: Sender<ReadCompletion>) -> io::Result<JoinHandle<()>> {
        let (files, queue, read_once) = (self.files.clone(), self.queues[drive].clone(), self.read_once);
        thread::Builder::new().name("larder-read".into()).spawn(move || {
            while let Some(mut read) = queue.next() {
                let result = perform(&files, read_once, &mut read);
                // The receiver is gone while the reader is being dropped.
                let _ = finished.send(ReadCompletion { slot: read.slot, tag: read.tag, result });
            }
        })
    }
}

impl Reader for Pread {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capacity(&self) -> usize {
        CAPACITY * self.queues.len()
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        let taken = reads.len().min(self.capacity() - self.in_flight);
        self.in_flight += taken;
        match &self.queues[..] {
            [queue] => queue.push(reads.drain(..taken)),
            queues => reads.drain(..taken).for_each(|read| queues[self.files.drive(read.shard)].push([read])),
        }
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        let done = self.done.try_recv().ok()?;
        self.in_flight -= 1;
        Some(done)
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        if self.in_flight == 0 {
            return None;
        }
        let done = self.done.recv().expect("threads outlive the reader");
        self.in_flight -= 1;
        Some(done)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Pread {
    fn drop(&mut self) {
        self.queues.iter().for_each(|queue| queue.close());
        for worker in self.workers.drain(..) {
            // A thread that panicked has dropped its slot while unwinding.
            let _ = worker.join();
        }
    }
}

fn perform(files: &ShardFiles, read_once: ReadOnce, read: &mut ReadRequest) -> Result<()> {
    let file = read.open(files)?;
    let (wanted, offset, mut failures) = (read.aligned_len(), read.offset, Failures::default());
    loop {
        let got = read_once(&file, &mut read.slot[..wanted], offset);
        if let Some(result) = read.outcome(|| files.path(read.shard), got, &mut failures) {
            return result.map_err(|error| files.failed(read.shard, error));
        }
    }
}

/// Reads that no thread has taken yet; `None` once the reader is dropped.
struct Queue {
    waiting: Mutex<Option<VecDeque<ReadRequest>>>,
    changed: Condvar,
}

impl Default for Queue {
    fn default() -> Self {
        Queue { waiting: Mutex::new(Some(VecDeque::with_capacity(CAPACITY))), changed: Condvar::new() }
    }
}

impl Queue {
    fn push(&self, reads: impl IntoIterator<Item = ReadRequest>) {
        self.waiting.lock().as_mut().expect("the reader is alive").extend(reads);
        self.changed.notify_all();
    }

    fn next(&self) -> Option<ReadRequest> {
        let mut waiting = self.waiting.lock();
        self.changed.wait_while(&mut waiting, |waiting| waiting.as_ref().is_some_and(VecDeque::is_empty));
        waiting.as_mut()?.pop_front()
    }

    fn close(&self) {
        self.waiting.lock().take();
        self.changed.notify_all();
    }
}
