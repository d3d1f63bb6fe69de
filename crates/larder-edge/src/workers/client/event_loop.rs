//! The event loop of the worker connections. The thread that waits for replies runs it, so that no other thread has to
//! be woken for each reply.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::Notify;
use tokio::task::yield_now;

/// Time without a waiting thread after which a thread of its own runs the event loop.
const IDLE: Duration = Duration::from_millis(200);
/// Rounds of the event loop after which a new request is written to its socket.
const FLUSH_YIELDS: usize = 8;

/// A single-threaded runtime that runs spawned tasks whenever a thread waits in it.
pub struct EventLoop {
    runtime: Arc<Runtime>,
    state: Arc<IdleState>,
    /// Ends the idle thread when it is dropped.
    _keeper: Sender<()>,
}

struct IdleState {
    /// Notified when a thread waits again.
    busy: Notify,
    /// The last time at which a thread waited.
    last: Mutex<Instant>,
}

impl EventLoop {
    /// Starts the loop, and a thread that runs it while no other thread waits.
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

    /// Spawns a task that runs whenever the loop runs.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(task);
    }

    /// Enters the runtime, for constructors that need it.
    pub fn enter(&self) -> tokio::runtime::EnterGuard<'_> {
        self.runtime.enter()
    }

    /// Runs the loop until `what` is ready.
    pub fn block_on<T>(&self, what: impl Future<Output = T>) -> T {
        self.state.mark_used();
        self.runtime.block_on(what)
    }

    /// Runs the loop until spawned requests are written to their sockets.
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
        *self.last.lock()
    }

    fn mark_used(&self) {
        *self.last.lock() = Instant::now();
        self.busy.notify_waiters();
    }
}
