//! Touches the memory of an arena ahead of the reads, on a thread of its own.
//!
//! The system provides and clears memory when it is first touched. A direct read touches its slot within the call that
//! submits it, so clearing would delay that read and all behind it. Populating a range changes no byte of it, so it
//! may meet a read that fills a slot at the same time.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use parking_lot::Mutex;

/// Bytes that are touched at a time: one huge page. Another thread that maps or unmaps memory waits as long, as each
/// that loads a tensor does several times.
const STEP_BYTES: usize = 2 << 20;
/// Bytes by which touching is ahead of the reads, where it is bounded.
const AHEAD_BYTES: u64 = 256 << 20;
/// Niceness of a thread that touches memory which nothing waits for.
#[cfg(any(target_os = "linux", target_os = "android"))]
const BACKGROUND_NICENESS: i32 = 10;

/// How far and how urgently memory is touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TouchPace {
    /// All of it, with the time that other threads leave.
    Background,
    /// A bounded distance ahead of what [`Arena::reads_reached`](super::Arena::reads_reached) was told.
    AheadOfReads,
}

/// Bytes of an arena that were touched, and the time that took.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Touched {
    /// Bytes.
    pub bytes: u64,
    /// Time that the system took.
    pub busy: Duration,
}

impl Touched {
    /// Bytes per second; `None` if nothing was touched.
    pub fn rate(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.bytes as f64 / self.busy.as_secs_f64().max(1e-9))
    }
}

/// The thread that touches memory. Dropping it waits until it has ended, after at most one step.
pub(super) struct Toucher {
    progress: Arc<Progress>,
    thread: Option<JoinHandle<()>>,
}

struct Progress {
    stopping: AtomicBool,
    /// Held while a range is touched.
    step: Mutex<()>,
    /// Bytes that may be touched.
    limit: AtomicU64,
    touched: AtomicU64,
    busy_nanos: AtomicU64,
}

impl Toucher {
    /// Starts a thread that calls `touch` for the bytes from 0 to `bytes`, range by range, until it fails. The calls
    /// end before a drop of this returns.
    pub fn start(
        bytes: usize,
        pace: TouchPace,
        touch: impl Fn(usize, usize) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let limit = match pace {
            TouchPace::Background => u64::MAX,
            TouchPace::AheadOfReads => AHEAD_BYTES,
        };
        let progress = Arc::new(Progress {
            stopping: AtomicBool::new(false),
            step: Mutex::new(()),
            limit: AtomicU64::new(limit),
            touched: AtomicU64::new(0),
            busy_nanos: AtomicU64::new(0),
        });
        let shared = progress.clone();
        let thread = thread::Builder::new().name("larder-touch".into()).spawn(move || {
            if pace == TouchPace::Background {
                lower_priority();
            }
            shared.run(bytes, touch);
        })?;
        Ok(Toucher { progress, thread: Some(thread) })
    }

    /// Lets the thread go on as far ahead of byte `reads` as the pace allows.
    pub fn reads_reached(&self, reads: u64) {
        let limit = reads.saturating_add(AHEAD_BYTES);
        // Often less than a step further, for which the thread need not wake up.
        let before = self.progress.limit.fetch_max(limit, Ordering::Relaxed);
        if limit > before
            && let Some(thread) = &self.thread
        {
            thread.thread().unpark();
        }
    }

    /// Ends the thread, and waits for the step that it is in: nothing is touched any more afterwards.
    pub fn stop(&self) {
        self.progress.stopping.store(true, Ordering::Relaxed);
        self.thread.iter().for_each(|thread| thread.thread().unpark());
        drop(self.progress.step.lock());
    }

    /// Bytes and time of touching so far.
    pub fn touched(&self) -> Touched {
        let Progress { touched, busy_nanos, .. } = &*self.progress;
        let busy = Duration::from_nanos(busy_nanos.load(Ordering::Relaxed));
        Touched { bytes: touched.load(Ordering::Relaxed), busy }
    }
}

impl Progress {
    fn run(&self, bytes: usize, touch: impl Fn(usize, usize) -> io::Result<()>) {
        let mut at = 0;
        while at < bytes && !self.stopping.load(Ordering::Relaxed) {
            if at as u64 >= self.limit.load(Ordering::Relaxed) {
                // A wake-up before this call makes it return at once.
                thread::park();
                continue;
            }
            let step = STEP_BYTES.min(bytes - at);
            let start = Instant::now();
            match self.step(|| touch(at, step)) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                // No memory, or a kernel without the call: the reads touch it themselves.
                Err(_) => return,
            }
            at += step;
            self.busy_nanos.fetch_add(start.elapsed().as_nanos() as u64, Ordering::Relaxed);
            self.touched.fetch_add(step as u64, Ordering::Relaxed);
        }
    }

    /// Touches a range, unless the thread was told to end before.
    fn step(&self, touch: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let _step = self.step.lock();
        if self.stopping.load(Ordering::Relaxed) { Err(io::ErrorKind::Interrupted.into()) } else { touch() }
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        self.stop();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked touches nothing any more.
            let _ = thread.join();
        }
    }
}

/// Lowers the priority of this thread alone, where threads have one.
fn lower_priority() {
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let _ = rustix::process::setpriority_process(None, BACKGROUND_NICENESS);
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES: usize = 1 << 30;

    /// Offsets and lengths in bytes.
    type Ranges = Arc<Mutex<Vec<(usize, usize)>>>;

    /// A toucher that records its ranges.
    fn recorded(pace: TouchPace, fail_at: usize) -> (Toucher, Ranges) {
        let ranges = Ranges::default();
        let all = ranges.clone();
        let touch = move |at, bytes| {
            if at >= fail_at {
                return Err(io::ErrorKind::OutOfMemory.into());
            }
            all.lock().push((at, bytes));
            Ok(())
        };
        (Toucher::start(BYTES + 4096, pace, touch).unwrap(), ranges)
    }

    fn wait_until(condition: impl Fn() -> bool) {
        let start = Instant::now();
        while !condition() {
            assert!(start.elapsed() < Duration::from_secs(60));
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn all_memory_is_touched_once_in_order_and_in_steps() {
        let (toucher, ranges) = recorded(TouchPace::Background, usize::MAX);
        wait_until(|| toucher.touched().bytes == BYTES as u64 + 4096);
        let ranges = ranges.lock();
        let mut end = 0;
        for (at, bytes) in ranges.iter() {
            assert!(*at == end && *bytes <= STEP_BYTES);
            end += bytes;
        }
        assert_eq!(end, BYTES + 4096);
    }

    #[test]
    fn touching_stays_a_bounded_distance_ahead_of_the_reads() {
        let (toucher, _) = recorded(TouchPace::AheadOfReads, usize::MAX);
        for (reads, reached) in [(0, 0), (10 << 20, 10 << 20), (9 << 20, 10 << 20), (500 << 20, 500 << 20)] {
            toucher.reads_reached(reads);
            wait_until(|| toucher.touched().bytes >= AHEAD_BYTES + reached);
            thread::sleep(Duration::from_millis(5));
            assert!(toucher.touched().bytes < AHEAD_BYTES + reached + STEP_BYTES as u64, "{:?}", toucher.touched());
        }
        toucher.reads_reached(u64::MAX);
        wait_until(|| toucher.touched().bytes == BYTES as u64 + 4096);
    }

    #[test]
    fn a_failure_ends_the_touching_quietly() {
        let (toucher, ranges) = recorded(TouchPace::Background, 3 * STEP_BYTES);
        wait_until(|| toucher.thread.as_ref().unwrap().is_finished());
        assert_eq!((ranges.lock().len(), toucher.touched().bytes), (3, 3 * STEP_BYTES as u64));
    }

    #[test]
    fn dropping_it_ends_it_wherever_it_is() {
        // One waits for reads, the other is within a step.
        drop(recorded(TouchPace::AheadOfReads, usize::MAX));
        let touch = |_, _| {
            thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        let start = Instant::now();
        drop(Toucher::start(usize::MAX, TouchPace::Background, touch).unwrap());
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn nothing_is_touched_after_it_was_stopped() {
        let (begun, ended) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let counts = (begun.clone(), ended.clone());
        let touch = move |_, _| {
            counts.0.fetch_add(1, Ordering::Relaxed);
            thread::sleep(Duration::from_millis(20));
            counts.1.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let toucher = Toucher::start(usize::MAX, TouchPace::Background, touch).unwrap();
        wait_until(|| begun.load(Ordering::Relaxed) > ended.load(Ordering::Relaxed));
        toucher.stop();
        let steps = ended.load(Ordering::Relaxed);
        assert_eq!(begun.load(Ordering::Relaxed), steps, "a step goes on");
        thread::sleep(Duration::from_millis(40));
        assert_eq!(begun.load(Ordering::Relaxed), steps, "a step has begun");
    }

    #[test]
    fn a_rate_needs_bytes() {
        assert_eq!(Touched::default().rate(), None);
        assert_eq!(Touched { bytes: 10, busy: Duration::from_secs(2) }.rate(), Some(5.0));
    }
}
