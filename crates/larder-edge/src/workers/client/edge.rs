//! The expert path of a client: experts from local memory, from workers, or from the SSD.

use std::time::Instant;

use larder_cache::Traffic;
use larder_core::{ExpertId, Gate, LayerIdx, WantedExpert};
use larder_engine::{CachedPath, StreamingPath};
use larder_model::{ExpertPath, HintSource, ModelError, MoeCall, Routed, wanted_experts};

use crate::workers::client::latency_estimate::LatencyEstimate;
use crate::workers::client::layer_share::OutputSource;
use crate::workers::client::report::EdgeReport;
use crate::workers::client::worker_pool::{LayerExchange, WorkerPool};
use crate::workers::expert_set::ExpertSet;
use crate::workers::handshake::MAX_REQUEST_TOKENS;

/// An expert path that computes experts in memory locally and sends the others to a worker, or reads them from the SSD,
/// whichever is estimated to be faster.
pub struct Edge {
    local: StreamingPath,
    pool: WorkerPool,
    /// Experts that are never sent to a worker if they are stored here.
    always_local: Option<ExpertSet>,
    /// Experts that can be read from the local store.
    stored: ExpertSet,
    /// Time to read and compute one missing expert locally.
    ssd: LatencyEstimate,
}

impl Edge {
    /// Asks `pool` for experts that `local` does not have in memory, except those in `always_local`. Without that set,
    /// experts are read locally as long as slots are free. Only experts in `stored` can be read locally.
    pub fn new(local: StreamingPath, pool: WorkerPool, always_local: Option<ExpertSet>, stored: ExpertSet) -> Self {
        Edge { local, pool, always_local, stored, ssd: LatencyEstimate::default() }
    }

    /// The local expert path.
    pub fn local(&self) -> &StreamingPath {
        &self.local
    }

    /// The local expert path, mutably.
    pub fn local_mut(&mut self) -> &mut StreamingPath {
        &mut self.local
    }

    /// The statistics so far.
    pub fn report(&self) -> EdgeReport {
        self.pool.report()
    }

    /// Computes a layer for at most [`MAX_REQUEST_TOKENS`] tokens.
    fn forward_chunk(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        self.pool.update_workers();
        let routed = self.local.route(call);
        let mut sources = vec![OutputSource::Local; routed.ids.len()];
        let mut exchange = LayerExchange::default();
        self.local.begin(call, &routed);
        let mut rest = wanted_experts(&routed.ids, call.gate.experts);
        while !rest.is_empty() {
            let local = self.send(call, &routed, &rest, &mut exchange)?;
            self.compute(call, &routed, &local)?;
            (call.meanwhile)();
            let failed = self.pool.wait(call.tokens, &mut exchange, &mut sources);
            rest.retain(|wanted| failed.contains(&wanted.expert));
        }
        self.sum(call, &routed, &sources, &exchange, out);
        Ok(routed)
    }

    /// Decides where each of `wanted` is computed and sends the requests; returns the experts to compute locally.
    fn send(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        wanted: &[WantedExpert],
        exchange: &mut LayerExchange,
    ) -> Result<Vec<WantedExpert>, ModelError> {
        let offers = self.pool.offers(call, wanted, exchange);
        let ssd = self.ssd.seconds(call.tokens, Instant::now()).unwrap_or(0.0);
        let mut free = if self.always_local.is_none() { self.local.free_slots(call.layer) } else { 0 };
        let (mut local, mut read) = (Vec::new(), 0);
        let mut remote: Vec<(usize, Vec<ExpertId>)> = Vec::new();
        for (wanted, offers) in wanted.iter().zip(offers) {
            let WantedExpert { expert, .. } = wanted;
            if self.local.is_resident(call.layer, *expert) {
                local.push(*wanted);
                continue;
            }
            let is_stored = self.stored.contains(call.layer, *expert);
            let is_own = self.always_local.as_ref().is_some_and(|own| own.contains(call.layer, *expert)) || free > 0;
            // Of equal offers the first one, from the preferred worker.
            let best = offers.into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
            let reading = ssd * (read + 1) as f64;
            match best.filter(|(_, cost)| !is_stored || (!is_own && *cost <= reading)) {
                Some((worker, _)) => match remote.iter_mut().find(|(other, _)| *other == worker) {
                    Some((_, experts)) => experts.push(*expert),
                    None => remote.push((worker, vec![*expert])),
                },
                None if is_stored => {
                    local.push(*wanted);
                    read += 1;
                    free = free.saturating_sub(1);
                }
                None => return Err(self.unavailable(call.layer, *expert)),
            }
        }
        for (worker, experts) in remote {
            self.pool.request(worker, call, routed, experts, exchange);
        }
        self.pool.flush(exchange);
        Ok(local)
    }

    /// Computes experts locally and measures the time of those that had to be read.
    fn compute(&mut self, call: &MoeCall, routed: &Routed, local: &[WantedExpert]) -> Result<(), ModelError> {
        if local.is_empty() {
            return Ok(());
        }
        let before = self.local.traffic();
        self.local.compute(call, routed, local)?;
        let Traffic { counts, waited, computed, .. } = self.local.traffic() - before;
        self.pool.report.record_local(counts.hits, counts.in_flight_hits + counts.misses);
        if let Ok(read @ 1..) = u32::try_from(counts.misses) {
            let each = waited / read + computed / local.len() as u32;
            self.ssd.record(call.tokens, each, Instant::now());
        }
        Ok(())
    }

    /// Adds up every token's experts in the order of their rank, independent of where they were computed.
    fn sum(
        &self,
        call: &MoeCall,
        routed: &Routed,
        sources: &[OutputSource],
        exchange: &LayerExchange,
        out: &mut [f32],
    ) {
        let (k, hidden) = (call.gate.top_k, out.len() / call.tokens);
        out.fill(0.0);
        for (entry, source) in sources.iter().enumerate() {
            let out = &mut out[entry / k * hidden..][..hidden];
            match *source {
                OutputSource::Local if routed.ids[entry] == ExpertId::NONE => {}
                OutputSource::Local => self.local.workspace().add(call, routed, entry, out),
                OutputSource::Row { reply, row } => {
                    let row = &exchange.replies[reply][row * hidden..][..hidden];
                    out.iter_mut().zip(row).for_each(|(o, y)| *o += y);
                }
                OutputSource::Summed => {}
            }
        }
    }

    fn unavailable(&self, layer: LayerIdx, expert: ExpertId) -> ModelError {
        let report = self.pool.report();
        let troubles = report.workers.iter().filter_map(|w| Some(format!("{} {}", w.name, w.trouble.as_ref()?)));
        let troubles: Vec<String> = troubles.chain(report.discovery.clone()).collect();
        let reason = if troubles.is_empty() { "no worker holds it".into() } else { troubles.join("; ") };
        let what = format!("{layer}, {expert}: not stored on this machine, and no worker can compute it: {reason}");
        ModelError::Expert(what.into())
    }
}

impl ExpertPath for Edge {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        if call.tokens <= MAX_REQUEST_TOKENS {
            return self.forward_chunk(call, out);
        }
        let (hidden, experts) = (out.len() / call.tokens, call.gate.experts);
        let mut all = Routed::default();
        for (i, out) in out.chunks_mut(MAX_REQUEST_TOKENS * hidden).enumerate() {
            let (from, tokens) = (i * MAX_REQUEST_TOKENS, out.len() / hidden);
            let x = &call.x[from * hidden..][..tokens * hidden];
            let logits = &call.logits[from * experts..][..tokens * experts];
            let origins = &call.origins[from..][..tokens];
            let known = call.known.map(|known| &known[from * call.gate.top_k..][..tokens * call.gate.top_k]);
            let routed = self.forward_chunk(&MoeCall { x, logits, tokens, known, origins, ..*call }, out)?;
            all.ids.extend(routed.ids);
            all.weights.extend(routed.weights);
        }
        Ok(all)
    }

    fn wants_hint(&self, source: HintSource, tokens: usize) -> bool {
        // What workers will compute need not be read ahead.
        source == HintSource::LayerBefore && tokens == 1 && self.local.wants_hint(source, tokens)
    }

    fn hint(&mut self, source: HintSource, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.local.hint(source, layer, gate, logits);
    }
}
