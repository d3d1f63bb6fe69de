use crate::tls::Tls;

/// Who can be asked, in this order unless somebody is known to be quicker.
#[derive(Clone, Debug, Default)]
pub struct Machines {
    /// The machines.
    pub all: Vec<Machine>,
    /// What is shown and believed where an address is `https://`.
    pub tls: Tls,
}

/// A machine that can be asked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Its name.
    pub name: String,
    /// `http://` or `https://`, with the port.
    pub address: String,
}
