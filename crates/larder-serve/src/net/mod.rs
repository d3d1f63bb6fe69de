//! Sockets: the listener, its connections, and TLS.

pub mod connection;
pub mod listener;
#[cfg(feature = "tls")]
pub mod tls;
