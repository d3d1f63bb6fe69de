//! Statistics of a client: experts by the machine that computed them, time, bytes and failures.

use std::time::Duration;

use serde::Serialize;

/// Statistics of a client since its start.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EdgeReport {
    /// Experts computed locally that were in memory.
    pub in_memory: u64,
    /// Experts computed locally that had to be read from the SSD.
    pub from_ssd: u64,
    /// Experts whose first request failed, so that another worker or this machine computed them.
    pub fallbacks: u64,
    /// Seconds of waiting for replies with no local work left.
    pub seconds_waiting: f64,
    /// Statistics of each worker, those of the topology first, in its order.
    pub workers: Vec<WorkerReport>,
    /// The fault of the name that workers are discovered by, if it has one.
    pub discovery: Option<String>,
}

/// Statistics of one worker.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkerReport {
    /// The worker's name in the topology.
    pub name: String,
    /// Number of valid replies.
    pub answers: u64,
    /// Experts in valid replies.
    pub experts: u64,
    /// Experts that it had to read from its SSD.
    pub missed: u64,
    /// Bytes of requests.
    pub sent_bytes: u64,
    /// Bytes of replies.
    pub received_bytes: u64,
    /// Seconds from request to reply, summed.
    pub seconds: f64,
    /// Seconds of these in which it computed.
    pub seconds_busy: f64,
    /// Requests without a valid reply.
    pub failures: u64,
    /// Why it cannot be used at present, or its last failure.
    pub trouble: Option<String>,
}

impl EdgeReport {
    /// Experts that workers computed.
    pub fn remote_experts(&self) -> u64 {
        self.workers.iter().map(|worker| worker.experts).sum()
    }

    /// The statistics as one line for the console.
    pub fn summary(&self) -> String {
        let all = (self.in_memory + self.from_ssd + self.remote_experts()).max(1) as f64;
        let share = |experts: u64| format!("{:.0} %", 100.0 * experts as f64 / all);
        let mut parts = vec![
            format!("{} of experts from local memory", share(self.in_memory)),
            format!("{} from the SSD", share(self.from_ssd)),
        ];
        for worker in &self.workers {
            let mut part = format!("{} by {}", share(worker.experts), worker.name);
            let each = format!("{:.1} ms per request", 1e3 * worker.seconds / worker.answers.max(1) as f64);
            match (worker.answers, worker.failures) {
                (0, 0) => {}
                (0, failures) => part += &format!(" ({failures} failed requests)"),
                (_, 0) => part += &format!(" ({each})"),
                (_, failures) => part += &format!(" ({each}, {failures} failed requests)"),
            }
            parts.push(part);
        }
        let mut line = format!("{}; {:.1} s waiting for workers", parts.join(", "), self.seconds_waiting);
        if self.fallbacks > 0 {
            line += &format!("; {} experts rerouted after a failure", self.fallbacks);
        }
        for worker in &self.workers {
            if let Some(trouble) = &worker.trouble {
                line += &format!("; {} {trouble}", worker.name);
            }
        }
        if let Some(trouble) = &self.discovery {
            line += &format!("; {trouble}");
        }
        line
    }

    /// Adds experts that were computed locally.
    pub(super) fn record_local(&mut self, found: u64, read: u64) {
        self.in_memory += found;
        self.from_ssd += read;
    }

    /// Adds time spent waiting for replies.
    pub(super) fn record_wait(&mut self, time: Duration) {
        self.seconds_waiting += time.as_secs_f64();
    }
}

impl WorkerReport {
    /// The sum over discovered workers that are gone.
    pub(super) fn of_departed() -> Self {
        WorkerReport { name: "workers that left".into(), ..Default::default() }
    }

    /// Adds the counts of another one.
    pub(super) fn add(&mut self, other: &WorkerReport) {
        self.answers += other.answers;
        self.experts += other.experts;
        self.missed += other.missed;
        self.sent_bytes += other.sent_bytes;
        self.received_bytes += other.received_bytes;
        self.seconds += other.seconds;
        self.seconds_busy += other.seconds_busy;
        self.failures += other.failures;
    }
}
