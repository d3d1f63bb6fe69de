//! Connections to other servers, and requests over them.

use std::io;

use axum::http::{Request, Response};
use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::connection::BUFFER_BYTES;
use super::listener::ReadWrite;

/// What a connection to another server carries.
pub(crate) type ServerStream = Box<dyn ReadWrite>;

/// What a connection to this host carries, with TLS if that is wanted.
pub(crate) async fn opened(stream: TcpStream, host: &str, with_tls: bool) -> io::Result<ServerStream> {
    // A request is a small packet that should not wait for the next.
    let _ = stream.set_nodelay(true);
    if with_tls { secured(stream, host).await } else { Ok(Box::new(stream)) }
}

/// Makes the handshake; the server's certificate has to be of Mozilla's authorities.
#[cfg(feature = "https")]
async fn secured(stream: TcpStream, host: &str) -> io::Result<ServerStream> {
    use std::sync::Arc;

    use rustls_pki_types::ServerName;
    use tokio_rustls::TlsConnector;
    use tokio_rustls::rustls::crypto::ring;
    use tokio_rustls::rustls::{ClientConfig, RootCertStore};

    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(io::Error::other)?;
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from(host.to_owned()).map_err(io::Error::other)?;
    Ok(Box::new(TlsConnector::from(Arc::new(config)).connect(name, stream).await?))
}

#[cfg(not(feature = "https"))]
async fn secured(_: TcpStream, _: &str) -> io::Result<ServerStream> {
    Err(io::Error::other("this larder was built without TLS"))
}

/// The answer to a request, whose body is still to be read.
pub(crate) async fn exchange(stream: ServerStream, request: Request<Full<Bytes>>) -> hyper::Result<Response<Incoming>> {
    let mut client = http1::Builder::new();
    let (mut sender, connection) = client.max_buf_size(BUFFER_BYTES).handshake(TokioIo::new(stream)).await?;
    // It ends with the response's body, or when that is dropped.
    tokio::spawn(connection);
    sender.send_request(request).await
}
