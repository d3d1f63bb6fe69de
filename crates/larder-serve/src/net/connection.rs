//! Connections: a limited number, a time limit for clients that stall, and a graceful shutdown.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Semaphore;
use tokio::time::{Instant, Sleep, sleep, timeout};

use crate::net::listener::{Acceptor, ClientStream};

/// Open connections at a time; further ones wait in the listener's backlog.
const CONNECTIONS_MAX: usize = 512;
/// The most bytes that a connection has received and that are not yet read.
pub const BUFFER_BYTES: usize = 64 << 10;
/// Time for connections to close once all requests are complete.
const GRACE: Duration = Duration::from_secs(5);
/// Pause after a failed accept, mostly for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Serves connections until `end`. `idle_timeout` limits the wait for a client that has to send or to receive.
pub async fn accept(listener: Acceptor, router: Router, idle_timeout: Duration, end: impl Future<Output = ()>) {
    let (permits, graceful) = (Arc::new(Semaphore::new(CONNECTIONS_MAX)), GracefulShutdown::new());
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(idle_timeout).max_buf_size(BUFFER_BYTES);
    let mut end = std::pin::pin!(end);
    loop {
        let accepted = async {
            let permit = permits.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, stream) = tokio::select! {
            accepted = accepted => accepted,
            () = &mut end => break,
        };
        let Ok(stream) = stream else {
            sleep(PAUSE).await;
            continue;
        };
        let (handshake, server, watcher) = (listener.handshake(), server.clone(), graceful.watcher());
        let service = TowerToHyperService::new(router.clone());
        tokio::spawn(async move {
            // An error here concerns one client's connection only.
            let stream = Box::new(WriteTimeout::new(stream, idle_timeout));
            if let Ok(Ok(stream)) = timeout(idle_timeout, handshake.finish(stream)).await {
                let _ = watcher.watch(server.serve_connection(TokioIo::new(stream), service)).await;
            }
            drop(permit);
        });
    }
    drop(listener);
    let _ = timeout(GRACE, graceful.shutdown()).await;
}

/// A socket's stream, below TLS, whose writes fail once the client has received nothing for `idle_timeout`.
struct WriteTimeout {
    stream: ClientStream,
    idle_timeout: Duration,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl WriteTimeout {
    fn new(stream: ClientStream, idle_timeout: Duration) -> Self {
        WriteTimeout { stream, idle_timeout, stalled: None }
    }

    fn watch<T>(&mut self, written: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let idle_timeout = self.idle_timeout;
        let timer =
            self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(Instant::now() + idle_timeout)));
        match timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl AsyncRead for WriteTimeout {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buf)
    }
}

impl AsyncWrite for WriteTimeout {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, data);
        self.watch(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        data: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, data);
        self.watch(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(flushed, context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
