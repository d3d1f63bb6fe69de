//! The topology file: machines, their memory and their links.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use larder_core::parse_bytes;
use larder_os::read_regular_text;
use serde::Deserialize;

use crate::placement::{PlacementError, units};

/// Maximum length of a file.
const BYTES_MAX: u64 = 16 << 20;

/// The client device and its servers.
#[derive(Clone, PartialEq, Debug)]
pub struct Topology {
    /// The machine that runs the model, a client of the servers.
    pub device: DeviceEntry,
    /// The machines that compute experts for it; at least one, unless they are discovered.
    pub servers: Vec<ServerEntry>,
    /// URL with a name that resolves to the addresses of workers.
    pub discover: Option<String>,
    /// Certificates, if connections are encrypted.
    pub tls: Option<TlsFiles>,
}

/// The machine that runs the model: the table `[device]`.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct DeviceEntry {
    /// Bytes for experts that it keeps itself.
    pub storage: Option<u64>,
    /// Speed in FLOP/s.
    pub compute: Option<f64>,
}

/// A machine that computes experts: one table `[[server]]`.
#[derive(Clone, PartialEq, Debug)]
pub struct ServerEntry {
    /// Its name, unique in the file.
    pub name: String,
    /// URL of its worker.
    pub address: Option<String>,
    /// Bytes available for experts.
    pub storage: Option<u64>,
    /// Speed in FLOP/s.
    pub compute: Option<f64>,
    /// Bits per second from the device to the server.
    pub uplink: Option<f64>,
    /// Bits per second from the server to the device.
    pub downlink: Option<f64>,
    /// Round-trip time in seconds, as `ping` reports it.
    pub delay: f64,
    /// Whether the device is attached to this server; true of at most one.
    pub associated: bool,
    /// Whether it holds every expert.
    pub all: bool,
}

/// PEM files with certificates and keys.
#[derive(Clone, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Certificate authority that signs the workers' certificates.
    pub ca: Option<PathBuf>,
    /// Certificate of the device.
    pub cert: Option<PathBuf>,
    /// Private key of that certificate.
    pub key: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    discover: Option<String>,
    #[serde(default)]
    device: DeviceFile,
    #[serde(default)]
    server: Vec<ServerFile>,
    tls: Option<TlsFiles>,
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct DeviceFile {
    storage: Option<String>,
    compute: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ServerFile {
    name: String,
    address: Option<String>,
    storage: Option<String>,
    compute: Option<String>,
    uplink: Option<String>,
    downlink: Option<String>,
    delay: Option<String>,
    #[serde(default)]
    associated: bool,
    #[serde(default)]
    all: bool,
}

impl Topology {
    /// Reads and checks a topology file.
    pub fn read(path: &Path) -> Result<Self, PlacementError> {
        let error = |reason: String| PlacementError::File { path: path.to_owned(), reason };
        let text = read_regular_text(path, BYTES_MAX).map_err(|e| error(format!("cannot be read: {e}")))?;
        Topology::parse(&text).map_err(error)
    }

    /// Parses the text of such a file. The error continues a sentence that begins with the file's name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            format!("is not a valid topology: line {line}: {}", e.message().replace('\n', ", "))
        })?;
        let context = |what: &str, owner: &str| format!("has an invalid {what} of {owner}: ");
        let quantity = |what: &'static str, owner: &str, text: Option<String>, parse: ParseQuantity| {
            let parse = |text: String| parse(&text).map_err(|reason| context(what, owner) + &reason);
            text.map(parse).transpose()
        };
        let bytes = |what, owner: &str, text: Option<String>| {
            let parse = |text: String| {
                parse_bytes(&text).map_err(|reason| format!("{}'{text}' {reason}", context(what, owner)))
            };
            text.map(parse).transpose()
        };
        let device = DeviceEntry {
            storage: bytes("storage", "the device", file.device.storage)?,
            compute: quantity("compute", "the device", file.device.compute, units::compute)?,
        };
        let server = |entry: ServerFile| -> Result<ServerEntry, String> {
            let owner = format!("'{}'", entry.name);
            Ok(ServerEntry {
                storage: bytes("storage", &owner, entry.storage)?,
                compute: quantity("compute", &owner, entry.compute, units::compute)?,
                uplink: quantity("uplink", &owner, entry.uplink, units::rate)?,
                downlink: quantity("downlink", &owner, entry.downlink, units::rate)?,
                delay: quantity("delay", &owner, entry.delay, units::time)?.unwrap_or(0.0),
                name: entry.name,
                address: entry.address,
                associated: entry.associated,
                all: entry.all,
            })
        };
        let servers = file.server.into_iter().map(server).collect::<Result<_, _>>()?;
        let topology = Topology { device, servers, discover: file.discover, tls: file.tls };
        topology.check().map(|()| topology)
    }

    fn check(&self) -> Result<(), String> {
        if self.servers.is_empty() && self.discover.is_none() {
            return Err(
                "names no server; add a [[server]] table with a name, or discover = \"http://NAME:PORT\"".into()
            );
        }
        let mut names = BTreeSet::new();
        for server in &self.servers {
            if server.name.is_empty() || !names.insert(&server.name) {
                return Err(format!("has two servers named '{}', or one without a name", server.name));
            }
        }
        let associated: Vec<&str> = self.servers.iter().filter(|s| s.associated).map(|s| s.name.as_str()).collect();
        match associated.len() {
            0 | 1 => Ok(()),
            _ => Err(format!("sets associated = true for {}; only one server can have it", associated.join(" and "))),
        }
    }
}

type ParseQuantity = fn(&str) -> Result<f64, String>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_are_read_with_their_units() {
        let text = "[device]\nstorage = \"4 GB\"\ncompute = \"50 GFLOP/s\"\n[[server]]\nname = \"desk\"\nstorage = \"8 GiB\"\n\
                    uplink = \"100 Mbit/s\"\ndelay = \"2 ms\"\nassociated = true\n[[server]]\nname = \"big\"\nall = true\n\
                    address = \"https://big:7070\"\n[tls]\nca = \"ca.pem\"\n";
        let topology = Topology::parse(text).unwrap();
        assert_eq!(topology.device, DeviceEntry { storage: Some(4_000_000_000), compute: Some(5e10) });
        let [desk, big] = &topology.servers[..] else { panic!("two servers") };
        assert_eq!((desk.storage, desk.uplink, desk.downlink, desk.delay), (Some(8 << 30), Some(1e8), None, 0.002));
        assert!(desk.associated && !desk.all && big.all && !big.associated);
        assert_eq!(topology.tls.unwrap().ca.unwrap(), Path::new("ca.pem"));
    }

    #[test]
    fn servers_may_be_discovered() {
        let topology = Topology::parse("discover = \"http://workers:7070\"\n[device]\nstorage = \"4 GB\"\n").unwrap();
        assert_eq!(topology.discover.as_deref(), Some("http://workers:7070"));
        assert!(topology.servers.is_empty());
    }

    #[test]
    fn errors_name_the_server_and_the_field() {
        let error = |text: &str| Topology::parse(text).unwrap_err();
        assert!(error("").contains("names no server"));
        assert!(error("[[server]]\nname = \"a\"\n[[server]]\nname = \"a\"").contains("two servers named 'a'"));
        assert!(
            error("[[server]]\nname = \"a\"\nstorage = \"-4 GB\"").contains("storage of 'a': '-4 GB' is not a size")
        );
        assert!(
            error("[[server]]\nname = \"a\"\nuplink = \"9 Mbps\"")
                .contains("uplink of 'a': '9 Mbps' has the unknown unit")
        );
        assert!(error("[device]\ncompute = \"fast\"").contains("compute of the device: 'fast' is not"));
        assert!(error("[[server]]\nname = \"a\"\nasociated = true").contains("line 3"));
        let both = "[[server]]\nname = \"a\"\nassociated = true\n[[server]]\nname = \"b\"\nassociated = true";
        assert!(error(both).contains("associated = true for a and b"));
        assert!(!error("device = 3").contains('\n'));
    }
}
