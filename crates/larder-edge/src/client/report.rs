//! Who computed what, what it cost, and what went wrong.

use std::time::Duration;

use serde::Serialize;

/// What happened so far.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EdgeReport {
    /// Experts that were computed here and were in memory.
    pub in_memory: u64,
    /// Experts that were computed here and had to be read.
    pub from_ssd: u64,
    /// Experts that went to somebody else, or here, because who was asked for them first failed.
    pub fallbacks: u64,
    /// Seconds in which nothing was left to do but wait for answers.
    pub seconds_waiting: f64,
    /// The workers.
    pub workers: Vec<WorkerReport>,
}

/// What one worker did.
#[derive(Clone, Debug, Default, Serialize)]
pub struct WorkerReport {
    /// Its name.
    pub name: String,
    /// Requests that it answered.
    pub answers: u64,
    /// Experts that it computed.
    pub experts: u64,
    /// Experts that it had to read from its SSD.
    pub missed: u64,
    /// Bytes of requests.
    pub sent_bytes: u64,
    /// Bytes of answers.
    pub received_bytes: u64,
    /// Seconds from request to answer, in all.
    pub seconds: f64,
    /// Seconds of these in which it computed.
    pub seconds_busy: f64,
    /// Requests without an answer that could be used.
    pub failures: u64,
    /// Why it cannot be asked at present, or what went wrong last.
    pub trouble: Option<String>,
}

impl EdgeReport {
    /// Experts that others computed.
    pub fn remote_experts(&self) -> u64 {
        self.workers.iter().map(|worker| worker.experts).sum()
    }

    /// One line for a person.
    pub fn summary(&self) -> String {
        let all = (self.in_memory + self.from_ssd + self.remote_experts()).max(1) as f64;
        let share = |experts: u64| format!("{:.0} %", 100.0 * experts as f64 / all);
        let mut parts = vec![
            format!("{} of experts from memory here", share(self.in_memory)),
            format!("{} from the SSD", share(self.from_ssd)),
        ];
        for worker in &self.workers {
            let mut part = format!("{} by {}", share(worker.experts), worker.name);
            let each = format!("{:.1} ms each time", 1e3 * worker.seconds / worker.answers.max(1) as f64);
            match (worker.answers, worker.failures) {
                (0, 0) => {}
                (0, failures) => part += &format!(" (failed {failures} times)"),
                (_, 0) => part += &format!(" ({each})"),
                (_, failures) => part += &format!(" ({each}, failed {failures} times)"),
            }
            parts.push(part);
        }
        let mut said = format!("{}; {:.1} s waiting for others", parts.join(", "), self.seconds_waiting);
        if self.fallbacks > 0 {
            said += &format!("; {} experts computed by others than were asked first", self.fallbacks);
        }
        for worker in &self.workers {
            if let Some(trouble) = &worker.trouble {
                said += &format!("; {} {trouble}", worker.name);
            }
        }
        said
    }

    /// Notes what went through the own cache.
    pub(super) fn record_local(&mut self, found: u64, read: u64) {
        self.in_memory += found;
        self.from_ssd += read;
    }

    /// Notes time spent waiting.
    pub(super) fn record_wait(&mut self, time: Duration) {
        self.seconds_waiting += time.as_secs_f64();
    }
}
