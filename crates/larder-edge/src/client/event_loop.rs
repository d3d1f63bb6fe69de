//! The loop that connections need, run by whoever waits for answers: no other thread has to be woken for each of them.

use std::future::Future;
use std::io;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;
use tokio::task::yield_now;

/// After so long without anybody who waits, connections are looked after by a thread of their own.
const IDLE: Duration = Duration::from_millis(200);
/// How often what is ready is done before it is certain that what was sent is on its way.
const FLUSH_YIELDS: usize = 8;

/// Runs what was spawned whenever somebody waits.
pub struct EventLoop {
    runtime: Arc<Runtime>,
    state: Arc<IdleState>,
    /// Lets the thread end.
    _keeper: Sender<()>,
}

struct IdleState {
    /// Somebody waits again.
    busy: Notify,
    last: Mutex<Instant>,
}

impl EventLoop {
    /// A loop, and the thread that runs it while nobody waits.
    pub fn start() -> io::Result<Self> {
        let runtime = Arc::new(Builder::new_current_thread().enable_all().build()?);
        let state = Arc::new(IdleState { busy: Notify::new(), last: Mutex::new(Instant::now()) });
        let (keeper, ended) = mpsc::channel();
        let (idle_runtime, idle) = (runtime.clone(), state.clone());
        std::thread::Builder::new().name("edge".into()).spawn(move || {
            while ended.recv_timeout(IDLE) == Err(RecvTimeoutError::Timeout) {
                if idle.last().elapsed() >= IDLE {
                    idle_runtime.block_on(async {
                        let _ = tokio::time::timeout(IDLE, idle.busy.notified()).await;
                    });
                }
            }
        })?;
        Ok(EventLoop { runtime, state, _keeper: keeper })
    }

    /// Begins something that goes on whenever somebody waits.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// Lets what needs the loop be made here.
    pub fn enter(&self) -> tokio::runtime::EnterGuard<'_> {
        self.runtime.enter()
    }

    /// Waits.
    pub fn block_on<T>(&self, what: impl Future<Output = T>) -> T {
        self.state.mark_used();
        self.runtime.block_on(what)
    }

    /// Does what can be done at once: what was begun is on its way then.
    pub fn flush(&self) {
        self.block_on(async {
            for _ in 0..FLUSH_YIELDS {
                yield_now().await;
            }
        });
    }
}

impl IdleState {
    fn last(&self) -> Instant {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn mark_used(&self) {
        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.busy.notify_waiters();
    }
}
