use crate::tls::TlsCredentials;

/// Who can be asked, in this order unless somebody is known to be quicker.
#[derive(Clone, Debug, Default)]
pub struct WorkerAddresses {
    /// The machines.
    pub workers: Vec<WorkerAddress>,
    /// What is shown and believed where an address is `https://`.
    pub tls: TlsCredentials,
}

/// A machine that can be asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct WorkerAddress {
    /// Its name.
    pub name: String,
    /// `http://` or `https://`, with the port.
    pub address: String,
}
