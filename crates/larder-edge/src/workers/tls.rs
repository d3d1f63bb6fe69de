//! TLS certificates and keys, as PEM.

use std::io;
use std::path::Path;

use larder_os::read_regular;

/// Maximum length of a PEM file.
const PEM_BYTES: u64 = 16 << 20;

/// The certificate that one side of a TLS connection presents, and the authority that it trusts.
#[derive(Clone, Default)]
pub struct TlsCredentials {
    /// Certificate authority that has to have signed the other side's certificate.
    pub ca: Option<Vec<u8>>,
    /// Own certificate and its private key.
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsCredentials {
    /// Reads PEM files. The error names the file.
    pub fn read(ca: Option<&Path>, cert: Option<&Path>, key: Option<&Path>) -> Result<Self, String> {
        let read = |path: &Path| -> Result<Vec<u8>, String> {
            let error = |e: io::Error| format!("{}: cannot be read: {e}", path.display());
            let bytes = read_regular(path, PEM_BYTES).map_err(error)?;
            if bytes.windows(11).any(|at| at == b"-----BEGIN ") {
                Ok(bytes)
            } else {
                Err(format!("{}: is not a PEM file", path.display()))
            }
        };
        let identity = match (cert, key) {
            (Some(cert), Some(key)) => Some((read(cert)?, read(key)?)),
            (None, None) => None,
            _ => {
                return Err(
                    "a certificate needs its key and a key its certificate; only one of the two files is set".into()
                );
            }
        };
        Ok(TlsCredentials { ca: ca.map(read).transpose()?, identity })
    }
}

impl std::fmt::Debug for TlsCredentials {
    /// Shows which parts are set, but no key.
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        write!(f, "TlsCredentials {{ ca: {}, identity: {} }}", self.ca.is_some(), self.identity.is_some())
    }
}
