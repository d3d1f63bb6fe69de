//! Metrics in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_cache::Traffic;
use larder_engine::DraftCounts;

use crate::engine::EngineStatus;
use crate::live::StepWork;

/// Upper bounds of the histograms' buckets, in seconds.
const BUCKETS: [f64; 14] = [0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Counters shared by all threads.
#[derive(Default)]
pub struct Metrics(Mutex<Counters>);

/// The values behind `/metrics`.
#[derive(Default)]
pub struct Counters {
    /// Responses by route and status code. Routes are a bounded set.
    responses: BTreeMap<(&'static str, u16), u64>,
    prefilled: u64,
    cached: u64,
    generated: u64,
    preempted: u64,
    /// Draft tokens of complete requests, and those of them that were accepted.
    drafted: u64,
    accepted: u64,
    status: EngineStatus,
    /// Tokens of the prompts and answers of active requests.
    in_flight: usize,
    first_token: Histogram,
    between_tokens: Histogram,
    queue_time: Histogram,
    /// Moving average of the time that a request is active; 0 before the first.
    request_seconds: f64,
}

/// Times, counted by the bounds that they do not exceed.
#[derive(Default)]
struct Histogram {
    buckets: [u64; BUCKETS.len()],
    count: u64,
    seconds: f64,
}

impl Histogram {
    fn add(&mut self, time: Duration) {
        let seconds = time.as_secs_f64();
        self.count += 1;
        self.seconds += seconds;
        for (bucket, bound) in self.buckets.iter_mut().zip(BUCKETS) {
            *bucket += u64::from(seconds <= bound);
        }
    }

    fn text(&self, out: &mut String, name: &str, help: &str) {
        head(out, name, "histogram", help);
        for (count, bound) in self.buckets.iter().zip(BUCKETS) {
            let _ = writeln!(out, "larder_{name}_bucket{{le=\"{bound}\"}} {count}");
        }
        let _ = writeln!(out, "larder_{name}_bucket{{le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "larder_{name}_sum {}\nlarder_{name}_count {}", self.seconds, self.count);
    }
}

impl Metrics {
    /// Exclusive access, even after a thread has panicked with the lock held.
    pub fn lock(&self) -> MutexGuard<'_, Counters> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Counters {
    /// Counts a response.
    pub fn responded(&mut self, route: &'static str, code: u16) {
        *self.responses.entry((route, code)).or_default() += 1;
    }

    /// Counts prompt tokens that the prefix cache had.
    pub fn prompt_cached(&mut self, tokens: usize) {
        self.cached += tokens as u64;
    }

    /// Counts a request that leaves the queue.
    pub fn request_started(&mut self, queued: Duration) {
        self.queue_time.add(queued);
    }

    /// Counts a request that gave its KV cache back.
    pub fn request_preempted(&mut self) {
        self.preempted += 1;
    }

    /// Counts a step of the engine, behind which active requests have `in_flight` tokens.
    pub fn step(&mut self, work: &StepWork, status: &EngineStatus, in_flight: usize) {
        self.prefilled += work.prompt_tokens as u64;
        self.generated += work.generated_tokens as u64;
        for token in &work.tokens {
            let times = if token.is_first { &mut self.first_token } else { &mut self.between_tokens };
            times.add(token.after);
        }
        self.in_flight = in_flight;
        self.status = status.clone();
    }

    /// Notes how long a request was active, and its draft tokens.
    pub fn request_finished(&mut self, time: Duration, drafts: DraftCounts) {
        self.drafted += drafts.drafted as u64;
        self.accepted += drafts.accepted as u64;
        let seconds = time.as_secs_f64();
        self.request_seconds =
            if self.request_seconds == 0.0 { seconds } else { 0.8 * self.request_seconds + 0.2 * seconds };
    }

    /// About how long a request is active.
    pub fn request_seconds(&self) -> f64 {
        self.request_seconds
    }

    /// All metrics in Prometheus' text format.
    pub fn text(&self, (queued, active): (usize, usize), process_bytes: Option<u64>) -> String {
        let mut out = String::new();
        head(&mut out, "http_responses_total", "counter", "HTTP responses by route and status code.");
        for ((route, code), n) in &self.responses {
            let _ = writeln!(out, "larder_http_responses_total{{route=\"{route}\",code=\"{code}\"}} {n}");
        }
        let traffic = self.status.traffic.unwrap_or_default();
        let in_flight = if active == 0 { 0 } else { self.in_flight };
        let Traffic { counts, waited, computed, .. } = traffic;
        let seconds = |time: Duration| time.as_secs_f64();
        for (name, kind, help, value) in [
            ("prompt_tokens_total", "counter", "Prompt tokens computed (prefill).", self.prefilled as f64),
            ("remembered_tokens_total", "counter", "Prompt tokens found in the prefix cache.", self.cached as f64),
            ("generated_tokens_total", "counter", "Tokens generated (decode).", self.generated as f64),
            (
                "preempted_requests_total",
                "counter",
                "Requests that gave their KV cache back, to be computed again.",
                self.preempted as f64,
            ),
            ("draft_tokens_total", "counter", "Tokens drafted by speculation.", self.drafted as f64),
            ("accepted_tokens_total", "counter", "Draft tokens that were accepted.", self.accepted as f64),
            ("expert_hits_total", "counter", "Expert cache hits.", counts.hits as f64),
            (
                "expert_awaited_total",
                "counter",
                "Wanted experts that were being read already (in-flight hits).",
                counts.in_flight_hits as f64,
            ),
            ("expert_misses_total", "counter", "Expert cache misses.", counts.misses as f64),
            ("expert_evictions_total", "counter", "Expert cache evictions.", counts.evictions as f64),
            ("expert_hit_rate", "gauge", "Expert cache hit rate since the start.", traffic.hit_rate()),
            ("expert_slots", "gauge", "Slots of the expert cache that are in use.", self.status.slots as f64),
            ("read_bytes_total", "counter", "Expert bytes read.", traffic.bytes() as f64),
            ("wait_seconds_total", "counter", "Time that computing waited for reads.", seconds(waited)),
            ("compute_seconds_total", "counter", "Time spent computing experts.", seconds(computed)),
            ("routing_agreement", "gauge", "Share of the model's own experts that routing chose.", self.agreement()),
            ("queue_length", "gauge", "Requests waiting in the queue.", queued as f64),
            ("active_requests", "gauge", "Requests being generated.", active as f64),
            ("tokens_in_flight", "gauge", "Tokens of active requests, prompt and answer.", in_flight as f64),
        ] {
            head(&mut out, name, kind, help);
            let _ = writeln!(out, "larder_{name} {value}");
        }
        if let Some(bytes) = process_bytes {
            head(&mut out, "process_memory_bytes", "gauge", "Resident memory of the process.");
            let _ = writeln!(out, "larder_process_memory_bytes {bytes}");
        }
        self.first_token.text(&mut out, "time_to_first_token_seconds", "Time to first token (TTFT).");
        self.between_tokens.text(&mut out, "inter_token_seconds", "Time between two tokens of an answer.");
        self.queue_time.text(&mut out, "queue_seconds", "Time of requests in the queue.");
        out
    }

    fn agreement(&self) -> f64 {
        self.status.quality.map_or(1.0, |quality| quality.agreement)
    }
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP larder_{name} {help}\n# TYPE larder_{name} {kind}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::active::NewToken;

    #[test]
    fn the_buckets_add_up() {
        let metrics = Metrics::default();
        let mut counts = metrics.lock();
        for (millis, is_first) in [(20, true), (300, true), (90_000, true), (40, false)] {
            let mut work = StepWork::default();
            work.generated(1, NewToken { after: Duration::from_millis(millis), is_first });
            counts.step(&work, &EngineStatus::default(), 9);
        }
        let mut work = StepWork::default();
        work.prefilled(1, 7);
        counts.step(&work, &EngineStatus::default(), 11);
        counts.request_started(Duration::from_millis(700));
        counts.responded("/v1/models", 200);
        let text = counts.text((2, 1), Some(1 << 20));
        for line in [
            "larder_generated_tokens_total 4",
            "larder_tokens_in_flight 11",
            "larder_process_memory_bytes 1048576",
            "larder_inter_token_seconds_bucket{le=\"0.025\"} 0",
            "larder_inter_token_seconds_bucket{le=\"0.05\"} 1",
            "larder_queue_seconds_bucket{le=\"0.5\"} 0",
            "larder_queue_seconds_count 1",
            "larder_prompt_tokens_total 7",
            "larder_queue_length 2",
            "larder_time_to_first_token_seconds_bucket{le=\"0.01\"} 0",
            "larder_time_to_first_token_seconds_bucket{le=\"0.025\"} 1",
            "larder_time_to_first_token_seconds_bucket{le=\"60\"} 2",
            "larder_time_to_first_token_seconds_bucket{le=\"+Inf\"} 3",
            "larder_http_responses_total{route=\"/v1/models\",code=\"200\"} 1",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
    }
}
