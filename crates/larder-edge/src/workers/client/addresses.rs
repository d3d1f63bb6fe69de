//! The addresses of workers: listed one by one, or behind a name that is looked up.

use std::collections::BTreeMap;

use crate::workers::tls::TlsCredentials;

/// The workers of a client, in order of preference: the order decides between workers with equal estimates.
#[derive(Clone, Debug, Default)]
pub struct WorkerAddresses {
    /// The workers, the preferred one first.
    pub workers: Vec<WorkerAddress>,
    /// A name behind which there are more.
    pub discover: Option<WorkerDiscovery>,
    /// Certificates for addresses that begin with `https://`.
    pub tls: TlsCredentials,
}

/// Name and address of a worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerAddress {
    /// The worker's name in the topology.
    pub name: String,
    /// URL with scheme `http://` or `https://` and the port.
    pub address: String,
    /// Its place among workers with equal estimates, before the order of the list.
    pub preference: WorkerPreference,
}

/// Which of several workers with equal estimates is asked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Debug)]
pub enum WorkerPreference {
    /// Before all others: it is nearest.
    Associated,
    /// Between these.
    #[default]
    Ordinary,
    /// After all others: it holds every expert, so others are better asked for those that they hold.
    HoldsAll,
}

/// A name that resolves to the addresses of any number of workers.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct WorkerDiscovery {
    /// URL with scheme `http://` or `https://`, the name and the port.
    pub address: String,
    /// Preferences of workers by the name that they state in the handshake; all others are ordinary.
    pub preferences: BTreeMap<String, WorkerPreference>,
}
