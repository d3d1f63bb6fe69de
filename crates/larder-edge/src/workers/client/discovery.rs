//! Discovery: a name is looked up again and again, and each address that it resolves to becomes a worker.

use std::collections::BTreeSet;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use http::Uri;
use tokio::sync::{mpsc::UnboundedSender, oneshot};
use tokio::time::{sleep, timeout};

use crate::workers::client::addresses::WorkerDiscovery;
use crate::workers::client::roster::{MOST_DISCOVERED, Roster};
use crate::workers::client::worker_connection::{ConnectionSettings, WorkerConnection};

/// Most addresses that are read of one answer.
const MOST_ANSWERS: usize = 4096;
/// Pause between two lookups: the first, at the start and after a loss, and the longest, to which it grows.
const LOOKUP_PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// Pause before the lookup after a loss.
const AFTER_LOSS: Duration = Duration::from_millis(200);

/// Looks names up.
pub trait NameResolver: Send + 'static {
    /// The addresses of `host`, each with `port`. May block.
    fn resolve(&mut self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>>;
}

/// The resolver of the system: `/etc/hosts`, DNS, and whatever else it is configured to ask.
#[derive(Clone, Copy, Debug)]
pub struct SystemResolver;

impl NameResolver for SystemResolver {
    fn resolve(&mut self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        Ok((host, port).to_socket_addrs()?.take(MOST_ANSWERS).collect())
    }
}

type Answer = io::Result<Vec<SocketAddr>>;

/// The task that keeps the discovered workers of a roster up to date.
pub struct DiscoveryTask {
    roster: Arc<Roster>,
    settings: Arc<ConnectionSettings>,
    discovery: Arc<WorkerDiscovery>,
    /// Host and port, for messages.
    name: String,
    /// Each sender receives the answer of one lookup.
    lookups: mpsc::SyncSender<oneshot::Sender<Answer>>,
}

impl DiscoveryTask {
    /// Starts the thread that looks the name up. It is a thread of its own, as a lookup may block for long, and ends
    /// with the task.
    pub fn new(
        discovery: &WorkerDiscovery,
        settings: Arc<ConnectionSettings>,
        roster: Arc<Roster>,
        mut resolver: impl NameResolver,
    ) -> Result<Self, String> {
        let address = &discovery.address;
        let invalid = |what: &str| format!("the address {address} of discover cannot be used: {what}");
        let uri: Uri = address.parse().map_err(|e: http::uri::InvalidUri| invalid(&e.to_string()))?;
        let host = uri
            .host()
            .filter(|host| !host.is_empty())
            .ok_or_else(|| invalid("it has no host"))?
            .trim_matches(['[', ']'])
            .to_owned();
        let port = uri.port_u16().ok_or_else(|| invalid("it has no port"))?;
        let discovery = Arc::new(discovery.clone());
        // Otherwise missing certificates would only be noticed when the name resolves.
        WorkerConnection::discovered(([127, 0, 0, 1], port).into(), &discovery, &settings)?;
        let name = format!("{host}:{port}");
        roster.set_discovery_trouble(Some(format!("the name {name} has not been resolved yet")));
        let (lookups, requested) = mpsc::sync_channel::<oneshot::Sender<Answer>>(1);
        let thread = std::thread::Builder::new().name("resolver".into()).spawn(move || {
            while let Ok(to) = requested.recv() {
                let _ = to.send(resolver.resolve(&host, port));
            }
        });
        thread.map_err(|e| format!("cannot start the thread that resolves {name}: {e}"))?;
        Ok(DiscoveryTask { roster, settings, discovery, name, lookups })
    }

    /// Looks the name up, again at intervals, and soon after a worker is lost. The handshakes with the workers of the
    /// first answer hold clones of `tried`.
    pub async fn run(self, tried: UnboundedSender<()>) {
        let mut tried = Some(tried);
        let mut pause = LOOKUP_PAUSE.0;
        while let Some(answer) = self.look_up().await {
            let found = self.addresses(answer);
            self.update(&found, tried.take());
            pause = match timeout(pause, self.roster.lost()).await {
                Ok(()) => LOOKUP_PAUSE.0,
                Err(_) => (2 * pause).min(LOOKUP_PAUSE.1),
            };
            // Workers that fail again and again do not cause a lookup each time.
            sleep(AFTER_LOSS).await;
        }
    }

    /// The answer of one lookup; `None` if the thread has ended.
    async fn look_up(&self) -> Option<Answer> {
        let (to, answer) = oneshot::channel();
        self.lookups.try_send(to).ok()?;
        answer.await.ok()
    }

    /// Distinct addresses of an answer, as many as are used. What is wrong with it is recorded.
    fn addresses(&self, answer: Answer) -> BTreeSet<SocketAddr> {
        let (all, reason) = match answer {
            Ok(all) => (all, String::new()),
            Err(error) => (vec![], format!(" ({error})")),
        };
        let all: BTreeSet<SocketAddr> = all.into_iter().collect();
        self.roster.set_discovery_trouble(match all.len() {
            0 => Some(format!("the name {} resolves to no address{reason}", self.name)),
            n if n > MOST_DISCOVERED => {
                Some(format!("the name {} resolves to {n} addresses, of which {MOST_DISCOVERED} are used", self.name))
            }
            _ => None,
        });
        all
    }

    fn update(&self, found: &BTreeSet<SocketAddr>, tried: Option<UnboundedSender<()>>) {
        self.roster.remove_lost(found);
        for at in self.roster.unknown(found) {
            // The address of the discovery was checked at the start.
            if let Ok(connection) = WorkerConnection::discovered(at, &self.discovery, &self.settings) {
                self.roster.add(connection, self.settings.handshake.clone(), tried.clone());
            }
        }
    }
}
