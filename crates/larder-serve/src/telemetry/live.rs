//! Live events of the engine, for the web page: each step with its cache visits, and rates.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_cache::Traffic;
use larder_core::MoeRow;
use larder_engine::{OutputLoss, Sampling};
use larder_text::Welcome;
use serde_json::{Value, json};
use tokio::sync::broadcast;

use crate::engine::{EngineStatus, LayerVisit};
use crate::model::ServedModel;

/// Events buffered for a listener that lags; it misses older ones.
const BACKLOG: usize = 64;
/// Rates are over this time.
const WINDOW: Duration = Duration::from_secs(2);
/// Steps that rates are computed from, at most.
const STEPS: usize = 4096;

/// A token has been generated.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewToken {
    /// Time since the request's last token; from the request on if it is its first.
    pub after: Duration,
    /// Whether it is the request's first.
    pub is_first: bool,
}

/// Broadcasts events to all listeners.
pub struct LiveEvents {
    sender: broadcast::Sender<Arc<str>>,
}

impl LiveEvents {
    /// A broadcast without listeners.
    pub fn new() -> Self {
        LiveEvents { sender: broadcast::Sender::new(BACKLOG) }
    }

    /// Whether there is a listener.
    pub fn has_listeners(&self) -> bool {
        self.sender.receiver_count() > 0
    }

    /// Number of listeners.
    pub fn listeners(&self) -> usize {
        self.sender.receiver_count()
    }

    /// Adds a listener, which receives later events.
    pub fn subscribe(&self) -> broadcast::Receiver<Arc<str>> {
        self.sender.subscribe()
    }

    /// Sends an event to all listeners.
    pub fn publish(&self, event: Value) {
        let _ = self.sender.send(event.to_string().into());
    }
}

/// What a step did, over all requests.
#[derive(Default, Debug)]
pub struct StepWork {
    /// Prompt tokens computed.
    pub prompt_tokens: usize,
    /// Tokens generated.
    pub generated_tokens: usize,
    /// Generated tokens with their times.
    pub tokens: Vec<NewToken>,
    /// Numbers of the requests that took part.
    pub requests: Vec<u64>,
}

impl StepWork {
    /// Notes a generated token of a request.
    pub fn generated(&mut self, request: u64, token: NewToken) {
        self.generated_tokens += 1;
        self.tokens.push(token);
        self.requests.push(request);
    }

    /// Notes prompt tokens of a request.
    pub fn prefilled(&mut self, request: u64, tokens: usize) {
        self.prompt_tokens += tokens;
        self.requests.push(request);
    }

    /// Whether no token was computed.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }
}

/// Computes rates over recent steps.
pub struct RateMeter {
    start: Instant,
    before: Traffic,
    recent: VecDeque<StepSample>,
    steps: u64,
}

/// A recent step.
struct StepSample {
    at: Instant,
    took: Duration,
    generated_tokens: usize,
    traffic: Traffic,
}

/// A step with its traffic and the rates after it.
pub struct StepEvent {
    traffic: Traffic,
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

impl RateMeter {
    /// A meter without steps.
    pub fn new() -> Self {
        RateMeter { start: Instant::now(), before: Traffic::default(), recent: VecDeque::new(), steps: 0 }
    }

    /// Notes a step that took this time.
    pub fn step(&mut self, work: &StepWork, took: Duration, status: &EngineStatus) -> StepEvent {
        let now = Instant::now();
        let total = status.traffic.unwrap_or_default();
        let traffic = total - std::mem::replace(&mut self.before, total);
        self.recent.push_back(StepSample { at: now, took, generated_tokens: work.generated_tokens, traffic });
        while self.recent.len() > STEPS || self.recent.front().is_some_and(|past| now - past.at > WINDOW) {
            self.recent.pop_front();
        }
        self.steps += 1;
        let (at, number) = (now - self.start, self.steps);
        StepEvent { traffic, rates: self.rates(now), at, number }
    }

    /// Per second of work: idle time does not count, and steps of prefill alone do not count for tokens per second.
    fn rates(&self, now: Instant) -> Rates {
        let (mut tokens, mut writing, mut working, mut traffic) =
            (0, Duration::ZERO, Duration::ZERO, Traffic::default());
        for past in self.recent.iter().filter(|past| now - past.at <= WINDOW) {
            tokens += past.generated_tokens;
            writing += past.took * u32::from(past.generated_tokens > 0);
            working += past.took;
            traffic = traffic + past.traffic;
        }
        let per = |amount: f64, time: Duration| if time.is_zero() { 0.0 } else { amount / time.as_secs_f64() };
        Rates {
            tokens_per_second: per(tokens as f64, writing),
            bytes_per_second: per(traffic.bytes() as f64, working),
            hit_rate: (traffic.counts.wanted() > 0).then(|| traffic.hit_rate()),
        }
    }

    /// The response of `/engine`: everything that does not depend on a step.
    pub fn state(
        &self,
        model: &ServedModel,
        status: &EngineStatus,
        resident: &[Vec<usize>],
        (queued, active): (usize, usize),
    ) -> Value {
        let rates = self.rates(Instant::now());
        let sampling = Sampling::from(&model.generation);
        let resident: serde_json::Map<String, Value> =
            model.layers.iter().zip(resident).map(|(layer, experts)| (layer.to_string(), json!(experts))).collect();
        let mut state = json!({
            "model": model.name,
            "layers": model.layers,
            "experts": model.experts,
            "experts_per_token": model.top_k,
            "context": model.context.tokens,
            "streams": status.traffic.is_some(),
            "active": active,
            "queued": queued,
            "tokens_per_second": rates.tokens_per_second,
            "bytes_per_second": rates.bytes_per_second,
            "hit_rate": rates.hit_rate,
            "total": status.traffic.map(|traffic| json!({
                "hits": traffic.counts.hits,
                "awaited": traffic.counts.in_flight_hits,
                "misses": traffic.counts.misses,
                "evictions": traffic.counts.evictions,
                "bytes": traffic.bytes(),
                "seconds_waiting": traffic.waited.as_secs_f64(),
                "hit_rate": traffic.hit_rate(),
            })),
            "resident": resident,
            "plan": model.memory_plan,
            "sampling": {"temperature": sampling.temperature, "top_p": sampling.top_p},
            "welcome": model.welcome.as_ref().map(Welcome::json),
        });
        routing(&mut state, status);
        state
    }
}

impl StepEvent {
    /// The event as the web page gets it.
    pub fn json(
        &self,
        model: &ServedModel,
        work: &StepWork,
        status: &EngineStatus,
        visits: &[LayerVisit],
        (queued, active): (usize, usize),
    ) -> Value {
        let layer = |row: MoeRow| model.layers.get(row.index()).copied().unwrap_or(row.index());
        let layers: Vec<Value> = visits
            .iter()
            .map(|LayerVisit { row, visit }| {
                let evicted: Vec<[usize; 2]> =
                    visit.evicted.iter().map(|key| [layer(key.row), key.expert.index()]).collect();
                json!({
                    "layer": layer(*row), "hit": visit.hits, "awaited": visit.in_flight, "miss": visit.misses,
                    "evicted": evicted,
                })
            })
            .collect();
        let counts = self.traffic.counts;
        let (kind, tokens) = match work.generated_tokens {
            0 => ("prompt", work.prompt_tokens),
            tokens => ("token", tokens),
        };
        let mut event = json!({
            "model": model.name,
            "step": self.number,
            "seconds": self.at.as_secs_f64(),
            "kind": kind,
            "tokens": tokens,
            "prompt_tokens": work.prompt_tokens,
            "request": work.requests.first(),
            "requests": work.requests,
            "active": active,
            "queued": queued,
            "hits": counts.hits,
            "awaited": counts.in_flight_hits,
            "misses": counts.misses,
            "bytes": self.traffic.bytes(),
            "tokens_per_second": self.rates.tokens_per_second,
            "bytes_per_second": self.rates.bytes_per_second,
            "hit_rate": self.rates.hit_rate,
            "layers": layers,
        });
        routing(&mut event, status);
        event
    }
}

fn routing(value: &mut Value, status: &EngineStatus) {
    value["routing"] = status.routing.as_str().into();
    value["lambda"] = status.lambda.into();
    // Without a lossy strategy all choices are the model's own.
    value["agreement"] = status.quality.map_or(1.0, |quality| quality.agreement).into();
    value["kept_mass"] = status.quality.map_or(1.0, |quality| quality.kept_mass).into();
    value["kl"] = status.quality.map_or(0.0, |quality| quality.kl).into();
    let OutputLoss { measured, .. } = status.loss;
    value["output"] = match measured {
        0 => Value::Null,
        _ => json!({
            "kl": status.loss.mean_kl(),
            "kl_half_interval": status.loss.half_interval(),
            "agreement": status.loss.agreement(),
            "measured": measured,
        }),
    };
    let expected = status.expected.map(|loss| json!({"budget": loss.budget, "expected_kl": loss.mean}));
    value["quality"] = expected.into();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_per_second_of_work() {
        let (mut meter, status) = (RateMeter::new(), EngineStatus::default());
        let ms = Duration::from_millis;
        meter.step(&StepWork { prompt_tokens: 100, ..StepWork::default() }, ms(500), &status);
        meter.step(&StepWork { generated_tokens: 1, prompt_tokens: 9, ..StepWork::default() }, ms(20), &status);
        let event = meter.step(&StepWork { generated_tokens: 2, ..StepWork::default() }, ms(40), &status);
        assert!((event.rates.tokens_per_second - 50.0).abs() < 1e-6, "{}", event.rates.tokens_per_second);
        let later = meter.rates(Instant::now() + 2 * WINDOW);
        assert_eq!((later.tokens_per_second, later.hit_rate), (0.0, None));
    }
}
