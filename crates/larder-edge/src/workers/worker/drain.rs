//! Draining: the end of a worker, announced so that clients go elsewhere before it refuses anything.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::time::sleep;
use tonic::server::NamedService;
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use crate::workers::worker::busy_flag::BusyFlag;

/// Interval of checking whether requests still arrive.
const POLL: Duration = Duration::from_millis(25);
/// Time without a request after which all clients have gone elsewhere: a client that computes for itself reads the
/// announcement 0.2 s later at the latest.
const QUIET: Duration = Duration::from_secs(1);

/// What a worker says of itself: whether it is about to end, and the number of this process.
pub struct Announcement {
    draining: AtomicBool,
    /// Drawn at the start; never 0.
    pub instance: u64,
}

impl Announcement {
    /// Of a worker that has just started.
    pub fn new() -> Self {
        Announcement { draining: AtomicBool::new(false), instance: RandomState::new().hash_one(0).max(1) }
    }

    /// Whether the worker is about to end.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }
}

/// What a worker needs to drain.
pub struct Drain {
    /// Tells the clients that watch the worker's health.
    pub health: HealthReporter,
    /// Tells the clients that begin with a handshake.
    pub announcement: Arc<Announcement>,
    /// Counts requests.
    pub busy: Arc<BusyFlag>,
    /// Time from the announcement to the end; requests are accepted for at most half of it.
    pub limit: Duration,
}

impl Drain {
    /// Announces the end to the clients of the service `S`, and replies to those that have no other worker until no
    /// more requests arrive.
    pub async fn last_requests<S: NamedService>(mut self) {
        self.announcement.draining.store(true, Ordering::Relaxed);
        for service in ["", S::NAME] {
            self.health.set_service_status(service, ServingStatus::NotServing).await;
        }
        let begin = Instant::now();
        let (mut begun, mut quiet_since) = (self.busy.begun(), begin);
        while begin.elapsed() < self.limit / 2 && quiet_since.elapsed() < QUIET {
            sleep(POLL).await;
            let now = self.busy.begun();
            if now != begun {
                (begun, quiet_since) = (now, Instant::now());
            }
        }
        // Otherwise the streams that report the status would keep their connections open.
        for service in ["", S::NAME] {
            self.health.clear_service_status(service).await;
        }
    }
}
