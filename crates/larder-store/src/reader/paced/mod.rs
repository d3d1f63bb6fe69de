//! Bounds the bytes in flight of any reader by a window that follows the SSD, one for each drive, and distributes the
//! reads between the drives.
//!
//! Reads beyond the window wait here and start as others complete, in order. Each call of the reader sees to that.
//! While the caller computes, and only while reads wait, a thread does it, so that the SSD is never idle for the lack
//! of a call. One thread at a time has the reader. It has all drives: waiting for the first completion of any is then
//! one call, and needs no thread per drive.

mod dispatch;
mod drive;

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::{ReadCompletion, ReadGoal, ReadRequest, Reader, Slot, window::ReadWindow};
use crate::{drives::Drives, error::StoreError};
use dispatch::{Completed, Dispatcher};
use drive::Drive;

/// Time since any fixed one.
type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

/// A reader whose bytes in flight are bounded by what the SSD likes.
pub struct PacedReader {
    shared: Arc<Shared>,
    name: &'static str,
    capacity: usize,
    /// Submitted reads whose completion was not returned yet.
    unreturned: usize,
    goal: ReadGoal,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    clock: Clock,
    copies: Drives,
}

struct State {
    /// The reader; `None` while a thread uses it.
    idle: Option<Paced>,
    /// The drives, and the reads that wait or are in flight.
    dispatcher: Dispatcher,
    /// Completed reads that were not returned yet.
    completed: VecDeque<ReadCompletion>,
    /// Whether the caller waits for `changed`.
    caller_waits: bool,
    closing: bool,
}

/// The reader, with an empty queue for what it is given next.
struct Paced {
    reader: Box<dyn Reader>,
    next: VecDeque<ReadRequest>,
}

impl PacedReader {
    /// Paces `reader`, in which nothing may be in flight, and whose shards are on one drive. Fails if no thread can be
    /// started.
    pub fn new(reader: Box<dyn Reader>) -> io::Result<Self> {
        Self::on_drives(reader, Drives::one(0))
    }

    /// As [`new`](Self::new), with shards on several drives: `reader` knows each copy by the number of its
    /// [file](Drives::file). A read that fails is done again from another copy, and is an error only if there is none.
    pub fn on_drives(reader: Box<dyn Reader>, drives: Drives) -> io::Result<Self> {
        let opened = Instant::now();
        Self::with(reader, drives, ReadWindow::new, Box::new(move || opened.elapsed()))
    }

    /// With another first window, to test what happens when reads are held back.
    #[cfg(test)]
    pub(super) fn with_window(reader: Box<dyn Reader>, drives: Drives, bytes: u64) -> Self {
        let opened = Instant::now();
        Self::with(reader, drives, |goal| ReadWindow::starting_at(bytes, goal), Box::new(move || opened.elapsed()))
            .unwrap()
    }

    fn with(
        reader: Box<dyn Reader>,
        copies: Drives,
        window: impl Fn(ReadGoal) -> ReadWindow,
        clock: Clock,
    ) -> io::Result<Self> {
        let (name, capacity) = (reader.name(), reader.capacity());
        let state = State {
            idle: Some(Paced { reader, next: VecDeque::with_capacity(capacity) }),
            dispatcher: Dispatcher::new(copies.clone(), capacity, || Drive::new(&window)),
            completed: VecDeque::with_capacity(capacity),
            caller_waits: false,
            closing: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), clock, copies });
        let theirs = shared.clone();
        let thread = thread::Builder::new().name("larder-pace".into()).spawn(move || theirs.run())?;
        Ok(PacedReader { shared, name, capacity, unreturned: 0, goal: ReadGoal::default(), thread: Some(thread) })
    }

    /// Bytes that may be in flight now, on all drives together.
    pub fn window_bytes(&self) -> u64 {
        self.shared.state.lock().dispatcher.drives().iter().map(|drive| drive.window(self.goal).bytes()).sum()
    }

    /// Mean bytes per second of the SSD while the window was full, of all drives together; `None` if it was not for
    /// long enough.
    pub fn mean_rate(&self) -> Option<f64> {
        let state = self.shared.state.lock();
        let rates = state.dispatcher.drives().iter().filter_map(|drive| drive.window(self.goal).mean_rate());
        rates.reduce(|a, b| a + b)
    }
}

impl Reader for PacedReader {
    fn name(&self) -> &'static str {
        self.name
    }

    fn capacity(&self) -> usize {
        self.capacity
    }

    fn submit(&mut self, reads: &mut VecDeque<ReadRequest>) {
        let taken = reads.len().min(self.capacity.saturating_sub(self.unreturned));
        self.unreturned += taken;
        self.shared.state.lock().dispatcher.extend(reads.drain(..taken), self.goal);
        // Without the reader, the thread has it, and starts what may start at the next completion: it has the reader
        // only while reads wait for one.
        if let Some(mut driver) = Driver::take(&self.shared) {
            driver.collect();
        }
    }

    fn set_goal(&mut self, goal: ReadGoal) {
        self.goal = goal;
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        if let Some(mut driver) = Driver::take(&self.shared) {
            driver.collect();
        }
        let done = self.shared.state.lock().completed.pop_front()?;
        self.unreturned -= 1;
        Some(done)
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        if self.unreturned == 0 {
            return None;
        }
        self.unreturned -= 1;
        loop {
            let mut state = self.shared.state.lock();
            if let Some(done) = state.completed.pop_front() {
                return Some(done);
            }
            if state.idle.is_none() {
                state.caller_waits = true;
                self.shared.changed.wait(&mut state);
                state.caller_waits = false;
                continue;
            }
            drop(state);
            if let Some(mut driver) = Driver::take(&self.shared) {
                driver.wait();
            }
        }
    }

    fn in_flight(&self) -> usize {
        self.unreturned
    }

    fn release(&mut self, slot: &Slot) -> bool {
        let mut state = self.shared.state.lock();
        state.caller_waits = true;
        self.shared.changed.wait_while(&mut state, |state| state.idle.is_none());
        state.caller_waits = false;
        state.idle.as_mut().is_some_and(|paced| paced.reader.release(slot))
    }

    fn read_copy(&mut self, read: ReadRequest, wrong: &StoreError) -> Result<(), ReadRequest> {
        let now = (self.shared.clock)();
        let note = self.shared.state.lock().dispatcher.read_copy(read, self.goal, wrong, now)?;
        self.unreturned += 1;
        self.shared.say(note);
        if let Some(mut driver) = Driver::take(&self.shared) {
            driver.collect();
        }
        Ok(())
    }
}

impl Drop for PacedReader {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        // Nothing starts any more, and the thread lets go of the reader.
        state.dispatcher.close();
        state.caller_waits = true;
        self.shared.changed.wait_while(&mut state, |state| state.idle.is_none());
        let paced = state.idle.take();
        drop(state);
        // The thread must not end before: the system cancels the reads of a thread that has ended.
        drop(paced);
        self.shared.state.lock().closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has put the reader back.
            let _ = thread.join();
        }
    }
}

impl Shared {
    /// Says what there is to say about a drive; the state must not be locked.
    fn say(&self, note: Option<String>) {
        note.iter().for_each(|note| self.copies.log().say(note));
    }

    /// The thread: waits for completions while reads wait for room and no call has the reader.
    fn run(&self) {
        loop {
            let mut state = self.state.lock();
            while !state.closing && (!state.dispatcher.has_waiting() || state.idle.is_none()) {
                self.changed.wait(&mut state);
            }
            if state.closing {
                return;
            }
            drop(state);
            if let Some(mut driver) = Driver::take(self) {
                driver.wait();
            }
        }
    }
}

/// A thread that has the reader. Dropping it puts the reader back.
struct Driver<'a> {
    shared: &'a Shared,
    paced: Option<Paced>,
}

impl<'a> Driver<'a> {
    fn take(shared: &'a Shared) -> Option<Self> {
        let paced = shared.state.lock().idle.take()?;
        Some(Driver { shared, paced: Some(paced) })
    }

    fn paced(&mut self) -> &mut Paced {
        self.paced.as_mut().expect("a driver has the reader until it is dropped")
    }

    /// Takes over what has completed, and starts what may start.
    fn collect(&mut self) {
        while let Some(done) = self.paced().reader.poll() {
            self.complete(done);
        }
        self.start();
    }

    /// Waits for a completion, and starts what may start then.
    fn wait(&mut self) {
        self.start();
        if let Some(done) = self.paced().reader.wait() {
            self.complete(done);
            self.start();
        }
    }

    fn complete(&mut self, done: ReadCompletion) {
        let now = (self.shared.clock)();
        let note = self.shared.state.lock().complete(done, now);
        self.shared.say(note);
    }

    /// Starts the reads for which there is room. The state is not locked meanwhile, because starting can take long.
    fn start(&mut self) {
        let shared = self.shared;
        let Paced { reader, next } = self.paced();
        shared.state.lock().dispatcher.take_next((shared.clock)(), next);
        if !next.is_empty() {
            reader.submit(next);
        }
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.idle = self.paced.take();
        let needed = state.caller_waits || state.dispatcher.has_waiting();
        drop(state);
        if needed {
            self.shared.changed.notify_all();
        }
    }
}

impl State {
    /// Takes over what the reader has completed; returns what is to be said about the drive.
    fn complete(&mut self, done: ReadCompletion, now: Duration) -> Option<String> {
        let Completed { done, note } = self.dispatcher.complete(done, now);
        self.completed.extend(done);
        note
    }
}

#[cfg(test)]
mod drive_tests;
#[cfg(test)]
mod tests;
