//! The workers that a client knows at present. Discovery adds and removes some, while the pool uses them.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc::UnboundedSender};
use tokio::task::AbortHandle;

use crate::workers::client::worker_connection::WorkerConnection;
use crate::workers::handshake::Handshake;

/// Most workers that are discovered; further addresses are not used.
pub const MOST_DISCOVERED: usize = 64;

/// The connections, shared by the pool and the tasks of the event loop.
#[derive(Default)]
pub struct Roster {
    entries: Mutex<Vec<RosterEntry>>,
    /// Grows with every change of the entries.
    version: AtomicU64,
    discovery_trouble: Mutex<Option<String>>,
    /// Notified when a worker fails or drains.
    lost: Arc<Notify>,
}

struct RosterEntry {
    connection: Arc<WorkerConnection>,
    /// Ends the task of the handshakes.
    monitor: AbortHandle,
}

impl Drop for RosterEntry {
    fn drop(&mut self) {
        self.monitor.abort();
    }
}

impl Roster {
    /// Adds a connection and starts its handshakes, inside the event loop.
    pub fn add(&self, connection: WorkerConnection, handshake: Arc<Handshake>, tried: Option<UnboundedSender<()>>) {
        let connection = Arc::new(connection);
        let monitor = tokio::spawn(connection.clone().monitor(handshake, self.lost.clone(), tried)).abort_handle();
        self.entries.lock().push(RosterEntry { connection, monitor });
        self.version.fetch_add(1, Ordering::Release);
    }

    /// Removes discovered workers that cannot be used and whose address is not in `found`. Those that still reply stay,
    /// as an answer of the name service may be incomplete.
    pub fn remove_lost(&self, found: &BTreeSet<SocketAddr>) {
        let is_kept = |connection: &WorkerConnection| {
            connection.found_at().is_none_or(|at| found.contains(&at) || connection.state().held.is_some())
        };
        let mut entries = self.entries.lock();
        let before = entries.len();
        entries.retain(|entry| is_kept(&entry.connection));
        if entries.len() < before {
            self.version.fetch_add(1, Ordering::Release);
        }
    }

    /// The addresses of `found` that are not known yet, as many as there is room for.
    pub fn unknown(&self, found: &BTreeSet<SocketAddr>) -> Vec<SocketAddr> {
        let entries = self.entries.lock();
        let known: BTreeSet<SocketAddr> = entries.iter().filter_map(|entry| entry.connection.found_at()).collect();
        found.difference(&known).copied().take(MOST_DISCOVERED.saturating_sub(known.len())).collect()
    }

    /// The number of the present set of connections.
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// All connections.
    pub fn connections(&self) -> Vec<Arc<WorkerConnection>> {
        self.entries.lock().iter().map(|entry| entry.connection.clone()).collect()
    }

    /// Waits until a worker fails or drains.
    pub async fn lost(&self) {
        self.lost.notified().await;
    }

    /// The fault of the name that workers are discovered by; a sentence without its end.
    pub fn discovery_trouble(&self) -> Option<String> {
        self.discovery_trouble.lock().clone()
    }

    /// Records it.
    pub fn set_discovery_trouble(&self, trouble: Option<String>) {
        *self.discovery_trouble.lock() = trouble;
    }
}
