//! Addresses of the workers that a client can use.

use crate::tls::TlsCredentials;

/// The workers of a client, in order of preference: the order decides between workers with equal estimates.
#[derive(Clone, Debug, Default)]
pub struct WorkerAddresses {
    /// The workers, the preferred one first.
    pub workers: Vec<WorkerAddress>,
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
}
