//! Metrics in Prometheus' text format.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::Duration;

use larder_cache::Traffic;
use larder_engine::{AheadCounts, DraftCounts};
use parking_lot::{Mutex, MutexGuard};

use crate::engine::EngineStatus;
use crate::sequences::history::MissReason;
use crate::telemetry::live::StepWork;

/// Upper bounds of the histograms' buckets, in seconds.
const BUCKETS: [f64; 14] = [0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// Counts of the server's responses.
#[derive(Default)]
pub struct ResponseCounts(Mutex<BTreeMap<(&'static str, u16), u64>>);

impl ResponseCounts {
    /// Counts a response by its route and status code. Routes are a bounded set.
    pub fn responded(&self, route: &'static str, code: u16) {
        *self.0.lock().entry((route, code)).or_default() += 1;
    }
}

/// Counters of a model, shared by all threads.
#[derive(Default)]
pub struct Metrics(Mutex<Counters>);

/// The values behind `/metrics`.
#[derive(Default)]
pub struct Counters {
    prefilled: u64,
    cached: u64,
    /// Requests by why the prefix cache did not have all of their prompts, in the order of [`MissReason::ALL`].
    missed: [u64; MissReason::ALL.len()],
    generated: u64,
    preempted: u64,
    /// Draft tokens of complete requests, and those of them that were accepted.
    drafted: u64,
    accepted: u64,
    /// Steps of complete requests that ran ahead.
    ahead: AheadCounts,
    status: EngineStatus,
    /// Traffic of the engines that ran the model before the one that runs it now.
    past_traffic: Traffic,
    /// Tokens of the prompts and answers of active requests.
    in_flight: usize,
    /// Bytes of sequences that were written to disk.
    sessions_written: u64,
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

    fn text(&self, out: &mut String, name: &str, label: &str) {
        let comma = if label.is_empty() { "" } else { "," };
        for (count, bound) in self.buckets.iter().zip(BUCKETS) {
            let _ = writeln!(out, "larder_{name}_bucket{{{label}{comma}le=\"{bound}\"}} {count}");
        }
        let braces = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
        let _ = writeln!(out, "larder_{name}_bucket{{{label}{comma}le=\"+Inf\"}} {}", self.count);
        let _ = writeln!(out, "larder_{name}_sum{braces} {}\nlarder_{name}_count{braces} {}", self.seconds, self.count);
    }
}

impl Metrics {
    /// Exclusive access, even after a thread has panicked with the lock held.
    pub fn lock(&self) -> MutexGuard<'_, Counters> {
        self.0.lock()
    }
}

impl Counters {
    /// Keeps the traffic of an engine that has ended.
    pub fn engine_ended(&mut self) {
        let status = std::mem::take(&mut self.status);
        self.past_traffic = self.past_traffic + status.traffic.unwrap_or_default();
        self.in_flight = 0;
    }

    /// Counts prompt tokens that the prefix cache had, and the reason why not more.
    pub fn prompt_cached(&mut self, tokens: usize, missed: Option<MissReason>) {
        self.cached += tokens as u64;
        let counted = MissReason::ALL.iter().position(|(reason, _)| Some(*reason) == missed);
        counted.into_iter().for_each(|reason| self.missed[reason] += 1);
    }

    /// Counts a request that leaves the queue.
    pub fn request_started(&mut self, queued: Duration) {
        self.queue_time.add(queued);
    }

    /// Counts a request that gave its KV cache back.
    pub fn request_preempted(&mut self) {
        self.preempted += 1;
    }

    /// Counts a step of the engine, behind which active requests have `in_flight` tokens, and takes the bytes of
    /// sequences that were written so far.
    pub fn step(&mut self, work: &StepWork, status: &EngineStatus, in_flight: usize, sessions_written: u64) {
        self.prefilled += work.prompt_tokens as u64;
        self.generated += work.generated_tokens as u64;
        for token in &work.tokens {
            let times = if token.is_first { &mut self.first_token } else { &mut self.between_tokens };
            times.add(token.after);
        }
        (self.in_flight, self.sessions_written) = (in_flight, sessions_written);
        self.status = status.clone();
    }

    /// Notes how long a request was active, its draft tokens, and its steps that ran ahead.
    pub fn request_finished(&mut self, time: Duration, drafts: DraftCounts, ahead: AheadCounts) {
        self.ahead += ahead;
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

    /// The values that are one number each, in the order of [`NUMBERS`].
    fn numbers(&self, (queued, active): (usize, usize)) -> [f64; NUMBERS.len()] {
        let traffic = self.past_traffic + self.status.traffic.unwrap_or_default();
        let in_flight = if active == 0 { 0 } else { self.in_flight };
        let Traffic { counts, waited, computed, .. } = traffic;
        [
            self.prefilled as f64,
            self.cached as f64,
            self.generated as f64,
            self.preempted as f64,
            self.drafted as f64,
            self.accepted as f64,
            self.ahead.steps as f64,
            self.ahead.dropped as f64,
            counts.hits as f64,
            counts.in_flight_hits as f64,
            counts.misses as f64,
            counts.evictions as f64,
            traffic.hit_rate(),
            self.status.slots as f64,
            traffic.bytes() as f64,
            waited.as_secs_f64(),
            computed.as_secs_f64(),
            self.agreement(),
            self.status.loss.mean_kl().unwrap_or_default(),
            self.status.loss.agreement().unwrap_or(1.0),
            self.status.loss.measured as f64,
            self.status.expected.unwrap_or_default().mean,
            self.status.expected.unwrap_or_default().budget,
            queued as f64,
            active as f64,
            in_flight as f64,
            self.sessions_written as f64,
        ]
    }

    fn agreement(&self) -> f64 {
        self.status.quality.map_or(1.0, |quality| quality.agreement)
    }
}

/// Name, kind and description of the values that are one number each.
const NUMBERS: [(&str, &str, &str); 27] = [
    ("prompt_tokens_total", "counter", "Prompt tokens computed (prefill)."),
    ("remembered_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    ("generated_tokens_total", "counter", "Tokens generated (decode)."),
    ("preempted_requests_total", "counter", "Requests that gave their KV cache back, to be computed again."),
    ("draft_tokens_total", "counter", "Tokens drafted by speculation."),
    ("accepted_tokens_total", "counter", "Draft tokens that were accepted."),
    ("ahead_steps_total", "counter", "Steps that a GPU began before the host had their token."),
    ("dropped_steps_total", "counter", "Steps of these that were dropped, since the text has another token or ended."),
    ("expert_hits_total", "counter", "Expert cache hits."),
    ("expert_awaited_total", "counter", "Wanted experts that were being read already (in-flight hits)."),
    ("expert_misses_total", "counter", "Expert cache misses."),
    ("expert_evictions_total", "counter", "Expert cache evictions."),
    ("expert_hit_rate", "gauge", "Expert cache hit rate since the start."),
    ("expert_slots", "gauge", "Slots of the expert cache that are in use."),
    ("read_bytes_total", "counter", "Expert bytes read."),
    ("wait_seconds_total", "counter", "Time that computing waited for reads."),
    ("compute_seconds_total", "counter", "Time spent computing experts."),
    ("routing_agreement", "gauge", "Share of the model's own experts that routing chose."),
    (
        "output_kl",
        "gauge",
        "Mean KL divergence of the output from an exact one, in nats, at tokens that were decoded twice.",
    ),
    ("output_agreement", "gauge", "Share of these tokens after which the likeliest token is the same."),
    ("output_measured_tokens_total", "counter", "Tokens that were decoded twice."),
    (
        "output_expected_kl",
        "gauge",
        "Mean KL divergence of the output that --quality expects, in nats; 0 without a budget.",
    ),
    ("output_kl_budget", "gauge", "Budget of --quality for it, in nats; 0 without one."),
    ("queue_length", "gauge", "Requests waiting in the queue."),
    ("active_requests", "gauge", "Requests being generated."),
    ("tokens_in_flight", "gauge", "Tokens of active requests, prompt and answer."),
    ("session_written_bytes_total", "counter", "Bytes of sequences written to --session-dir."),
];

type HistogramOf = fn(&Counters) -> &Histogram;

const HISTOGRAMS: [(&str, &str, HistogramOf); 3] = [
    ("time_to_first_token_seconds", "Time to first token (TTFT).", |counters| &counters.first_token),
    ("inter_token_seconds", "Time between two tokens of an answer.", |counters| &counters.between_tokens),
    ("queue_seconds", "Time of requests in the queue.", |counters| &counters.queue_time),
];

/// A model as `/metrics` lists it.
pub struct ModelMetrics<'a> {
    /// The model's name, if there are several.
    pub name: Option<&'a str>,
    /// Its counters.
    pub metrics: &'a Metrics,
    /// Numbers of its waiting and active requests.
    pub lengths: (usize, usize),
}

/// All metrics in Prometheus' text format.
pub fn text(responses: &ResponseCounts, models: &[ModelMetrics], process_bytes: Option<u64>) -> String {
    let mut out = String::new();
    head(&mut out, "http_responses_total", "counter", "HTTP responses by route and status code.");
    for ((route, code), n) in &*responses.0.lock() {
        let _ = writeln!(out, "larder_http_responses_total{{route=\"{route}\",code=\"{code}\"}} {n}");
    }
    let labels: Vec<String> = models.iter().map(|model| model.name.map(label).unwrap_or_default()).collect();
    let numbers: Vec<_> = models.iter().map(|model| model.metrics.lock().numbers(model.lengths)).collect();
    for (i, (name, kind, help)) in NUMBERS.iter().enumerate() {
        head(&mut out, name, kind, help);
        for (label, numbers) in labels.iter().zip(&numbers) {
            let braces = if label.is_empty() { String::new() } else { format!("{{{label}}}") };
            let _ = writeln!(out, "larder_{name}{braces} {}", numbers[i]);
        }
    }
    head(&mut out, "cache_misses_total", "counter", "Prompts that the prefix cache did not have all of, by reason.");
    for model in models {
        let (counters, name) =
            (model.metrics.lock(), model.name.map(|name| format!(",{}", label(name))).unwrap_or_default());
        for ((_, reason), count) in MissReason::ALL.iter().zip(counters.missed) {
            let _ = writeln!(out, "larder_cache_misses_total{{reason=\"{reason}\"{name}}} {count}");
        }
    }
    if let Some(bytes) = process_bytes {
        head(&mut out, "process_memory_bytes", "gauge", "Resident memory of the process.");
        let _ = writeln!(out, "larder_process_memory_bytes {bytes}");
    }
    for (name, help, of) in HISTOGRAMS {
        head(&mut out, name, "histogram", help);
        for (label, model) in labels.iter().zip(models) {
            of(&model.metrics.lock()).text(&mut out, name, label);
        }
    }
    out
}

/// The label of a model, with the characters escaped that Prometheus' format reserves.
fn label(name: &str) -> String {
    let name = name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("model=\"{name}\"")
}

fn head(out: &mut String, name: &str, kind: &str, help: &str) {
    let _ = writeln!(out, "# HELP larder_{name} {help}\n# TYPE larder_{name} {kind}");
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::live::NewToken;

    #[test]
    fn the_buckets_add_up() {
        let metrics = Metrics::default();
        let mut counts = metrics.lock();
        for (millis, is_first) in [(20, true), (300, true), (90_000, true), (40, false)] {
            let mut work = StepWork::default();
            work.generated(1, NewToken { after: Duration::from_millis(millis), is_first });
            counts.step(&work, &EngineStatus::default(), 9, 0);
        }
        let mut work = StepWork::default();
        work.prefilled(1, 7);
        counts.step(&work, &EngineStatus::default(), 11, 700);
        counts.request_started(Duration::from_millis(700));
        drop(counts);
        let responses = ResponseCounts::default();
        responses.responded("/v1/models", 200);
        let model = ModelMetrics { name: None, metrics: &metrics, lengths: (2, 1) };
        let text = text(&responses, &[model], Some(1 << 20));
        for line in [
            "larder_generated_tokens_total 4",
            "larder_tokens_in_flight 11",
            "larder_session_written_bytes_total 700",
            "larder_cache_misses_total{reason=\"evicted\"} 0",
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

    #[test]
    fn models_have_labels_and_counters_outlive_an_engine() {
        let (first, second) = (Metrics::default(), Metrics::default());
        let ran = |metrics: &Metrics, bytes: u64| {
            let traffic = Some(Traffic { demand_bytes: bytes, ..Traffic::default() });
            metrics.lock().step(&StepWork::default(), &EngineStatus { traffic, ..EngineStatus::default() }, 0, 0);
        };
        ran(&first, 7);
        first.lock().engine_ended();
        ran(&first, 5);
        let model = |name, metrics| ModelMetrics { name: Some(name), metrics, lengths: (0, 0) };
        let text = text(&ResponseCounts::default(), &[model("a\"b", &first), model("c", &second)], None);
        for line in [
            "larder_read_bytes_total{model=\"a\\\"b\"} 12",
            "larder_read_bytes_total{model=\"c\"} 0",
            "larder_queue_seconds_bucket{model=\"c\",le=\"+Inf\"} 0",
            "larder_queue_seconds_count{model=\"c\"} 0",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} in\n{text}");
        }
        assert_eq!(text.matches("# TYPE larder_read_bytes_total ").count(), 1);
    }
}
