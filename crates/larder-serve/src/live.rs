//! What the engine does right now, for those who watch it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_cache::Traffic;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use crate::answer::Step;
use crate::engine::{LayerVisit, Standing};
use crate::model::Model;

/// Events that are kept for a listener who lags; older ones are lost to it.
const BACKLOG: usize = 64;
/// Rates are those of this time.
const WINDOW: Duration = Duration::from_secs(2);
/// Most steps that rates are made from.
const STEPS: usize = 4096;

/// Tells listeners.
pub struct Live {
    sender: broadcast::Sender<Arc<str>>,
}

impl Live {
    /// Nobody listens yet.
    pub fn new() -> Self {
        Live { sender: broadcast::Sender::new(BACKLOG) }
    }

    /// Whether anybody listens.
    pub fn is_heard(&self) -> bool {
        self.sender.receiver_count() > 0
    }

    /// How many listen.
    pub fn listeners(&self) -> usize {
        self.sender.receiver_count()
    }

    /// Listens from now on.
    pub fn listen(&self) -> broadcast::Receiver<Arc<str>> {
        self.sender.subscribe()
    }

    /// Tells everybody.
    pub fn tell(&self, event: Value) {
        let _ = self.sender.send(event.to_string().into());
    }
}

/// Makes rates of steps.
pub struct Watch {
    start: Instant,
    before: Traffic,
    recent: VecDeque<(Instant, usize, Traffic)>,
    tokens: u64,
}

/// What a step was.
pub struct StepEvent {
    kind: &'static str,
    tokens: usize,
    passed: Traffic,
    rates: Rates,
    at: Duration,
    number: u64,
}

#[derive(Clone, Copy, Default)]
struct Rates {
    tokens_per_second: f64,
    bytes_per_second: f64,
    hit_rate: Option<f64>,
}

impl Watch {
    /// Nothing happened yet.
    pub fn new() -> Self {
        Watch { start: Instant::now(), before: Traffic::default(), recent: VecDeque::new(), tokens: 0 }
    }

    /// A step is over.
    pub fn step(&mut self, step: Step, standing: &Standing) -> StepEvent {
        let (kind, tokens) = match step {
            Step::Read(tokens) => ("prompt", tokens),
            Step::Wrote { .. } => ("token", 1),
            Step::Stalled => ("none", 0),
        };
        let now = Instant::now();
        let traffic = standing.traffic.unwrap_or_default();
        let passed = traffic - std::mem::replace(&mut self.before, traffic);
        self.recent.push_back((now, usize::from(kind == "token"), passed));
        while self.recent.len() > STEPS || self.recent.front().is_some_and(|(at, ..)| now - *at > WINDOW) {
            self.recent.pop_front();
        }
        self.tokens += 1;
        let (at, number) = (now - self.start, self.tokens);
        StepEvent { kind, tokens, passed, rates: self.rates(now), at, number }
    }

    fn rates(&self, now: Instant) -> Rates {
        let (mut tokens, mut passed) = (0, Traffic::default());
        for (_, n, traffic) in &self.recent {
            tokens += n;
            passed = passed + *traffic;
        }
        let Some((first, ..)) = self.recent.front() else { return Rates::default() };
        let seconds = (now - *first).as_secs_f64();
        if seconds < 1e-3 || now - *first > 2 * WINDOW {
            return Rates::default();
        }
        Rates {
            tokens_per_second: tokens as f64 / seconds,
            bytes_per_second: passed.bytes() as f64 / seconds,
            hit_rate: (passed.counts.wanted() > 0).then(|| passed.hit_rate()),
        }
    }

    /// Everything that does not depend on a step.
    pub fn state(
        &self,
        model: &Model,
        standing: &Standing,
        resident: &[Vec<usize>],
        (queued, active): (usize, usize),
    ) -> Value {
        let rates = self.rates(Instant::now());
        let sampling = model.generation.sampling();
        let resident: serde_json::Map<String, Value> =
            model.layers.iter().zip(resident).map(|(layer, experts)| (layer.to_string(), json!(experts))).collect();
        let mut state = json!({
            "model": model.name,
            "layers": model.layers,
            "experts": model.experts,
            "experts_per_token": model.top_k,
            "context": model.context,
            "streams": standing.traffic.is_some(),
            "active": active,
            "queued": queued,
            "tokens_per_second": rates.tokens_per_second,
            "bytes_per_second": rates.bytes_per_second,
            "hit_rate": rates.hit_rate,
            "total": standing.traffic.map(|traffic| json!({
                "hits": traffic.counts.hits,
                "awaited": traffic.counts.awaited,
                "misses": traffic.counts.misses,
                "evictions": traffic.counts.evictions,
                "bytes": traffic.bytes(),
                "seconds_waiting": traffic.waited.as_secs_f64(),
                "hit_rate": traffic.hit_rate(),
            })),
            "resident": resident,
            "plan": model.plan,
            "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p},
        });
        routing(&mut state, standing);
        state
    }
}

impl StepEvent {
    /// For a page.
    pub fn json(
        &self,
        model: &Model,
        request: u64,
        standing: &Standing,
        visits: &[LayerVisit],
        (queued, active): (usize, usize),
    ) -> Value {
        let layer = |row: usize| model.layers.get(row).copied().unwrap_or(row);
        let layers: Vec<Value> = visits
            .iter()
            .map(|LayerVisit { row, visit }| {
                let evicted: Vec<[usize; 2]> = visit.evicted.iter().map(|(row, e)| [layer(*row), *e]).collect();
                json!({
                    "layer": layer(*row), "hit": visit.hits, "awaited": visit.awaited, "miss": visit.misses,
                    "evicted": evicted,
                })
            })
            .collect();
        let counts = self.passed.counts;
        let mut event = json!({
            "step": self.number,
            "seconds": self.at.as_secs_f64(),
            "kind": self.kind,
            "tokens": self.tokens,
            "request": request,
            "active": active,
            "queued": queued,
            "hits": counts.hits,
            "awaited": counts.awaited,
            "misses": counts.misses,
            "bytes": self.passed.bytes(),
            "tokens_per_second": self.rates.tokens_per_second,
            "bytes_per_second": self.rates.bytes_per_second,
            "hit_rate": self.rates.hit_rate,
            "layers": layers,
        });
        routing(&mut event, standing);
        event
    }
}

fn routing(value: &mut Value, standing: &Standing) {
    value["routing"] = standing.routing.as_str().into();
    value["lambda"] = standing.lambda.into();
    // The model's own choices agree with themselves.
    value["agreement"] = standing.quality.map_or(1.0, |quality| quality.agreement).into();
    value["kept_mass"] = standing.quality.map_or(1.0, |quality| quality.kept_mass).into();
    value["kl"] = standing.quality.map_or(0.0, |quality| quality.kl).into();
}
