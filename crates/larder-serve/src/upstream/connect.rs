//! Connections to another server.

use std::io;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;

use super::UpstreamAddress;

/// A connection.
pub type UpstreamStream = Box<dyn UpstreamIo>;

pub trait UpstreamIo: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> UpstreamIo for T {}

/// Connects to the server, with TLS if its address says so.
pub async fn connect(address: &UpstreamAddress) -> io::Result<UpstreamStream> {
    let stream = TcpStream::connect((address.host.as_str(), address.port)).await?;
    stream.set_nodelay(true)?;
    if address.with_tls { with_tls(address, stream).await } else { Ok(Box::new(stream)) }
}

/// Makes the handshake; the server's certificate has to be of Mozilla's authorities.
#[cfg(feature = "tls")]
async fn with_tls(address: &UpstreamAddress, stream: TcpStream) -> io::Result<UpstreamStream> {
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
    let name = ServerName::try_from(address.host.clone()).map_err(io::Error::other)?;
    Ok(Box::new(TlsConnector::from(Arc::new(config)).connect(name, stream).await?))
}

#[cfg(not(feature = "tls"))]
async fn with_tls(_: &UpstreamAddress, _: TcpStream) -> io::Result<UpstreamStream> {
    Err(io::Error::other("this larder was built without TLS"))
}
