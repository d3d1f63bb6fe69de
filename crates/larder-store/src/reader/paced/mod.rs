//! Bounds the bytes in flight of any reader by a window that follows the SSD.
//!
//! Reads beyond the window wait here and start as others complete, in order. Each call of the reader sees to that. While
//! the caller computes, and only while reads wait, a thread does it, so that the SSD is never idle for the lack of a
//! call. One thread at a time has the reader.

use std::{
    collections::VecDeque,
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use super::{ReadCompletion, ReadRequest, Reader, Slot, window::ReadWindow};

/// Time since any fixed one.
type Clock = Box<dyn Fn() -> Duration + Send + Sync>;

/// A reader whose bytes in flight are bounded by what the SSD likes.
pub struct PacedReader {
    shared: Arc<Shared>,
    name: &'static str,
    capacity: usize,
    /// Submitted reads whose completion was not returned yet.
    unreturned: usize,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    clock: Clock,
    capacity: usize,
}

struct State {
    /// The reader; `None` while a thread uses it.
    idle: Option<Paced>,
    window: ReadWindow,
    /// Reads that were submitted and not started, in order.
    waiting: VecDeque<ReadRequest>,
    /// Tags of the callers and lengths of the reads in flight; the index is the tag of the reader.
    started: Vec<(u64, u64)>,
    /// Free places in `started`.
    free: Vec<usize>,
    in_flight_bytes: u64,
    /// Whether the window held reads back when reads were last started.
    held_back: bool,
    /// The longest read that was started, in bytes.
    longest: u64,
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
    /// Paces `reader`, in which nothing may be in flight. Fails if no thread can be started.
    pub fn new(reader: Box<dyn Reader>) -> io::Result<Self> {
        let opened = Instant::now();
        Self::with(reader, ReadWindow::default(), Box::new(move || opened.elapsed()))
    }

    /// With another first window, to test what happens when reads are held back.
    #[cfg(test)]
    pub(super) fn with_window(reader: Box<dyn Reader>, bytes: u64) -> Self {
        let opened = Instant::now();
        Self::with(reader, ReadWindow::starting_at(bytes), Box::new(move || opened.elapsed())).unwrap()
    }

    fn with(reader: Box<dyn Reader>, window: ReadWindow, clock: Clock) -> io::Result<Self> {
        let (name, capacity) = (reader.name(), reader.capacity());
        let state = State {
            idle: Some(Paced { reader, next: VecDeque::with_capacity(capacity) }),
            window,
            waiting: VecDeque::with_capacity(capacity),
            started: vec![(0, 0); capacity],
            free: (0..capacity).rev().collect(),
            in_flight_bytes: 0,
            held_back: false,
            longest: 0,
            completed: VecDeque::with_capacity(capacity),
            caller_waits: false,
            closing: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new(), clock, capacity });
        let theirs = shared.clone();
        let thread = thread::Builder::new().name("larder-pace".into()).spawn(move || theirs.run())?;
        Ok(PacedReader { shared, name, capacity, unreturned: 0, thread: Some(thread) })
    }

    /// Bytes that may be in flight now.
    pub fn window_bytes(&self) -> u64 {
        self.shared.state().window.bytes()
    }

    /// Mean bytes per second of the SSD while the window was full; `None` if it was not for long enough.
    pub fn mean_rate(&self) -> Option<f64> {
        self.shared.state().window.mean_rate()
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
        let taken = reads.len().min(self.capacity - self.unreturned);
        self.unreturned += taken;
        self.shared.state().waiting.extend(reads.drain(..taken));
        // Without the reader, the thread has it, and starts what may start at the next completion: it has the reader only
        // while reads wait for one.
        if let Some(mut driver) = Driver::take(&self.shared) {
            driver.collect();
        }
    }

    fn poll(&mut self) -> Option<ReadCompletion> {
        if let Some(mut driver) = Driver::take(&self.shared) {
            driver.collect();
        }
        let done = self.shared.state().completed.pop_front()?;
        self.unreturned -= 1;
        Some(done)
    }

    fn wait(&mut self) -> Option<ReadCompletion> {
        if self.unreturned == 0 {
            return None;
        }
        self.unreturned -= 1;
        loop {
            let mut state = self.shared.state();
            if let Some(done) = state.completed.pop_front() {
                return Some(done);
            }
            if state.idle.is_none() {
                state.caller_waits = true;
                let mut state = self.shared.wait(state);
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
        let mut state = self.shared.state();
        state.caller_waits = true;
        while state.idle.is_none() {
            state = self.shared.wait(state);
        }
        state.caller_waits = false;
        state.idle.as_mut().is_some_and(|paced| paced.reader.release(slot))
    }
}

impl Drop for PacedReader {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        // Nothing starts any more, and the thread lets go of the reader.
        state.waiting.clear();
        state.caller_waits = true;
        while state.idle.is_none() {
            state = self.shared.wait(state);
        }
        let paced = state.idle.take();
        drop(state);
        // The thread must not end before: the system cancels the reads of a thread that has ended.
        drop(paced);
        self.shared.state().closing = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has put the reader back.
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }

    /// The thread: waits for completions while reads wait for room and no call has the reader.
    fn run(&self) {
        loop {
            let mut state = self.state();
            while !state.closing && (state.waiting.is_empty() || state.idle.is_none()) {
                state = self.wait(state);
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
        let paced = shared.state().idle.take()?;
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
        self.shared.state().complete(done, now, self.shared.capacity);
    }

    /// Starts the reads for which there is room. The state is not locked meanwhile, because starting can take long.
    fn start(&mut self) {
        let shared = self.shared;
        let Paced { reader, next } = self.paced();
        shared.state().take_next(next);
        if !next.is_empty() {
            reader.submit(next);
        }
    }
}

impl Drop for Driver<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.idle = self.paced.take();
        let needed = state.caller_waits || !state.waiting.is_empty();
        drop(state);
        if needed {
            self.shared.changed.notify_all();
        }
    }
}

impl State {
    /// Moves the reads that may start now to `next`.
    fn take_next(&mut self, next: &mut VecDeque<ReadRequest>) {
        self.held_back = false;
        while let Some(read) = self.waiting.front()
            && let Some(place) = self.free.last().copied()
        {
            let len = read.len as u64;
            if !self.window.allows(self.in_flight_bytes, len) {
                self.held_back = true;
                return;
            }
            let read = self.waiting.pop_front().expect("it is in front");
            self.free.pop();
            self.started[place] = (read.tag, len);
            self.in_flight_bytes += len;
            self.longest = self.longest.max(len);
            next.push_back(ReadRequest { tag: place as u64, ..read });
        }
    }

    fn complete(&mut self, done: ReadCompletion, now: Duration, capacity: usize) {
        let place = done.tag as usize;
        let (tag, len) = self.started[place];
        self.free.push(place);
        self.in_flight_bytes -= len;
        // A failed read says nothing about the rate.
        let counts = self.held_back && done.result.is_ok();
        let most = self.longest.saturating_mul(capacity as u64);
        self.window.completed(len, now, counts, most);
        self.completed.push_back(ReadCompletion { tag, ..done });
    }
}

#[cfg(test)]
mod tests;
