//! Sockets: the listener, its connections, connections to other servers, and TLS.

pub mod connect;
pub mod connection;
pub mod listener;
#[cfg(feature = "tls")]
pub mod tls;
