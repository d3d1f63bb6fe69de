//! The path of a layer's experts where several machines have them.

use std::time::Instant;

use larder_cache::Traffic;
use larder_core::{ExpertId, Gate, LayerIdx};
use larder_engine::{CachedPath, StreamingPath};
use larder_model::{ExpertPath, ModelError, MoeCall, Routed, distinct};

use crate::agreed::MOST_TOKENS;
use crate::asker::crowd::{Crowd, Round};
use crate::asker::estimate::Estimate;
use crate::asker::report::Report;
use crate::asker::share::Source;
use crate::held::Held;

/// Experts in memory are computed here; the others by whoever is quickest: a worker, or this machine once it has read
/// them.
pub struct Edge {
    local: StreamingPath,
    crowd: Crowd,
    /// Who is always computed here.
    own: Option<Held>,
    /// Who can be read here.
    stored: Held,
    ssd: Estimate,
}

impl Edge {
    /// Asks `crowd` for what `local` does not have in memory, but for its `own`, if it is known who those are. Only
    /// those in `stored` can be read here.
    pub fn new(local: StreamingPath, crowd: Crowd, own: Option<Held>, stored: Held) -> Self {
        Edge { local, crowd, own, stored, ssd: Estimate::default() }
    }

    /// The experts here.
    pub fn local(&self) -> &StreamingPath {
        &self.local
    }

    /// The same, to be changed.
    pub fn local_mut(&mut self) -> &mut StreamingPath {
        &mut self.local
    }

    /// Who computed what so far.
    pub fn report(&self) -> Report {
        self.crowd.report()
    }

    /// No more tokens than one request may have.
    fn piece(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        let routed = self.local.route(call);
        let mut sources = vec![Source::Here; routed.ids.len()];
        let mut round = Round::default();
        self.local.begin(call, &routed);
        let mut rest = distinct(&routed.ids, call.gate.experts);
        while !rest.is_empty() {
            let here = self.send(call, &routed, &rest, &mut round)?;
            self.compute(call, &routed, &here)?;
            rest = self.crowd.wait(call.tokens, &mut round, &mut sources);
        }
        self.sum(call, &routed, &sources, &round, out);
        Ok(routed)
    }

    /// Sends for what others shall compute; returns what is to be computed here.
    fn send(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        wanted: &[ExpertId],
        round: &mut Round,
    ) -> Result<Vec<ExpertId>, ModelError> {
        let offers = self.crowd.offers(call, wanted, round);
        let ssd = self.ssd.seconds(call.tokens, Instant::now()).unwrap_or(0.0);
        let mut free = if self.own.is_none() { self.local.free_slots(call.layer) } else { 0 };
        let (mut here, mut read) = (Vec::new(), 0);
        let mut there: Vec<(usize, Vec<ExpertId>)> = Vec::new();
        for (expert, offers) in wanted.iter().zip(offers) {
            if self.local.is_resident(call.layer, *expert) {
                here.push(*expert);
                continue;
            }
            let is_stored = self.stored.has(call.layer, *expert);
            let is_own = self.own.as_ref().is_some_and(|own| own.has(call.layer, *expert)) || free > 0;
            // Of equals the first, which is the nearest.
            let best = offers.into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
            let reading = ssd * (read + 1) as f64;
            match best.filter(|(_, cost)| !is_stored || (!is_own && *cost <= reading)) {
                Some((neighbour, _)) => match there.iter_mut().find(|(other, _)| *other == neighbour) {
                    Some((_, experts)) => experts.push(*expert),
                    None => there.push((neighbour, vec![*expert])),
                },
                None if is_stored => {
                    here.push(*expert);
                    read += 1;
                    free = free.saturating_sub(1);
                }
                None => return Err(self.nobody(call.layer, *expert)),
            }
        }
        for (neighbour, experts) in there {
            self.crowd.ask(neighbour, call, routed, experts, round);
        }
        self.crowd.push(round);
        Ok(here)
    }

    /// Computes experts here and notes what those cost that had to be read.
    fn compute(&mut self, call: &MoeCall, routed: &Routed, here: &[ExpertId]) -> Result<(), ModelError> {
        if here.is_empty() {
            return Ok(());
        }
        let before = self.local.traffic();
        self.local.compute(call, routed, here)?;
        let Traffic { counts, waited, computed, .. } = self.local.traffic() - before;
        self.crowd.report.note_here(counts.hits, counts.in_flight_hits + counts.misses);
        if let Ok(read @ 1..) = u32::try_from(counts.misses) {
            let each = waited / read + computed / here.len() as u32;
            self.ssd.note(call.tokens, each, Instant::now());
        }
        Ok(())
    }

    /// Every token's experts in the order of their rank, whoever computed them.
    fn sum(&self, call: &MoeCall, routed: &Routed, sources: &[Source], round: &Round, out: &mut [f32]) {
        let (k, hidden) = (call.gate.top_k, out.len() / call.tokens);
        out.fill(0.0);
        for (place, source) in sources.iter().enumerate() {
            let out = &mut out[place / k * hidden..][..hidden];
            match *source {
                Source::Here if routed.ids[place] == ExpertId::NONE => {}
                Source::Here => self.local.workspace().add(call, routed, place, out),
                Source::Row { answer, row } => {
                    let row = &round.answers[answer][row * hidden..][..hidden];
                    out.iter_mut().zip(row).for_each(|(o, y)| *o += y);
                }
                Source::Inside => {}
            }
        }
    }

    fn nobody(&self, layer: LayerIdx, expert: ExpertId) -> ModelError {
        let report = self.crowd.report();
        let troubles = report.workers.iter().filter_map(|w| Some(format!("{} {}", w.name, w.trouble.as_ref()?)));
        let troubles: Vec<String> = troubles.collect();
        let why = if troubles.is_empty() { "no worker holds it".into() } else { troubles.join("; ") };
        ModelError::Expert(format!(
            "{layer}, {expert}: is not stored here, and nobody who holds it can be asked: {why}"
        ))
    }
}

impl ExpertPath for Edge {
    fn forward(&mut self, call: &MoeCall, out: &mut [f32]) -> Result<Routed, ModelError> {
        if call.tokens <= MOST_TOKENS {
            return self.piece(call, out);
        }
        let (hidden, experts) = (out.len() / call.tokens, call.gate.experts);
        let mut all = Routed::default();
        let pieces = call.x.chunks(MOST_TOKENS * hidden).zip(call.logits.chunks(MOST_TOKENS * experts));
        for ((x, logits), out) in pieces.zip(out.chunks_mut(MOST_TOKENS * hidden)) {
            let routed = self.piece(&MoeCall { x, logits, tokens: x.len() / hidden, ..*call }, out)?;
            all.ids.extend(routed.ids);
            all.weights.extend(routed.weights);
        }
        Ok(all)
    }

    fn wants_hints(&self) -> bool {
        self.local.wants_hints()
    }

    fn hint_next(&mut self, layer: LayerIdx, gate: &Gate, logits: &[f32]) {
        self.local.hint_next(layer, gate, logits);
    }
}
