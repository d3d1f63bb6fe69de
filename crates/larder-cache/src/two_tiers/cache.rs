//! The cache of two tiers: brings experts to where they are computed soonest, on the device or on the CPU.

use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_core::{ExpertId, ExpertKey, ExpertLayout, Geometry, LayerIdx, MoeRow, Residency, WantedExpert};
use larder_policy::eviction::{CacheShape, Eviction};

use super::costs::Schedule;
use super::links::{Completed, Links};
use super::{
    CostModel, Device, DeviceError, ExpertLocation, MeasuredCosts, PromoteFor, Side, TierError, TierLedger, TierShape,
    TierTraffic, WholeRow,
};
use crate::expert_cache::ExpertCache;
use crate::fill::SlotSupply;
use crate::one_tier::SlotIndex;
use crate::visit::{ChosenExperts, Visit};

/// The most copies of predicted experts at a time.
const COPIES_AHEAD: usize = 2;
/// The most rows of inputs of a visit whose experts are computed together when the last has come to the device. So few
/// rows take hardly longer than reading the experts from device memory, a small part of the time of copying one.
pub(super) const ROWS_TOGETHER: usize = 64;

/// Computes with experts of one layout, on either side.
///
/// The implementation guarantees that both sides give bit-identical results, as the choice of a side depends on timing.
/// It returns the time that computing took, if it is known by then.
pub trait TieredCompute {
    /// On the CPU; each expert is given with its bytes.
    fn host(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration>;

    /// On the device; each expert is given with its device slot. The work may only have begun when this returns: the
    /// device does not overwrite these slots before it is complete, see [`Device`].
    fn device(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration>;

    /// The caller goes on to something that takes time: the device begins what it was given, if it has not yet.
    fn submit(&mut self) {}
}

/// Two tiers of slots, the reader that fills the lower one, and the device that holds the upper one.
pub struct TieredCache {
    pub(super) links: Links,
    /// By row: its experts, when all were on the device.
    whole_rows: Vec<Option<WholeRow>>,
    /// Experts that the next layer will probably want, to be copied behind those of this one; the likeliest first.
    predicted: Vec<ExpertKey>,
    /// The experts of the current visit.
    chosen: ChosenExperts,
}

impl TieredCache {
    /// A cache of this shape, with one of `policies` (made for [`TierShape::policy_shape`]) for each pool, over exactly
    /// the slots of [`TierShape::host`] in memory. The device's slots are allocated here, which is the only thing that
    /// can fail.
    pub fn new(
        geometry: &Geometry,
        shape: &TierShape,
        policies: Vec<Box<dyn Eviction>>,
        host: SlotSupply,
        device: Box<dyn Device>,
        measured: MeasuredCosts,
    ) -> Result<Self, DeviceError> {
        let tiers = TierLedger::new(shape, policies);
        let links = Links::new(geometry, tiers, host, device, CostModel::new(measured))?;
        Ok(TieredCache {
            links,
            whole_rows: vec![None; shape.host.rows],
            predicted: Vec::new(),
            chosen: ChosenExperts::default(),
        })
    }

    /// Has the device prepare the slots in memory for its copies, in the background. To be called when nothing large is
    /// allocated any more.
    pub fn prepare_slots(&mut self) {
        self.links.prepare_slots();
    }

    /// The most bytes of the device's memory that were allocated at one time, by all of its users.
    pub fn device_peak_bytes(&self) -> u64 {
        self.links.device_peak_bytes()
    }

    /// Counts, bytes and times so far.
    pub fn traffic(&self) -> TierTraffic {
        self.links.traffic()
    }

    /// The cost model of copying and computing.
    pub fn costs(&self) -> &CostModel {
        &self.links.costs
    }

    /// Hands each of `wanted` (distinct, in order of rank) to `compute` once: those on the device together and first,
    /// the others where they can be computed soonest. Those that come to the device are computed as they come, or in
    /// small steps together. Each is read at most once. `logits` are the router logits if the layer chose for one
    /// token, else empty.
    ///
    /// On an error the cache stays usable: no wanted expert is in flight and no slot is lost.
    pub fn visit(
        &mut self,
        layer: LayerIdx,
        wanted: &[WantedExpert],
        logits: &[f32],
        compute: &mut dyn TieredCompute,
    ) -> Result<(), TierError> {
        let row = self.row(layer);
        // Background copies may have completed since the last visit.
        while self.links.poll_copies().is_some() {}
        self.chosen.set(wanted);
        self.links.tiers.begin(&self.chosen.choice(row, logits));
        let rest = wanted.to_vec();
        let (links, on_host, failed_promotions) = (&mut self.links, Vec::new(), Vec::new());
        let few_rows = self.chosen.rows() <= ROWS_TOGETHER;
        let mut visit =
            LayerVisit { links, layer, row, rest, on_host, failed_promotions, few_rows, lacks_slots: false };
        let outcome = visit.serve(compute);
        match outcome {
            Ok(()) => {
                visit.copy_ahead(&self.predicted);
                self.predicted.clear();
                visit.promote_best();
                self.links.fill_device(row);
            }
            Err(_) => visit.abort(),
        }
        outcome
    }

    /// The device slots of all experts of a layer, if all are there. They keep their experts until the device has
    /// completed what it was asked before it is asked to copy.
    pub fn slots_of_layer(&mut self, layer: LayerIdx) -> Option<Arc<[SlotIndex]>> {
        let row = self.row(layer);
        let whole = &mut self.whole_rows[row.index()];
        *whole = self.links.tiers.whole_row(row, whole.take());
        whole.as_ref().map(|whole| whole.slots.clone())
    }

    /// By expert of a layer: its device slot, if it is there. A visit of the layer that follows finds it there.
    pub fn slots_on_device(&self, layer: LayerIdx) -> Vec<Option<SlotIndex>> {
        self.links.tiers.slots_on_device(self.row(layer))
    }

    /// In place of [`visit`](Self::visit): a layer has chosen and computed these experts on the device, in the slots
    /// that [`slots_of_layer`](Self::slots_of_layer) returned.
    pub fn computed_on_device(&mut self, layer: LayerIdx, wanted: &[WantedExpert], slots: &[SlotIndex]) {
        while self.links.poll_copies().is_some() {}
        self.chosen.set(wanted);
        self.links.tiers.computed_on_device(&self.chosen.choice(self.row(layer), &[]), slots);
        self.links.traffic.on_device += wanted.len() as u64;
        self.links.fill_device(self.row(layer));
    }
}

impl ExpertCache for TieredCache {
    fn last_visit(&self) -> &Visit {
        self.links.tiers.last_visit()
    }

    fn residency(&self) -> &dyn Residency {
        &self.links.tiers
    }

    fn policy_shape(&self) -> CacheShape {
        self.links.tiers.shape().policy_shape()
    }

    fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.links.tiers.set_policies(policies);
    }

    fn new_sequence(&mut self) {
        self.links.tiers.new_sequence();
    }

    fn row(&self, layer: LayerIdx) -> MoeRow {
        self.links.filler.row(layer)
    }

    fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        self.links.filler.layout(layer)
    }

    fn hint(&mut self, layer: LayerIdx, experts: &[ExpertId], limit: usize) {
        let (row, tiers) = (self.row(layer), &self.links.tiers);
        let absent = experts.iter().map(|e| row.key(*e)).filter(|e| tiers.locate(*e) == ExpertLocation::Absent);
        let absent = absent.take(limit).collect();
        self.links.filler.set_prefetch_queue(absent);
        self.predicted.clear();
        self.predicted.extend(experts.iter().map(|expert| row.key(*expert)));
    }
}

/// The experts of one visit on their way to be computed.
struct LayerVisit<'a> {
    links: &'a mut Links,
    layer: LayerIdx,
    row: MoeRow,
    /// Experts that are not computed yet.
    rest: Vec<WantedExpert>,
    /// Experts computed on the CPU.
    on_host: Vec<ExpertId>,
    /// Experts for which a background promotion has failed in this visit.
    failed_promotions: Vec<ExpertId>,
    /// Whether launches take longer than computing more experts at once does.
    few_rows: bool,
    /// Whether an expert of the visit waits for a slot.
    lacks_slots: bool,
}

/// The experts given to the device, and the time that took if it is known by now.
struct DeviceBatch {
    experts: Vec<WantedExpert>,
    took: Option<Duration>,
}

impl LayerVisit<'_> {
    fn serve(&mut self, compute: &mut dyn TieredCompute) -> Result<(), TierError> {
        let mut hits = true;
        while !self.rest.is_empty() {
            while let Some(completed) = self.links.poll_copies() {
                self.check_failure(completed)?;
            }
            self.lacks_slots = false;
            self.begin_reads();
            let holds_back = self.few_rows && !hits && self.any_to_come();
            hits = false;
            // Hits before copies begin: the small transfers that computing needs would have to wait behind those.
            let mut on_device = if holds_back { None } else { self.launch_on_device(compute) };
            let on_host = self.assign_sides();
            if holds_back && (self.lacks_slots || !on_host.is_empty()) {
                on_device = self.launch_on_device(compute);
            }
            if let Some(DeviceBatch { experts, took }) = &on_device {
                self.finish(Side::Device, experts, *took);
            }
            // Computed experts have released their slots, for which others may wait.
            if self.compute_on_host(&on_host, compute) || on_device.is_some() {
                continue;
            }
            compute.submit();
            let completed = self
                .links
                .complete_one()
                .expect("an expert that cannot be computed is in flight or waits for one that is");
            self.check_failure(completed)?;
        }
        Ok(())
    }

    /// The failure of a wanted expert is an error, except of a background copy where memory keeps experts: the bytes in
    /// memory are as good.
    fn check_failure(&mut self, completed: Completed) -> Result<(), TierError> {
        let Completed { expert: ExpertKey { row, expert }, background, result } = completed;
        let wanted = row == self.row && self.rest.iter().any(|w| w.expert == expert);
        match result {
            Err(_) if wanted && background && self.links.tiers.has_host_cache() => self.failed_promotions.push(expert),
            Err(cause) if wanted => return Err(TierError { layer: self.layer, expert, cause }),
            _ => {}
        }
        Ok(())
    }

    fn begin_reads(&mut self) {
        let (tiers, row) = (&self.links.tiers, self.row);
        let experts = self.rest.iter().map(|w| row.key(w.expert));
        let absent: Vec<ExpertKey> = experts.filter(|e| tiers.locate(*e) == ExpertLocation::Absent).collect();
        if self.links.read(&absent) { self.links.prefetch_if_idle() } else { self.lacks_slots = true }
    }

    /// Whether an expert of the visit is neither computed nor on the device.
    fn any_to_come(&self) -> bool {
        let is_there =
            |w: &WantedExpert| matches!(self.links.tiers.locate(self.row.key(w.expert)), ExpertLocation::Device(_));
        !self.rest.iter().all(is_there)
    }

    /// Begins to copy the experts in memory that are computed sooner on the device, and returns the others.
    fn assign_sides(&mut self) -> Vec<WantedExpert> {
        let (row, bytes, keeps) = (self.row, self.links.filler.bytes(self.row), self.links.tiers.has_host_cache());
        let in_memory =
            |w: &WantedExpert| matches!(self.links.tiers.locate(row.key(w.expert)), ExpertLocation::Host(_));
        let candidates: Vec<WantedExpert> = self.rest.iter().copied().filter(in_memory).collect();
        let queued_bytes = self.links.queued_bytes();
        let mut schedule = Schedule::new(&mut self.links.costs, queued_bytes);
        let side = |w: &WantedExpert| match self.failed_promotions.contains(&w.expert) {
            true => Side::Host,
            // An expert in a scratch slot would have to be read again if it did not go to the device.
            false if !keeps => Side::Device,
            false => schedule.assign(bytes, w.tokens),
        };
        let sides: Vec<Side> = candidates.iter().map(side).collect();
        let mut on_host = Vec::new();
        for (wanted, side) in candidates.into_iter().zip(sides) {
            match side {
                Side::Host => on_host.push(wanted),
                Side::Device => {
                    let promoted = self.links.promote(row.key(wanted.expert), PromoteFor::Demand);
                    self.lacks_slots |= !promoted;
                }
            }
        }
        on_host
    }

    /// Starts computing the experts that are on the device. They are unpinned only by `finish`: until then their slots
    /// are not reused.
    fn launch_on_device(&mut self, compute: &mut dyn TieredCompute) -> Option<DeviceBatch> {
        let (mut group, mut experts) = (Vec::new(), Vec::new());
        for wanted in &self.rest {
            if let ExpertLocation::Device(slot) = self.links.tiers.locate(self.row.key(wanted.expert)) {
                group.push((wanted.expert, slot));
                experts.push(*wanted);
            }
        }
        if group.is_empty() {
            return None;
        }
        let start = Instant::now();
        let took = compute.device(self.links.filler.layout(self.layer), &group);
        self.links.traffic.computed += start.elapsed();
        self.links.traffic.on_device += group.len() as u64;
        Some(DeviceBatch { experts, took })
    }

    fn compute_on_host(&mut self, experts: &[WantedExpert], compute: &mut dyn TieredCompute) -> bool {
        if experts.is_empty() {
            return false;
        }
        compute.submit();
        let bytes = |w: &WantedExpert| match self.links.tiers.locate(self.row.key(w.expert)) {
            ExpertLocation::Host(at) => (w.expert, self.links.filler.data(self.row, at)),
            _ => unreachable!("a wanted expert in memory stays there"),
        };
        let group: Vec<_> = experts.iter().map(bytes).collect();
        let start = Instant::now();
        let took = compute.host(self.links.filler.layout(self.layer), &group);
        self.links.traffic.computed += start.elapsed();
        self.links.traffic.on_host += experts.len() as u64;
        self.on_host.extend(experts.iter().map(|w| w.expert));
        self.finish(Side::Host, experts, took);
        true
    }

    fn finish(&mut self, side: Side, experts: &[WantedExpert], took: Option<Duration>) {
        if let Some(took) = took {
            let bytes = self.links.filler.bytes(self.row);
            let sizes: Vec<_> = experts.iter().map(|w| (bytes, w.tokens)).collect();
            self.links.costs.computed(side, &sizes, took);
        }
        experts.iter().for_each(|w| self.links.tiers.unpin(self.row.key(w.expert)));
        self.rest.retain(|w| !experts.contains(w));
    }

    /// Begins to copy experts in memory to the device that the next layer will probably want, if the link is idle: so
    /// copies of wanted experts never wait behind them but where the next layer comes sooner.
    fn copy_ahead(&mut self, predicted: &[ExpertKey]) {
        if predicted.is_empty() {
            return;
        }
        self.links.tiers.predict(predicted);
        while self.links.poll_copies().is_some() {}
        if !self.links.link_idles() {
            return;
        }
        let mut left = COPIES_AHEAD;
        for expert in predicted {
            if left == 0 {
                return;
            }
            left -= usize::from(self.links.promote(*expert, PromoteFor::Prediction));
        }
    }

    /// Promotes the best expert that was computed on the CPU, if the link is idle, so that it is a device hit next
    /// time. One at a time, so that a wanted expert never waits for more than one such copy.
    fn promote_best(&mut self) {
        // No expert is wanted any more, so a failure concerns no visit.
        while self.links.poll_copies().is_some() {}
        if let (Some(best), true) = (self.on_host.first(), self.links.link_idles()) {
            self.links.promote(self.row.key(*best), PromoteFor::IdleLink);
        }
    }

    /// Waits for the wanted experts in flight, and unpins all that are left.
    fn abort(&mut self) {
        let row = self.row;
        let is_moving =
            |links: &Links, w: &WantedExpert| links.tiers.locate(row.key(w.expert)) == ExpertLocation::InFlight;
        while self.rest.iter().any(|w| is_moving(self.links, w)) {
            self.links.complete_one().expect("a wanted expert is in flight");
        }
        self.rest.drain(..).for_each(|w| self.links.tiers.unpin(row.key(w.expert)));
    }
}
