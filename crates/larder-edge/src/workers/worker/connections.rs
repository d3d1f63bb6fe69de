//! Accepting connections: a limited number at a time, and none that stays silent or unused.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Instant, Sleep, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TlsConnectInfo};

use crate::workers::write_coalescing::CoalescedStream;

/// Time until the first bytes of a connection have to arrive.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example because no file descriptors are left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// When a connection was last used for a request. Shared with the services, which find it in the extensions of a
/// request.
#[derive(Clone, Debug)]
pub struct ConnectionUse(Arc<Mutex<Requests>>);

#[derive(Debug)]
struct Requests {
    running: usize,
    /// Begin or end of the last one.
    last: Instant,
}

/// A request in progress on a connection.
pub struct RunningRequest(ConnectionUse);

impl ConnectionUse {
    fn new() -> Self {
        ConnectionUse(Arc::new(Mutex::new(Requests { running: 0, last: Instant::now() })))
    }

    /// That of the connection on which `request` came.
    pub fn of<B>(request: &http::Request<B>) -> Option<&ConnectionUse> {
        let extensions = request.extensions();
        let encrypted = || extensions.get::<TlsConnectInfo<ConnectionUse>>().map(TlsConnectInfo::get_ref);
        extensions.get::<ConnectionUse>().or_else(encrypted)
    }

    /// A request begins; it is in progress until the result is dropped.
    pub fn begin(&self) -> RunningRequest {
        let mut requests = self.0.lock();
        requests.running += 1;
        requests.last = Instant::now();
        RunningRequest(self.clone())
    }

    /// Since when there has been no request.
    fn unused_since(&self) -> Instant {
        let requests = self.0.lock();
        if requests.running > 0 { Instant::now() } else { requests.last }
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        let mut requests = self.0.0.lock();
        requests.running -= 1;
        requests.last = Instant::now();
    }
}

/// An accepted connection; holds one permit of the connection limit.
pub struct IncomingConnection {
    stream: CoalescedStream,
    requests: ConnectionUse,
    /// Time without a request after which the connection is closed, however well it answers pings.
    unused_timeout: Duration,
    /// Whether the first bytes have arrived.
    has_begun: bool,
    /// The earliest time at which it is to be closed.
    timer: Pin<Box<Sleep>>,
    _permit: OwnedSemaphorePermit,
}

impl IncomingConnection {
    fn new(stream: CoalescedStream, unused_timeout: Duration, permit: OwnedSemaphorePermit) -> Self {
        let timer = Box::pin(sleep(FIRST_BYTE_TIMEOUT));
        let requests = ConnectionUse::new();
        IncomingConnection { stream, requests, unused_timeout, has_begun: false, timer, _permit: permit }
    }

    /// Ready when the connection has been silent from its beginning, or unused, for too long.
    fn poll_timeout(&mut self, context: &mut Context) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(context));
            let until = self.requests.unused_since() + self.unused_timeout;
            if !self.has_begun || until <= Instant::now() {
                return Poll::Ready(());
            }
            self.timer.as_mut().reset(until);
        }
    }
}

/// Accepts connections, `most` at a time; others wait in the listen queue of the system. One that is not used for a
/// request for `unused_timeout` is closed.
pub fn accept_connections(
    listener: TcpListener,
    most: usize,
    unused_timeout: Duration,
) -> ReceiverStream<io::Result<IncomingConnection>> {
    let (to, connections) = mpsc::channel(1);
    tokio::spawn(async move {
        let permits = Arc::new(Semaphore::new(most));
        while let Ok(permit) = permits.clone().acquire_owned().await {
            let stream = tokio::select! {
                stream = listener.accept() => stream,
                () = to.closed() => return,
            };
            let Ok((stream, _)) = stream else {
                sleep(ACCEPT_RETRY).await;
                continue;
            };
            let connection = IncomingConnection::new(CoalescedStream::new(stream), unused_timeout, permit);
            if to.send(Ok(connection)).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(connections)
}

impl Connected for IncomingConnection {
    type ConnectInfo = ConnectionUse;

    fn connect_info(&self) -> Self::ConnectInfo {
        self.requests.clone()
    }
}

impl AsyncRead for IncomingConnection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context, into: &mut ReadBuf) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if read.is_ready() && !self.has_begun {
            self.has_begun = true;
            let until = self.requests.unused_since() + self.unused_timeout;
            self.timer.as_mut().reset(until);
        }
        if read.is_pending() {
            ready!(self.poll_timeout(context));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for IncomingConnection {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
