//! Certificates, as PEM.

use std::io;
use std::path::Path;

/// What one side of an encrypted connection shows and believes.
#[derive(Clone, Default)]
pub struct TlsCredentials {
    /// Whose certificates are believed.
    pub ca: Option<Vec<u8>>,
    /// The own certificate and its key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsCredentials {
    /// From files. The error is a sentence that names the file.
    pub fn read(ca: Option<&Path>, cert: Option<&Path>, key: Option<&Path>) -> Result<Self, String> {
        let read = |path: &Path| -> Result<Vec<u8>, String> {
            let said = |e: io::Error| format!("{}: {e}", path.display());
            let bytes = std::fs::read(path).map_err(said)?;
            match bytes.windows(11).any(|at| at == b"-----BEGIN ") {
                true => Ok(bytes),
                false => Err(format!("{}: is no PEM file", path.display())),
            }
        };
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((read(cert)?, read(key)?)),
            (None, None) => None,
            _ => return Err("a certificate and its key belong together; only one of them is named".into()),
        };
        Ok(TlsCredentials { ca: ca.map(read).transpose()?, identity })
    }
}

impl std::fmt::Debug for TlsCredentials {
    /// Keys are nobody's business.
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "TlsCredentials {{ ca: {}, identity: {} }}", self.ca.is_some(), self.identity.is_some())
    }
}
