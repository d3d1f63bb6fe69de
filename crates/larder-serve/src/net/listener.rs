//! Where the server listens: a TCP port, with TLS if wanted, or a Unix socket.

use std::io;
use std::net::TcpListener;
#[cfg(unix)]
use std::os::unix::net::UnixListener;

use tokio::io::{AsyncRead, AsyncWrite};

#[cfg(feature = "tls")]
use crate::net::tls::TlsIdentity;

/// A socket that clients connect to.
pub struct ServerListener {
    socket: Socket,
    #[cfg(feature = "tls")]
    tls: Option<TlsIdentity>,
}

enum Socket {
    Tcp(TcpListener),
    #[cfg(unix)]
    Unix(UnixListener),
}

impl ServerListener {
    /// Listens on a TCP port.
    pub fn tcp(listener: TcpListener) -> Self {
        ServerListener::of(Socket::Tcp(listener))
    }

    /// Listens on a Unix socket.
    #[cfg(unix)]
    pub fn unix(listener: UnixListener) -> Self {
        ServerListener::of(Socket::Unix(listener))
    }

    fn of(socket: Socket) -> Self {
        ServerListener {
            socket,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// The same, for clients that speak TLS.
    #[cfg(feature = "tls")]
    pub fn with_tls(self, identity: TlsIdentity) -> Self {
        ServerListener { tls: Some(identity), ..self }
    }

    /// The same for the current runtime.
    pub(crate) fn start(self) -> io::Result<Acceptor> {
        let socket = match self.socket {
            Socket::Tcp(listener) => {
                listener.set_nonblocking(true)?;
                AsyncSocket::Tcp(tokio::net::TcpListener::from_std(listener)?)
            }
            #[cfg(unix)]
            Socket::Unix(listener) => {
                listener.set_nonblocking(true)?;
                AsyncSocket::Unix(tokio::net::UnixListener::from_std(listener)?)
            }
        };
        Ok(Acceptor {
            socket,
            #[cfg(feature = "tls")]
            tls: self.tls,
        })
    }
}

/// Accepts connections.
pub(crate) struct Acceptor {
    socket: AsyncSocket,
    #[cfg(feature = "tls")]
    tls: Option<TlsIdentity>,
}

enum AsyncSocket {
    Tcp(tokio::net::TcpListener),
    #[cfg(unix)]
    Unix(tokio::net::UnixListener),
}

/// A connection's bytes.
pub(crate) type ClientStream = Box<dyn ReadWrite>;

/// Both directions of a connection.
pub(crate) trait ReadWrite: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> ReadWrite for T {}

impl Acceptor {
    /// The next connection, as it is on the socket.
    pub async fn accept(&self) -> io::Result<ClientStream> {
        match &self.socket {
            AsyncSocket::Tcp(listener) => {
                let (stream, _) = listener.accept().await?;
                // A token is a small packet that should not wait for the next.
                let _ = stream.set_nodelay(true);
                Ok(Box::new(stream))
            }
            #[cfg(unix)]
            AsyncSocket::Unix(listener) => Ok(Box::new(listener.accept().await?.0)),
        }
    }

    /// What turns connections into what they carry; may take as long as the client likes.
    pub fn handshake(&self) -> Handshake {
        Handshake {
            #[cfg(feature = "tls")]
            tls: self.tls.clone(),
        }
    }
}

/// The beginning of a connection: nothing, or TLS.
#[derive(Clone)]
pub(crate) struct Handshake {
    #[cfg(feature = "tls")]
    tls: Option<TlsIdentity>,
}

impl Handshake {
    /// The bytes that the connection carries.
    #[cfg(feature = "tls")]
    pub async fn finish(self, stream: ClientStream) -> io::Result<ClientStream> {
        match self.tls {
            Some(identity) => Ok(Box::new(identity.accept(stream).await?)),
            None => Ok(stream),
        }
    }

    /// The bytes that the connection carries.
    #[cfg(not(feature = "tls"))]
    pub async fn finish(self, stream: ClientStream) -> io::Result<ClientStream> {
        Ok(stream)
    }
}
