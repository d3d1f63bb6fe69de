//! A TCP stream that coalesces small writes: the parts of one message leave in one write.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// Buffered bytes from which on a write is not deferred.
const BUFFER_BYTES: usize = 64 << 10;

/// A TCP stream with a write buffer. HTTP/2 writes the headers of a message, its body and its end separately; each
/// would be a system call and a packet of its own.
pub struct CoalescedStream {
    stream: TcpStream,
    buffer: Vec<u8>,
    /// Whether the flush was deferred once already, so that other tasks could add to the buffer.
    flush_deferred: bool,
}

impl CoalescedStream {
    /// Wraps a stream and sets TCP_NODELAY.
    pub fn new(stream: TcpStream) -> Self {
        // If TCP_NODELAY cannot be set, the connection is only slower.
        let _ = stream.set_nodelay(true);
        CoalescedStream { stream, buffer: Vec::new(), flush_deferred: false }
    }

    fn poll_send(&mut self, context: &mut Context) -> Poll<io::Result<()>> {
        while !self.buffer.is_empty() {
            let sent = ready!(Pin::new(&mut self.stream).poll_write(context, &self.buffer))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.buffer.drain(..sent);
        }
        self.flush_deferred = false;
        Pin::new(&mut self.stream).poll_flush(context)
    }
}

impl AsyncRead for CoalescedStream {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context, into: &mut ReadBuf) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl AsyncWrite for CoalescedStream {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.buffer.len() >= BUFFER_BYTES {
            ready!(self.poll_send(context))?;
        }
        self.buffer.extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        if !self.buffer.is_empty() && !std::mem::replace(&mut self.flush_deferred, true) {
            context.waker().wake_by_ref();
            return Poll::Pending;
        }
        self.poll_send(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context) -> Poll<io::Result<()>> {
        ready!(self.poll_send(context))?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn all_bytes_arrive_in_order() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut far, _) = listener.accept().await.unwrap();
        let sent: Vec<u8> = (0..1_000_000u32).map(|i| (i % 251) as u8).collect();
        let received = tokio::spawn(async move {
            let mut received = Vec::new();
            far.read_to_end(&mut received).await.unwrap();
            received
        });
        let mut near = CoalescedStream::new(stream);
        for part in sent.chunks(3333) {
            near.write_all(part).await.unwrap();
            if part[0] % 3 == 0 {
                near.flush().await.unwrap();
            }
        }
        near.shutdown().await.unwrap();
        assert!(received.await.unwrap() == sent);
    }
}
