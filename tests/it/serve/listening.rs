//! Where a server listens: TLS, and Unix sockets.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, KeyPair};
use rustix::process::Signal;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};

use crate::support::{fixture, larder_refuses, signal};

const REQUEST: &str = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// A server of the demo model, and where it says that it listens.
pub struct Listening(Child, String);

impl Listening {
    /// With further flags.
    pub fn start(flags: &[&str]) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_larder-under-test"))
            .args(["serve", "-m", fixture("../models/demo").to_str().unwrap(), "--threads", "1", "--context", "64"])
            .args(flags)
            .env("LARDER_HOT_SET", "off")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let serving = lines.find_map(|line| Some(line.unwrap().split_once(" on ")?.1.to_owned()));
        // What it writes later is dropped.
        std::thread::spawn(move || lines.for_each(drop));
        Listening(child, serving.expect("the server starts"))
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn ask(stream: impl Read + Write) -> String {
    ask_as(stream, REQUEST)
}

/// Sends a request and reads until the connection is closed.
pub fn ask_as(mut stream: impl Read + Write, request: &str) -> String {
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    // A server may close a TLS connection without a word when the answer is complete.
    let _ = stream.read_to_string(&mut answer);
    answer
}

/// Files of a certificate for `localhost` and of its key, and what clients trust.
fn identity(folder: &Path, name: &str) -> (String, String, CertificateDer<'static>) {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
    let file = |ending: &str, text: String| {
        let path = folder.join(format!("{name}.{ending}"));
        fs::write(&path, text).unwrap();
        path.to_str().unwrap().to_owned()
    };
    (file("crt", cert.pem()), file("key", key.serialize_pem()), cert.der().clone())
}

fn tls(address: &str, trusted: CertificateDer<'static>) -> StreamOwned<ClientConnection, TcpStream> {
    let mut roots = RootCertStore::empty();
    roots.add(trusted).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().unwrap().with_root_certificates(roots);
    let name = ServerName::try_from("localhost").unwrap();
    let connection = ClientConnection::new(Arc::new(config.with_no_client_auth()), name).unwrap();
    StreamOwned::new(connection, TcpStream::connect(address).unwrap())
}

#[test]
fn tls_is_spoken_with_clients_that_trust_the_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let (cert, key, trusted) = identity(folder.path(), "server");
    let server = Listening::start(&["--port", "0", "--tls-cert", &cert, "--tls-key", &key, "--client-timeout", "2"]);
    let address = server.1.strip_prefix("https://").expect("its address is https").to_owned();
    // Neither clients that say nothing nor those that speak no TLS keep others waiting, and they are cut off.
    let mut silent = TcpStream::connect(&address).unwrap();
    let plain = ask(TcpStream::connect(&address).unwrap());
    assert!(!plain.contains("200 OK"), "{plain}");
    let answer = ask(tls(&address, trusted.clone()));
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"demo\""), "{answer}");
    // A page of the same name that came without TLS is not the server's own.
    for (scheme, status) in [("https", "200"), ("http", "403")] {
        let request = REQUEST.replacen("\r\n", &format!("\r\nOrigin: {scheme}://localhost\r\n"), 1);
        let answer = ask_as(tls(&address, trusted.clone()), &request);
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{scheme}: {answer}");
    }
    let (_, _, other) = identity(folder.path(), "other");
    assert_eq!(tls(&address, other).write_all(REQUEST.as_bytes()).unwrap_err().kind(), std::io::ErrorKind::InvalidData);
    let since = Instant::now();
    silent.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    assert_eq!(silent.read(&mut [0; 8]).unwrap_or(0), 0);
    assert!(since.elapsed() < Duration::from_secs(15), "a silent client was not cut off");
}

#[test]
fn certificates_that_cannot_be_used_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (cert, key, _) = identity(folder.path(), "server");
    let (_, other, _) = identity(folder.path(), "other");
    let missing = folder.path().join("missing");
    for (cert, key, fault) in [
        (cert.as_str(), other.as_str(), "the key is not that of the first certificate"),
        (&key, &key, "the certificate file has no certificate in PEM"),
        (&cert, &cert, "the key file has no unencrypted private key in PEM"),
        (missing.to_str().unwrap(), &key, "not found"),
    ] {
        let model = fixture("../models/demo");
        let start = ["serve", "-m", model.to_str().unwrap(), "--port", "0", "--tls-cert", cert, "--tls-key", key];
        let error = larder_refuses(&start);
        assert!(error.contains(fault), "{error}");
    }
}

#[test]
fn a_unix_socket_is_one_users_and_goes_with_its_server() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("larder.sock");
    let flags = ["--unix-socket", path.to_str().unwrap()];
    // What a killed server leaves is replaced.
    drop(UnixListener::bind(&path).unwrap());
    let server = Listening::start(&flags);
    assert_eq!(server.1, format!("unix:{}", path.display()));
    assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    let answer = ask(UnixStream::connect(&path).unwrap());
    assert!(answer.starts_with("HTTP/1.1 200 OK") && answer.contains("\"demo\""), "{answer}");
    let model = fixture("../models/demo");
    let start = |path: &Path| {
        larder_refuses(&["serve", "-m", model.to_str().unwrap(), "--unix-socket", path.to_str().unwrap()])
    };
    let error = start(&path);
    assert!(error.contains("another server listens there"), "{error}");
    signal(&server.0, Signal::TERM);
    let until = Instant::now() + Duration::from_secs(20);
    while path.exists() {
        assert!(Instant::now() < until, "the socket's file is still there");
        std::thread::sleep(Duration::from_millis(20));
    }
    fs::write(&path, "mine").unwrap();
    let error = start(&path);
    assert!(error.contains("there is a file that is no socket"), "{error}");
    assert_eq!(fs::read(&path).unwrap(), b"mine");
    let error = start(&folder.path().join("x".repeat(200)));
    assert!(error.contains("cannot listen on --unix-socket"), "{error}");
}
