//! Connections: so many at a time, and none that says nothing.

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

use crate::gather::Gathered;

/// How long a connection may be silent at its beginning.
const SILENCE: Duration = Duration::from_secs(10);
/// How long to wait where the system has no more descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// A connection that has one of the places.
pub struct Guest {
    stream: Gathered,
    /// Runs until the first bytes have come.
    patience: Option<Pin<Box<Sleep>>>,
    _place: OwnedSemaphorePermit,
}

/// Lets connections in, `most` at a time; the others wait where the system keeps them.
pub fn guests(listener: TcpListener, most: usize) -> ReceiverStream<io::Result<Guest>> {
    let (to, guests) = mpsc::channel(1);
    tokio::spawn(async move {
        let places = Arc::new(Semaphore::new(most));
        while let Ok(place) = places.clone().acquire_owned().await {
            let stream = tokio::select! {
                stream = listener.accept() => stream,
                () = to.closed() => return,
            };
            let Ok((stream, _)) = stream else {
                sleep(PAUSE).await;
                continue;
            };
            let stream = Gathered::new(stream);
            let guest = Guest { stream, patience: Some(Box::pin(sleep(SILENCE))), _place: place };
            if to.send(Ok(guest)).await.is_err() {
                return;
            }
        }
    });
    ReceiverStream::new(guests)
}

impl Connected for Guest {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.stream().connect_info()
    }
}

impl AsyncRead for Guest {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context, into: &mut ReadBuf) -> Poll<io::Result<()>> {
        let read = Pin::new(&mut self.stream).poll_read(context, into);
        if read.is_ready() {
            self.patience = None;
        } else if let Some(patience) = &mut self.patience {
            ready!(patience.as_mut().poll(context));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        read
    }
}

impl AsyncWrite for Guest {
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
