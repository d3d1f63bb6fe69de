//! Accepting connections: a limited number at a time, and none that stays silent.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Sleep, sleep};
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

use crate::write_coalescing::CoalescedStream;

/// Time until the first bytes of a connection have to arrive.
const FIRST_BYTE_TIMEOUT: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example because no file descriptors are left.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// An accepted connection; holds one permit of the connection limit.
pub struct IncomingConnection {
    stream: CoalescedStream,
    /// Runs until the first bytes arrive.
    first_byte_timeout: Option<Pin<Box<Sleep>>>,
    _permit: OwnedSemaphorePermit,
}

/// Accepts connections, `most` at a time; others wait in the listen queue of the system.
pub fn accept_connections(listener: TcpListener, most: usize) -> ReceiverStream<io::Result<IncomingConnection>> {
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
            let stream = CoalescedStream::new(stream);
            let connection = IncomingConnection {
                stream,
                first_byte_timeout: Some(Box::pin(sleep(FIRST_BYTE_TIMEOUT))),
                _permit: permit,
            };
            if to.send(Ok(connection)).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(connections)
}

impl Connected for IncomingConnection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.stream().connect_info()
    }
}

impl AsyncRead for IncomingConnection {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context, into: &mut ReadBuf) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if read.is_ready() {
            self.first_byte_timeout = None;
        } else if let Some(timeout) = &mut self.first_byte_timeout {
            ready!(timeout.as_mut().poll(context));
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
