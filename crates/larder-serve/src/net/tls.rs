//! TLS: the server's certificate and key.

use std::io;
use std::sync::Arc;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{Error, ServerConfig};
use tokio_rustls::server::TlsStream;

/// A certificate with its key.
#[derive(Clone)]
pub struct TlsIdentity(TlsAcceptor);

/// Why a certificate and a key cannot be used. The text continues a sentence that begins with their files.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// No certificate was found.
    #[error("the certificate file has no certificate in PEM (BEGIN CERTIFICATE)")]
    NoCertificate,
    /// No key was found.
    #[error("the key file has no unencrypted private key in PEM (BEGIN PRIVATE KEY)")]
    NoKey,
    /// They do not belong together.
    #[error("the key is not that of the first certificate in the certificate file")]
    OtherKey,
    /// They are of an unknown kind.
    #[error("certificate and key cannot be used: {0}")]
    Refused(Error),
}

impl TlsIdentity {
    /// From the texts of PEM files: the certificate with those that sign it, and its private key.
    pub fn from_pem(certificates: &[u8], key: &[u8]) -> Result<Self, TlsError> {
        let chain = CertificateDer::pem_slice_iter(certificates).collect::<Result<Vec<_>, _>>();
        let chain = chain.ok().filter(|chain| !chain.is_empty()).ok_or(TlsError::NoCertificate)?;
        let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| TlsError::NoKey)?;
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Refused)?;
        let config = config.with_no_client_auth().with_single_cert(chain, key);
        let mut config = config.map_err(|error| match error {
            Error::InconsistentKeys(_) => TlsError::OtherKey,
            error => TlsError::Refused(error),
        })?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(TlsIdentity(TlsAcceptor::from(Arc::new(config))))
    }

    /// Makes the handshake with a client.
    pub(crate) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        self.0.accept(stream).await
    }
}
