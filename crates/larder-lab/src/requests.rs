//! A trace as requests to the cache.

use std::sync::{Arc, OnceLock};

use larder_core::{CacheScope, CapacityAt, MoeRow, Trace, TraceStep};
use larder_policy::eviction::{CacheShape, EvictionSpec, FutureUses, LayerChoice, PolicyInputs, PolicyNeeds};

use crate::LabError;

/// The expert requests of a trace, laid out once for many replays.
pub struct Requests<'a> {
    pub(crate) rows: usize,
    pub(crate) experts: usize,
    pub(crate) top_k: usize,
    pub(crate) tokens: u64,
    steps: Vec<PackedRequest<'a>>,
    wanted: Vec<usize>,
    /// For each wanted expert, the number of tokens that chose it.
    wanted_by: Vec<usize>,
    future: OnceLock<Arc<FutureUses>>,
    /// Changes of the number of slots behind the last request.
    pub(crate) last_capacities: &'a [CapacityAt],
}

/// One layer's request, without its experts.
struct PackedRequest<'a> {
    row: u32,
    starts_sequence: bool,
    capacities: &'a [CapacityAt],
    /// End of its experts in `Requests::wanted`.
    end: usize,
    logits: &'a [f32],
}

/// One layer's request as it is replayed.
#[derive(Clone, Copy)]
pub(crate) struct LayerRequest<'a> {
    pub row: MoeRow,
    pub wanted: &'a [usize],
    /// For each wanted expert, the number of tokens that chose it.
    pub tokens: &'a [usize],
    pub logits: &'a [f32],
    pub starts_sequence: bool,
    /// Changes of the number of slots before it.
    pub capacities: &'a [CapacityAt],
}

impl<'a> LayerRequest<'a> {
    /// The request as eviction policies see it.
    pub fn choice(&self) -> LayerChoice<'a> {
        let LayerRequest { row, wanted, tokens, logits, .. } = *self;
        LayerChoice { row, wanted, tokens, logits }
    }
}

impl<'a> Requests<'a> {
    /// The requests of all sequences in order. The caller guarantees that the trace passes its check.
    pub fn all(trace: &'a Trace) -> Self {
        let mut all = Requests::none(trace);
        trace.steps().for_each(|step| all.push(&step));
        all.tokens = trace.tokens() as u64;
        all
    }

    /// As [`all`](Self::all), with the changes of the number of slots that the trace has, for a replay with
    /// [`recorded_shape`](Self::recorded_shape).
    pub fn as_recorded(trace: &'a Trace) -> Self {
        let mut all = Self::all(trace);
        let capacities = trace.steps().map(|step| step.capacities);
        all.steps.iter_mut().zip(capacities).for_each(|(step, capacities)| step.capacities = capacities);
        let within = trace.capacities.partition_point(|change| (change.pass as usize) < trace.passes.len());
        all.last_capacities = &trace.capacities[within..];
        all
    }

    /// The requests of each sequence on its own.
    pub fn by_sequence(trace: &'a Trace) -> Vec<Self> {
        let mut all: Vec<Self> = Vec::with_capacity(trace.sequences.len());
        for step in trace.steps() {
            if step.starts_sequence {
                let mut next = Requests::none(trace);
                next.tokens = u64::from(trace.sequences[all.len()]);
                all.push(next);
            }
            let last = all.last_mut().expect("a trace begins with a sequence");
            last.push(&step);
        }
        all
    }

    pub(crate) fn none(trace: &Trace) -> Self {
        let Trace { rows, experts, top_k, .. } = *trace;
        let (steps, wanted, wanted_by) = Default::default();
        let (future, last_capacities) = (OnceLock::new(), &[][..]);
        Requests { rows, experts, top_k, tokens: 0, steps, wanted, wanted_by, future, last_capacities }
    }

    fn push(&mut self, step: &TraceStep<'a>) {
        let TraceStep { row, logits, starts_sequence, .. } = *step;
        self.wanted.extend_from_slice(&step.wanted);
        self.wanted_by.extend_from_slice(&step.tokens);
        let (row, end) = (row.index() as u32, self.wanted.len());
        self.steps.push(PackedRequest { row, starts_sequence, capacities: &[], end, logits });
    }

    /// Number of requested experts.
    pub fn len(&self) -> usize {
        self.wanted.len()
    }

    /// Whether no expert is requested.
    pub fn is_empty(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The shape of a cache with `slots` per layer, in one pool per layer or one for all.
    pub fn cache_shape(&self, slots: usize, scope: CacheScope, scratch: usize) -> Result<CacheShape, LabError> {
        if slots == 0 {
            return Err(LabError::InvalidInput(
                "a capacity of 0 slots is too small; give at least 1 slot per layer".into(),
            ));
        }
        if slots > self.experts {
            let experts = self.experts;
            return Err(LabError::InvalidInput(format!(
                "a capacity of {slots} slots per layer is more than the {experts} experts of a layer"
            )));
        }
        if scratch > self.rows * self.experts {
            let all = self.rows * self.experts;
            return Err(LabError::InvalidInput(format!(
                "{scratch} scratch slots are more than the {all} experts of all layers"
            )));
        }
        let slots = match scope {
            CacheScope::Layer => slots,
            CacheScope::Global => slots * self.rows,
        };
        Ok(CacheShape { rows: self.rows, experts: self.experts, top_k: self.top_k, slots, scope, scratch })
    }

    /// The shape of the cache that a trace was recorded with, whose number of slots changed: with the most that it had.
    pub fn recorded_shape(&self, trace: &Trace, scope: CacheScope, scratch: usize) -> Result<CacheShape, LabError> {
        let shape = self.cache_shape(1, scope, scratch)?;
        let slots = trace.capacities.iter().map(|capacity| capacity.slots as usize).max();
        let slots = slots.filter(|slots| *slots <= shape.keys_per_pool()).ok_or_else(|| {
            let what =
                "the trace has no number of slots that fits this cache scope; only runs with --cache auto record it";
            LabError::InvalidInput(what.into())
        })?;
        Ok(CacheShape { slots, ..shape })
    }

    /// The inputs of a policy: the given ones and, for a policy that knows the future, these requests.
    pub fn policy_inputs(&self, spec: &EvictionSpec, inputs: &PolicyInputs) -> PolicyInputs {
        if spec.needs() != PolicyNeeds::Future {
            return inputs.clone();
        }
        let future = self.future.get_or_init(|| {
            Arc::new(FutureUses::new(self.rows, self.experts, self.iter().map(|request| (request.row, request.wanted))))
        });
        PolicyInputs { future: Some(future.clone()), ..inputs.clone() }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = LayerRequest<'_>> {
        let starts = std::iter::once(0).chain(self.steps.iter().map(|step| step.end));
        self.steps.iter().zip(starts).map(|(step, start)| LayerRequest {
            row: MoeRow(step.row as usize),
            wanted: &self.wanted[start..step.end],
            tokens: &self.wanted_by[start..step.end],
            logits: step.logits,
            starts_sequence: step.starts_sequence,
            capacities: step.capacities,
        })
    }
}
