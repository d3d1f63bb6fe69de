//! Edge workers: the connection to them, topology and placement.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Error, Result, anyhow, bail};
use larder_core::Geometry;
use larder_edge::placement::{PlacementFile, ServerEntry, Topology};
use larder_edge::{
    ClientOptions, Edge, ExpertSet, Handshake, TlsCredentials, WorkerAddress, WorkerAddresses, WorkerDiscovery,
    WorkerPool, WorkerPreference,
};
use larder_engine::StreamingPath;
use larder_store::{Source, Store};

use crate::notices::{Notice, Notices, Setting};
use crate::open::{OpenModel, model_name};
use crate::options::EdgeOptions;

/// Adds the workers of a topology to the path `local`. Connects to them and checks the handshake at once.
pub(crate) fn connect(
    local: StreamingPath,
    store: &Arc<Store>,
    options: &EdgeOptions,
    exact: bool,
    notices: &Notices,
) -> Result<Edge> {
    let handshake = handshake(store, exact);
    let own = match &options.placement {
        None => None,
        Some(path) => LoadedPlacement::read(path)?.device_experts(&model_name(store.path()), &handshake.geometry)?,
    };
    let stored = ExpertSet::from_fn(&handshake.geometry, |layer, expert| store.has(layer, expert));
    let client = ClientOptions { format: options.format, deadline: options.deadline.max(Duration::from_millis(1)) };
    let pool = WorkerPool::connect(&machines(&options.topology)?, handshake, client).map_err(Error::msg)?;
    pool.status_lines().into_iter().for_each(|line| notices.send(Notice::Worker(line)));
    Ok(Edge::new(local, pool, own, stored))
}

/// Refuses a model that is not a store.
pub(crate) fn refuse_no_store<T>(model: &OpenModel) -> Result<T> {
    let path = model.source().path().display();
    bail!("{path}: is not a store, and {} needs one; make one with `larder convert {path} STORE`", Setting::Edge)
}

/// What client and workers must agree on, also if the client was opened without a layer for multi-token prediction.
pub fn handshake(store: &Store, exact: bool) -> Handshake {
    let manifest = store.stored_manifest();
    Handshake { model: manifest.experts_fingerprint(), geometry: manifest.geometry.clone(), exact }
}

/// The workers of a topology: the associated one first, those that hold all experts last. Beside a name to discover,
/// servers without an address are workers that are expected behind that name.
fn machines(path: &Path) -> Result<WorkerAddresses> {
    let in_file = |what: String| anyhow!("{}: {what}", path.display());
    let Topology { mut servers, discover, tls, .. } = Topology::read(path)?;
    let has_scheme = |address: &str| address.starts_with("http://") || address.starts_with("https://");
    if discover.as_ref().is_some_and(|address| !has_scheme(address)) {
        return Err(in_file("discover must begin with http:// or https://".into()));
    }
    let mut discover = discover.map(|address| WorkerDiscovery { address, preferences: BTreeMap::new() });
    servers.sort_by_key(preference);
    let mut workers = Vec::new();
    for server in servers {
        let preference = preference(&server);
        let ServerEntry { name, address, .. } = server;
        match (address, &mut discover) {
            (Some(address), _) if has_scheme(&address) => workers.push(WorkerAddress { name, address, preference }),
            (Some(_), _) => {
                return Err(in_file(format!("the address of {name} must begin with http:// or https://")));
            }
            (None, Some(discovery)) => drop(discovery.preferences.insert(name, preference)),
            (None, None) => {
                let what = format!("the server {name} has no address; add address = \"http://HOST:PORT\"");
                return Err(in_file(what));
            }
        }
    }
    // Relative to the topology file, not to the current folder.
    let beside = |file: Option<PathBuf>| Some(path.parent()?.join(file?));
    let larder_edge::placement::TlsFiles { ca, cert, key } = tls.unwrap_or_default();
    let tls = TlsCredentials::read(beside(ca).as_deref(), beside(cert).as_deref(), beside(key).as_deref())
        .map_err(in_file)?;
    Ok(WorkerAddresses { workers, discover, tls })
}

fn preference(server: &ServerEntry) -> WorkerPreference {
    match server {
        ServerEntry { associated: true, .. } => WorkerPreference::Associated,
        ServerEntry { all: true, .. } => WorkerPreference::HoldsAll,
        _ => WorkerPreference::Ordinary,
    }
}

/// A placement file with its path, for errors.
pub struct LoadedPlacement {
    path: PathBuf,
    file: PlacementFile,
}

impl LoadedPlacement {
    /// Reads a placement file.
    pub fn read(path: &Path) -> Result<Self> {
        Ok(LoadedPlacement { path: path.to_owned(), file: PlacementFile::read(path)? })
    }

    /// The experts of a model that a worker holds.
    pub fn server_experts(&self, name: &str, model: &str, geometry: &Geometry) -> Result<ExpertSet> {
        let Some(models) = self.file.server.get(name) else {
            let known: Vec<&str> = self.file.server.keys().map(String::as_str).collect();
            bail!("{}: has no entry for {name}; it has entries for {}", self.path.display(), known.join(", "));
        };
        self.model_experts(models, name, model, geometry)
    }

    /// The experts of a model that the device keeps for itself; `None` if the file does not say.
    pub fn device_experts(&self, model: &str, geometry: &Geometry) -> Result<Option<ExpertSet>> {
        match &self.file.device {
            none if none.is_empty() => Ok(None),
            models => self.model_experts(models, "the device", model, geometry).map(Some),
        }
    }

    /// The experts of the model of that name, or of the only model in the file.
    fn model_experts(
        &self,
        models: &BTreeMap<String, larder_edge::placement::ExpertLists>,
        owner: &str,
        model: &str,
        geometry: &Geometry,
    ) -> Result<ExpertSet> {
        let in_file = |what: String| anyhow!("{}: {what}, among the experts of {owner}", self.path.display());
        let only = models.values().next().filter(|_| models.len() == 1);
        let Some(share) = models.get(model).or(only) else {
            let known: Vec<&str> = models.keys().map(String::as_str).collect();
            return Err(in_file(format!("has the models {}, but not {model}", known.join(", "))));
        };
        ExpertSet::from_lists(&share.experts, geometry).map_err(in_file)
    }
}

#[cfg(test)]
mod tests {
    use larder_core::{ExpertId, LayerIdx};

    use super::*;

    fn file_with(text: &str) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file.toml");
        std::fs::write(&path, text).unwrap();
        (dir, path)
    }

    fn geometry() -> Geometry {
        Geometry::narrow(2, [1], 4, 2)
    }

    #[test]
    fn workers_are_sorted_and_certificates_are_relative_to_the_file() {
        let server =
            |name: &str, rest: &str| format!("[[server]]\nname = \"{name}\"\naddress = \"http://x:1\"\n{rest}\n");
        let text = [
            "[device]\nstorage = \"4 GB\"\n",
            &server("cloud", "all = true"),
            &server("rack", "delay = \"2 ms\""),
            &server("desk", "associated = true"),
            "[tls]\nca = \"ca.pem\"\n",
        ];
        let (dir, path) = file_with(&text.concat());
        assert!(machines(&path).unwrap_err().to_string().contains("ca.pem"));
        std::fs::write(dir.path().join("ca.pem"), "-----BEGIN CERTIFICATE-----").unwrap();
        let found = machines(&path).unwrap();
        let names: Vec<&str> = found.workers.iter().map(|machine| machine.name.as_str()).collect();
        assert_eq!(names, ["desk", "rack", "cloud"]);
        assert!(found.tls.ca.is_some());
    }

    #[test]
    fn servers_without_an_address_are_expected_behind_the_name() {
        let (_dir, path) = file_with(
            "discover = \"http://workers:7070\"\n[[server]]\nname = \"worker-0\"\nassociated = true\n\
             [[server]]\nname = \"cloud\"\naddress = \"http://x:1\"\nall = true\n",
        );
        let found = machines(&path).unwrap();
        assert_eq!(found.workers.len(), 1);
        let discovery = found.discover.unwrap();
        assert_eq!(discovery.address, "http://workers:7070");
        assert_eq!(discovery.preferences["worker-0"], WorkerPreference::Associated);
    }

    #[test]
    fn a_topology_without_a_usable_address_is_refused() {
        for (text, part) in [
            ("", "names no server"),
            ("discover = \"workers:7070\"\n", "discover must begin with http:// or https://"),
            ("[[server]]\nname = \"a\"\n", "the server a has no address"),
            ("[[server]]\nname = \"a\"\naddress = \"x:1\"\n", "must begin with http:// or https://"),
        ] {
            let (_dir, path) = file_with(text);
            let error = machines(&path).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains("file.toml") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn experts_are_looked_up_by_worker_and_model() {
        let (_dir, path) = file_with(
            "version = 1\n[server.desk.a]\nexperts = [[], [1]]\n[server.desk.b]\nexperts = [[], [2, 3]]\n\
             [server.rack.a]\nexperts = [[], [9]]\n[device.a]\nexperts = [[], [0]]\n",
        );
        let placement = LoadedPlacement::read(&path).unwrap();
        let held = placement.server_experts("desk", "b", &geometry()).unwrap();
        assert_eq!(held.iter().collect::<Vec<_>>(), [(LayerIdx(1), ExpertId(2)), (LayerIdx(1), ExpertId(3))]);
        assert_eq!(placement.device_experts("z", &geometry()).unwrap().unwrap().count(), 1);
        let refused = |name, model| placement.server_experts(name, model, &geometry()).unwrap_err().to_string();
        assert!(refused("desk", "z").ends_with("has the models a, b, but not z, among the experts of desk"));
        assert!(refused("attic", "a").ends_with("has no entry for attic; it has entries for desk, rack"));
        assert!(refused("rack", "a").contains("expert 9 of layer 1, which the model does not have"));
        let (_dir, path) = file_with("version = 1\n");
        assert!(LoadedPlacement::read(&path).unwrap().device_experts("a", &geometry()).unwrap().is_none());
    }
}
