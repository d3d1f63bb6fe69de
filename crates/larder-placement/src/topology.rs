//! The machines, as a person describes them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use larder_core::parse_bytes;
use serde::Deserialize;

use crate::{PlacementError, units};

/// The machine that asks, and those that serve.
#[derive(Clone, PartialEq, Debug)]
pub struct Topology {
    /// The machine that asks.
    pub device: DeviceEntry,
    /// Those that serve.
    pub servers: Vec<ServerEntry>,
    /// How connections are secured.
    pub tls: Option<TlsFiles>,
}

/// The machine that asks.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub struct DeviceEntry {
    /// Bytes of experts that it keeps for itself.
    pub storage: Option<u64>,
    /// FLOP/s.
    pub compute: Option<f64>,
}

/// A machine that serves.
#[derive(Clone, PartialEq, Debug)]
pub struct ServerEntry {
    /// What it is called.
    pub name: String,
    /// Where it answers.
    pub address: Option<String>,
    /// Bytes of experts that it has room for.
    pub storage: Option<u64>,
    /// FLOP/s.
    pub compute: Option<f64>,
    /// Bits per second to it.
    pub uplink: Option<f64>,
    /// Bits per second from it.
    pub downlink: Option<f64>,
    /// Seconds there and back, as `ping` shows them.
    pub delay: f64,
    /// Whether the device is attached to it.
    pub associated: bool,
    /// Whether it holds every expert.
    pub all: bool,
}

/// Files with certificates and keys.
#[derive(Clone, PartialEq, Eq, Default, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TlsFiles {
    /// Who is trusted.
    pub ca: Option<PathBuf>,
    /// Who the device is.
    pub cert: Option<PathBuf>,
    /// What proves it.
    pub key: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
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
    /// Reads a file.
    pub fn read(path: &Path) -> Result<Self, PlacementError> {
        let wrong = |why: String| PlacementError::File { path: path.to_owned(), reason: why };
        let text = std::fs::read_to_string(path).map_err(|e| wrong(format!("cannot be read: {e}")))?;
        Topology::parse(&text).map_err(wrong)
    }

    /// Reads the text of such a file; the error says what it does wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let file: File = toml::from_str(text).map_err(|e| {
            let line = e.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
            format!("is no topology: line {line}: {}", e.message().replace('\n', ", "))
        })?;
        let of = |what: &str, owner: &str| format!("says of the {what} of {owner}: ");
        let said = |what: &'static str, owner: &str, text: Option<String>, read: ParseQuantity| {
            let read = |text: String| read(&text).map_err(|why| of(what, owner) + &why);
            text.map(read).transpose()
        };
        let bytes = |what, owner: &str, text: Option<String>| {
            let read = |text: String| parse_bytes(&text).map_err(|why| format!("{}'{text}' {why}", of(what, owner)));
            text.map(read).transpose()
        };
        let device = DeviceEntry {
            storage: bytes("storage", "the device", file.device.storage)?,
            compute: said("compute", "the device", file.device.compute, units::compute)?,
        };
        let server = |entry: ServerFile| -> Result<ServerEntry, String> {
            let owner = format!("'{}'", entry.name);
            Ok(ServerEntry {
                storage: bytes("storage", &owner, entry.storage)?,
                compute: said("compute", &owner, entry.compute, units::compute)?,
                uplink: said("uplink", &owner, entry.uplink, units::rate)?,
                downlink: said("downlink", &owner, entry.downlink, units::rate)?,
                delay: said("delay", &owner, entry.delay, units::time)?.unwrap_or(0.0),
                name: entry.name,
                address: entry.address,
                associated: entry.associated,
                all: entry.all,
            })
        };
        let servers = file.server.into_iter().map(server).collect::<Result<_, _>>()?;
        let topology = Topology { device, servers, tls: file.tls };
        topology.check().map(|()| topology)
    }

    fn check(&self) -> Result<(), String> {
        if self.servers.is_empty() {
            return Err("names no server; each is a [[server]] with a name".into());
        }
        let mut names = BTreeSet::new();
        for server in &self.servers {
            if server.name.is_empty() || !names.insert(&server.name) {
                return Err(format!("has two servers called '{}', or one without a name", server.name));
            }
        }
        let associated: Vec<&str> = self.servers.iter().filter(|s| s.associated).map(|s| s.name.as_str()).collect();
        match associated.len() {
            0 | 1 => Ok(()),
            _ => Err(format!("says that the device is attached to {}, and it can be to one", associated.join(" and "))),
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
    fn what_cannot_be_is_said_with_its_place() {
        let said = |text: &str| Topology::parse(text).unwrap_err();
        assert!(said("").contains("names no server"));
        assert!(said("[[server]]\nname = \"a\"\n[[server]]\nname = \"a\"").contains("two servers called 'a'"));
        assert!(
            said("[[server]]\nname = \"a\"\nstorage = \"-4 GB\"").contains("storage of 'a': '-4 GB' is not a number")
        );
        assert!(said("[[server]]\nname = \"a\"\nuplink = \"9 Mbps\"").contains("uplink of 'a': '9 Mbps' has the unit"));
        assert!(said("[device]\ncompute = \"fast\"").contains("compute of the device: 'fast' is not"));
        assert!(said("[[server]]\nname = \"a\"\nasociated = true").contains("line 3"));
        let both = "[[server]]\nname = \"a\"\nassociated = true\n[[server]]\nname = \"b\"\nassociated = true";
        assert!(said(both).contains("attached to a and b"));
        assert!(!said("device = 3").contains('\n'));
    }
}
