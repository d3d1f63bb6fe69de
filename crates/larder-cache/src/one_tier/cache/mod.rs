//! The cache of one tier: carries out the ledger's decisions with a reader and slots in memory.

mod capacity;
mod hot;
mod layer_visit;
mod pass_through;
mod visits;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use larder_core::{CacheScope, ComputeStage, ExpertId, ExpertKey, ExpertLayout, Geometry, LayerIdx, MoeRow, Residency};
use larder_policy::eviction::{CacheShape, Eviction};
use larder_store::StoreError;
use smallvec::SmallVec;

use crate::expert_cache::ExpertCache;
use crate::fill::{CompletedRead, SlotFiller, SlotSupply};
use crate::one_tier::cache::pass_through::PassThrough;
use crate::one_tier::ledger::{CapacityChange, Ledger, SlotAssignment, SlotIndex};
use crate::traffic::{ReadsAhead, Traffic};
use crate::visit::{ChosenExperts, Visit};

/// Experts of a layer that are handled together, of which there are seldom more than eight.
type Few<T> = SmallVec<[T; 8]>;

/// Why an expert is not available.
#[derive(Debug, thiserror::Error)]
#[error("{layer}, {expert}: {cause}")]
pub struct CacheError {
    /// The layer.
    pub layer: LayerIdx,
    /// The expert.
    pub expert: ExpertId,
    /// The failed read or check.
    #[source]
    pub cause: StoreError,
}

/// Computes a stage of experts of one layout, each given with its bytes; for [`ComputeStage::Inputs`], with the first
/// of them.
pub type ComputeFn<'a> = &'a mut dyn FnMut(&ExpertLayout, ComputeStage, &[(ExpertId, &[u8])]);

/// Slots, the ledger over them, and the reader that fills them.
pub struct Cache {
    ledger: Ledger,
    /// The experts of the current visit.
    chosen: ChosenExperts,
    /// What the ledger has assigned to them.
    assignment: SlotAssignment,
    /// The result of the last visit.
    visit: Visit,
    filler: SlotFiller,
    pass_through: PassThrough,
    /// Empty between visits.
    completed: Vec<CompletedRead>,
    /// Empty between visits.
    fronts: Vec<SlotIndex>,
    /// Experts of the next layer, and smaller copies of those of this one, to read ahead of their visit, likeliest
    /// first.
    ahead: VecDeque<(ExpertKey, AheadKind)>,
    hot: HotReads,
    resized: Resized,
    waited: Duration,
    computed: Duration,
    /// Smaller copies that were read.
    small_reads: u64,
    /// Bytes of the reads of visits beside.
    beside_bytes: u64,
    reads_ahead: ReadsAhead,
}

/// How sure it is that experts that are read ahead of a visit are wanted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AheadKind {
    /// Many tokens of a prompt will probably choose them, or they are smaller copies: they are read behind all reads of
    /// the visit before.
    Likely,
    /// They will be used: they are read at once.
    Certain,
    /// One token may choose them: they are read while no demand read is in flight.
    Predicted,
}

/// The hot experts until the first visit.
#[derive(Default)]
struct HotReads {
    /// Those whose reads have not begun, hottest first.
    waiting: VecDeque<ExpertKey>,
    /// Those whose reads have begun, hottest first.
    begun: Vec<ExpertKey>,
}

/// Changes of the capacity.
#[derive(Default)]
struct Resized {
    change: CapacityChange,
    /// Experts that were evicted since the last visit.
    evicted: Vec<ExpertKey>,
}

/// The most pass-through slots: experts of a few megabytes each, whose reads keep an SSD busy while a layer's attention
/// is computed.
const PASS_THROUGH_SLOTS_MAX: usize = 16;
/// Of how many slots one more is a pass-through slot.
const SLOTS_PER_PASS_THROUGH_SLOT: usize = 16;

/// Pass-through slots that a cache of this shape has beside its own slots: none if every expert has a slot, else at
/// least one.
pub fn pass_through_slots(shape: &CacheShape) -> usize {
    if shape.slots >= shape.keys_per_pool() {
        0
    } else {
        (shape.total_slots() / SLOTS_PER_PASS_THROUGH_SLOT).clamp(1, PASS_THROUGH_SLOTS_MAX)
    }
}

/// Slots of a cache of this shape, without pass-through slots.
pub fn slot_count(geometry: &Geometry, slots: usize, scope: CacheScope) -> usize {
    CacheShape::new(geometry, slots, scope).total_slots()
}

impl Cache {
    /// A cache of this shape, with one of `policies` for each pool. The memory of `supply` holds
    /// [`total_slots`](CacheShape::total_slots) slots, each large enough for every expert that may be in it: pool by
    /// pool, then the scratch slots; and behind them pass-through slots, each large enough for every expert. At least
    /// one of these is needed if a layer may want more experts than fit into its pool.
    pub fn new(geometry: &Geometry, shape: &CacheShape, policies: Vec<Box<dyn Eviction>>, supply: SlotSupply) -> Self {
        let (own, slots) = (shape.total_slots(), supply.memory.len());
        assert!(slots >= own, "one memory slot for each slot of the shape");
        assert!(slots > own || shape.slots >= geometry.experts, "experts that do not fit can pass through");
        assert_eq!(
            (shape.rows, shape.experts),
            (geometry.moe_layers.len(), geometry.experts),
            "shape and geometry agree"
        );
        Cache {
            ledger: Ledger::new(shape, policies),
            chosen: ChosenExperts::default(),
            assignment: SlotAssignment::default(),
            visit: Visit::default(),
            pass_through: PassThrough::new(own, slots),
            filler: SlotFiller::new(geometry, supply),
            completed: Vec::new(),
            fronts: Vec::new(),
            ahead: VecDeque::new(),
            hot: HotReads::default(),
            resized: Resized::default(),
            waited: Duration::ZERO,
            computed: Duration::ZERO,
            small_reads: 0,
            beside_bytes: 0,
            reads_ahead: ReadsAhead::default(),
        }
    }

    /// Counts, bytes and times so far.
    pub fn traffic(&self) -> Traffic {
        Traffic {
            counts: self.ledger.counts(),
            demand_bytes: self.filler.demand_bytes,
            prefetch_bytes: self.filler.prefetch_bytes,
            small_reads: self.small_reads,
            beside_bytes: self.beside_bytes,
            waited: self.waited,
            computed: self.computed,
            checked: self.filler.checked,
            submitting: self.filler.submitting,
            read_busy: self.filler.read_busy(),
            reads_ahead: self.reads_ahead,
            tiers: None,
        }
    }

    /// Slots into which experts of `layer` can be read without an eviction.
    pub fn free_slots(&self, layer: LayerIdx) -> usize {
        self.ledger.free_slots(self.row(layer))
    }

    /// Smaller copies of some experts of `layer`, which [`visit_small`](Self::visit_small) will use, are read as soon
    /// as the reads of the visit before have begun. The caller guarantees that the cache [has](Self::has_small) such
    /// copies.
    pub fn read_small(&mut self, layer: LayerIdx, experts: impl IntoIterator<Item = ExpertId>) {
        let row = self.filler.small_row(layer).expect("the store has smaller copies");
        for expert in experts {
            self.ahead.push_front((row.key(expert), AheadKind::Likely));
        }
    }

    /// The layout of the smaller copies of the experts of `layer`, if there are any.
    pub fn small_layout(&self, layer: LayerIdx) -> Option<&ExpertLayout> {
        self.filler.small_row(layer).map(|row| self.filler.layout_of_row(row))
    }

    /// Whether smaller copies of experts can be used.
    pub fn has_small(&self) -> bool {
        self.filler.has_small() && self.has_pass_through()
    }

    /// Whether experts can be used that are not resident and do not become so; see
    /// [`visit_beside`](Self::visit_beside).
    pub fn has_pass_through(&self) -> bool {
        self.pass_through.len() > 0
    }

    /// The experts, of all that `layer` will probably want, that are read ahead of its visit, likeliest first. They
    /// wait in pass-through slots, so nothing is evicted for them. Their reads begin when those of the layer before
    /// have.
    pub fn read_ahead(&mut self, layer: LayerIdx, experts: impl IntoIterator<Item = ExpertId>) {
        self.set_ahead(layer, experts, AheadKind::Likely);
    }

    /// The best `limit` of these experts, which one token of `layer` may choose, are read ahead as in
    /// [`read_ahead`](Self::read_ahead), but only while no demand read is in flight. Other than a
    /// [`hint`](ExpertCache::hint), this changes neither what is resident nor what is evicted, so a routing strategy
    /// that looks at residency chooses as without.
    pub fn read_predicted(&mut self, layer: LayerIdx, experts: &[ExpertId], limit: usize) {
        let row = self.row(layer);
        let absent = experts.iter().copied().filter(|expert| self.ledger.is_absent(row.key(*expert)));
        let absent: Vec<ExpertId> = absent.take(limit).collect();
        self.set_ahead(layer, absent, AheadKind::Predicted);
    }

    fn set_ahead(&mut self, layer: LayerIdx, experts: impl IntoIterator<Item = ExpertId>, kind: AheadKind) {
        let row = self.row(layer);
        self.ahead.clear();
        self.ahead.extend(experts.into_iter().map(|e| (row.key(e), kind)));
    }

    /// Begins to read experts that `layer` will want, as far as they find a pass-through slot, for a caller that knows
    /// that nothing else is to be read first.
    pub fn read_certain(&mut self, layer: LayerIdx, experts: impl IntoIterator<Item = ExpertId>) {
        self.set_ahead(layer, experts, AheadKind::Certain);
        self.begin_reads_ahead();
    }

    /// Prefetches hinted experts while there are no demand reads.
    fn prefetch_if_idle(&mut self) {
        while let Some(expert) = self.filler.next_prefetch() {
            if let Some(at) = self.ledger.prefetch(expert) {
                self.filler.prefetch(expert, at);
            }
        }
    }

    /// Begins the reads ahead that find a pass-through slot.
    fn begin_reads_ahead(&mut self) {
        while let Some((expert, kind)) = self.ahead.pop_front() {
            let is_absent = self.filler.is_small(expert.row) || self.ledger.is_absent(expert);
            if !is_absent || self.pass_through.holds(expert) {
                continue;
            }
            let may_begin = kind != AheadKind::Predicted || self.filler.is_idle();
            let Some(at) = may_begin.then(|| self.pass_through.take(expert)).flatten() else {
                self.ahead.push_front((expert, kind));
                return;
            };
            self.reads_ahead.begun += 1;
            self.reads_ahead.certain += u64::from(kind == AheadKind::Certain);
            self.filler.prefetch(expert, at);
        }
    }

    /// Takes note of a completed read. False if it was a read ahead that is not wanted any more.
    fn end_read(&mut self, read: &CompletedRead) -> bool {
        let succeeded = read.result.is_ok();
        if self.pass_through.owns(read.at) {
            return self.pass_through.end_read(read.at, succeeded);
        }
        if succeeded {
            self.ledger.arrived(read.expert)
        } else {
            self.ledger.failed(read.expert)
        }
        true
    }

    fn compute_group(&mut self, row: MoeRow, stage: ComputeStage, experts: &[(usize, SlotIndex)], compute: ComputeFn) {
        let start = Instant::now();
        let data = |at| match stage {
            ComputeStage::Inputs => self.filler.front(at).1,
            ComputeStage::Whole | ComputeStage::Rest => self.filler.data(row, at),
        };
        let group: Few<_> = experts.iter().map(|(e, at)| (ExpertId(*e as u16), data(*at))).collect();
        compute(self.filler.layout_of_row(row), stage, &group);
        self.computed += start.elapsed();
    }
}

impl ExpertCache for Cache {
    fn last_visit(&self) -> &Visit {
        &self.visit
    }

    fn residency(&self) -> &dyn Residency {
        &self.ledger
    }

    fn policy_shape(&self) -> CacheShape {
        self.ledger.policy_shape()
    }

    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.ledger.set_policies(policies);
    }

    fn new_sequence(&mut self) {
        self.ledger.new_sequence();
    }

    fn row(&self, layer: LayerIdx) -> MoeRow {
        self.filler.row(layer)
    }

    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        self.filler.layout(layer)
    }

    fn hint(&mut self, layer: LayerIdx, experts: &[ExpertId], limit: usize) {
        let row = self.row(layer);
        let absent = experts.iter().map(|e| row.key(*e)).filter(|e| self.ledger.is_absent(*e));
        let absent = absent.take(limit).collect();
        self.filler.set_prefetch_queue(absent);
    }
}

#[cfg(test)]
mod tests;
