//! The server: its threads and its shutdown.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::middleware;

use crate::http::guard::guard;
use crate::net::listener::ServerListener;
use crate::options::{GRAMMAR_THREADS, LOOKUP_THREADS, ServerOptions, TOKENIZER_THREADS};
use crate::pool::{ModelPool, ModelSource};
use crate::state::SharedState;
use crate::{http, net::connection};

/// Threads for HTTP; nearly all work is on the decode thread.
const HTTP_THREADS: usize = 2;

/// Serves models on `listener` until a signal; active requests are then completed, unless there is a second one.
/// `signal` is the next signal that is to end the process, counted from its call; it is an error where there are none,
/// and then the server runs until the process is killed. `ready` is called as soon as clients are served and signals
/// are heeded.
pub fn serve<S>(
    listener: ServerListener,
    options: ServerOptions,
    models: ModelSource,
    signal: impl Fn() -> io::Result<S> + Send + 'static,
    ready: impl FnOnce(),
) -> io::Result<()>
where
    S: Future<Output = ()> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(HTTP_THREADS)
        .max_blocking_threads(TOKENIZER_THREADS + GRAMMAR_THREADS + LOOKUP_THREADS + 2)
        .thread_name("http")
        .enable_all()
        .build()?;
    let server = Arc::new(SharedState::new(options));
    let pool = match models {
        ModelSource::Loaded(model, engine) => ModelPool::loaded(server.clone(), http::of_model, *model, engine)?,
        ModelSource::OnDemand(models) => ModelPool::on_demand(server.clone(), http::of_model, models),
    };
    runtime.block_on(async {
        let listener = listener.start()?;
        if let Ok(first) = signal() {
            tokio::spawn(close_on_signal(pool.clone(), first, signal));
        }
        tokio::spawn(pool.clone().unload_idle());
        ready();
        let guard = middleware::from_fn_with_state(server.clone(), guard);
        let router = http::router(server.clone(), pool.clone()).layer(guard);
        connection::accept(listener, router, server.options.client_timeout, pool.ended()).await;
        io::Result::Ok(())
    })?;
    runtime.shutdown_timeout(Duration::from_secs(1));
    pool.result()
}

/// The first signal shuts down once active requests are complete, the second at once.
async fn close_on_signal<S>(pool: Arc<ModelPool>, first: S, signal: impl Fn() -> io::Result<S> + Send)
where
    S: Future<Output = ()> + Send + 'static,
{
    first.await;
    let second = signal();
    pool.close();
    let (_, active) = pool.all_lengths();
    if active > 0 {
        let requests = if active == 1 { "request" } else { "requests" };
        eprintln!("shutting down: finishing {active} {requests}; press Ctrl-C again to stop now");
    }
    if let Ok(second) = second {
        second.await;
        std::process::exit(130);
    }
}
