//! Where `larder serve` listens: a port or a Unix socket, with TLS if wanted.

use std::fmt;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};

use anyhow::{Context, Result, anyhow};
use larder_serve::ServerListener;

#[cfg(feature = "tls")]
use super::FILE_BYTES_MAX;
use crate::cli::serve::AddressFlags;
use crate::commands::listen;

/// Where the server listens, until it is dropped.
pub enum Address {
    Tcp {
        address: SocketAddr,
        with_tls: bool,
    },
    #[cfg(unix)]
    Unix(unix::SocketFile),
}

impl AddressFlags {
    /// Listens as the flags say.
    pub fn listen(&self) -> Result<(ServerListener, Address)> {
        #[cfg(unix)]
        if let Some(path) = &self.unix_socket {
            let (listener, file) = unix::bind(path)?;
            return Ok((ServerListener::unix(listener), Address::Unix(file)));
        }
        let (identity, with_tls) = (self.identity()?, self.tls_cert.is_some());
        let listener = listen_on(&self.host, self.port)?;
        let address = listener.local_addr()?;
        Ok((with_identity(ServerListener::tcp(listener), identity), Address::Tcp { address, with_tls }))
    }

    #[cfg(feature = "tls")]
    fn identity(&self) -> Result<Option<larder_serve::TlsIdentity>> {
        let (Some(cert), Some(key)) = (&self.tls_cert, &self.tls_key) else { return Ok(None) };
        let read = |path: &std::path::Path| {
            let bytes = larder_store::read_small(path, FILE_BYTES_MAX)?;
            bytes.ok_or_else(|| anyhow!("{}: not found", path.display()))
        };
        let identity = larder_serve::TlsIdentity::from_pem(&read(cert)?, &read(key)?);
        Ok(Some(identity.with_context(|| format!("--tls-cert {}, --tls-key {}", cert.display(), key.display()))?))
    }

    #[cfg(not(feature = "tls"))]
    fn identity(&self) -> Result<()> {
        match self.tls_cert {
            Some(_) => {
                Err(anyhow!("this larder was built without TLS; build it with --features tls, or leave out --tls-cert"))
            }
            None => Ok(()),
        }
    }
}

#[cfg(feature = "tls")]
fn with_identity(listener: ServerListener, identity: Option<larder_serve::TlsIdentity>) -> ServerListener {
    match identity {
        Some(identity) => listener.with_tls(identity),
        None => listener,
    }
}

#[cfg(not(feature = "tls"))]
fn with_identity(listener: ServerListener, (): ()) -> ServerListener {
    listener
}

/// Listens on the first address of `host` that is free.
fn listen_on(host: &str, port: u16) -> Result<TcpListener> {
    let addresses =
        (host, port).to_socket_addrs().with_context(|| format!("--host {host}: cannot find its address"))?;
    let mut last = None;
    for address in addresses {
        match listen(address, "--port") {
            Ok(listener) => return Ok(listener),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| anyhow!("--host {host} has no address")))
}

impl Address {
    /// Whether it is a port that only this machine can connect to, as pages of any site in its browser can.
    pub fn is_local_port(&self) -> bool {
        matches!(self, Address::Tcp { address, .. } if address.ip().is_loopback())
    }

    /// Whether clients speak TLS.
    pub fn with_tls(&self) -> bool {
        matches!(self, Address::Tcp { with_tls: true, .. })
    }

    /// Whether other machines can connect.
    pub fn is_public(&self) -> bool {
        matches!(self, Address::Tcp { address, .. } if !address.ip().is_loopback())
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Address::Tcp { address, with_tls: false } => write!(f, "http://{address}"),
            Address::Tcp { address, with_tls: true } => write!(f, "https://{address}"),
            #[cfg(unix)]
            Address::Unix(file) => write!(f, "unix:{}", file.path.display()),
        }
    }
}

#[cfg(unix)]
mod unix {
    use std::fs;
    use std::io::ErrorKind;
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::path::{Path, PathBuf};

    use anyhow::{Result, bail};
    use rustix::fs::Mode;
    use rustix::process::umask;

    /// The file of a Unix socket, which is removed when this is dropped, if it is still the same.
    pub struct SocketFile {
        pub path: PathBuf,
        identity: (u64, u64),
    }

    /// Listens on a socket that only this user can connect to. A file that a dead server has left is replaced.
    pub fn bind(path: &Path) -> Result<(UnixListener, SocketFile)> {
        remove_stale(path)?;
        // From the start no other user can connect. No other thread runs yet that would make files meanwhile.
        let before = umask(Mode::RWXG | Mode::RWXO | Mode::XUSR);
        let bound = UnixListener::bind(path);
        umask(before);
        let refused =
            |error: std::io::Error| anyhow::anyhow!("cannot listen on --unix-socket {}: {error}", path.display());
        let listener = bound.map_err(refused)?;
        let identity = identity(path).map_err(refused)?;
        Ok((listener, SocketFile { path: path.to_owned(), identity }))
    }

    fn remove_stale(path: &Path) -> Result<()> {
        let Ok(metadata) = fs::symlink_metadata(path) else { return Ok(()) };
        if !metadata.file_type().is_socket() {
            bail!("--unix-socket {}: there is a file that is no socket; choose another path", path.display());
        }
        match UnixStream::connect(path) {
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {}
            _ => bail!("--unix-socket {}: another server listens there; choose another path", path.display()),
        }
        fs::remove_file(path).or_else(|error| match error.kind() {
            ErrorKind::NotFound => Ok(()),
            _ => bail!(
                "--unix-socket {}: the socket of a server that has ended cannot be removed: {error}",
                path.display()
            ),
        })
    }

    fn identity(path: &Path) -> std::io::Result<(u64, u64)> {
        let metadata = fs::symlink_metadata(path)?;
        Ok((metadata.dev(), metadata.ino()))
    }

    impl Drop for SocketFile {
        fn drop(&mut self) {
            if identity(&self.path).is_ok_and(|now| now == self.identity) {
                let _ = fs::remove_file(&self.path);
            }
        }
    }
}
