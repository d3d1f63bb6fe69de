//! Experts brought to where they are computed: on the device, or on the CPU where that is sooner.

use std::time::{Duration, Instant};

use larder_core::{ExpertId, ExpertLayout, Geometry, LayerIdx, Residency};
use larder_policy::eviction::Eviction;

use super::costs::Schedule;
use super::links::{Landed, Links, Supply};
use super::{
    Costs, Device, DeviceError, Measured, Side, TierError, TierSetting, TierTraffic, Tiers, Whereabouts, Wish,
};
use crate::cache::Visit;
use crate::ledger::SlotIndex;

/// An expert that a layer's tokens chose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Wanted {
    /// Which expert.
    pub expert: ExpertId,
    /// For how many of the tokens.
    pub tokens: usize,
}

/// Computes with experts of one layout, wherever they are.
///
/// The implementation guarantees that both sides give the same bits, as which of them computes an expert is decided by
/// how long things take. It says how long computing took, as far as it is known by then.
pub trait Work {
    /// On the CPU, each expert beside its bytes.
    fn host(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, &[u8])]) -> Option<Duration>;

    /// On the device, each expert beside its slot there. It may only have begun when this returns: the device does
    /// nothing to these slots before it is over, see [`Device`].
    fn device(&mut self, layout: &ExpertLayout, experts: &[(ExpertId, SlotIndex)]) -> Option<Duration>;
}

/// Two tiers of slots, the reader that fills the lower one, and the device that has the upper one.
pub struct TieredCache {
    pub(super) links: Links,
    /// Position of each decoder layer among those with experts.
    rows: Vec<Option<usize>>,
}

impl TieredCache {
    /// A cache as `setting` says, with one of `policies` (made for [`TierSetting::policies`]) for each pool. The
    /// device's slots are taken here, which is all that can fail.
    pub fn new(
        geometry: &Geometry,
        setting: &TierSetting,
        policies: Vec<Box<dyn Eviction>>,
        supply: Supply,
        device: Box<dyn Device>,
        measured: Measured,
    ) -> Result<Self, DeviceError> {
        let mut rows = vec![None; geometry.layers];
        for (row, layer) in geometry.moe_layers.iter().enumerate() {
            rows[layer.index()] = Some(row);
        }
        let tiers = Tiers::new(setting, policies);
        let links = Links::new(geometry, tiers, supply, device, Costs::new(measured))?;
        Ok(TieredCache { links, rows })
    }

    /// What passed through so far.
    pub fn traffic(&self) -> TierTraffic {
        self.links.traffic()
    }

    /// What copying and computing take.
    pub fn costs(&self) -> &Costs {
        &self.links.costs
    }

    /// What the last visit found: hits are those in either tier, evicted are who left both.
    pub fn last_visit(&self) -> &Visit {
        self.links.tiers.last_visit()
    }

    /// What routing may know.
    pub fn residency(&self) -> &dyn Residency {
        &self.links.tiers
    }

    /// How many slots each tier has.
    pub fn setting(&self) -> TierSetting {
        self.links.tiers.setting()
    }

    /// Lets other policies say who leaves from now on, one for each pool.
    pub fn set_policies(&mut self, policies: Vec<Box<dyn Eviction>>) {
        self.links.tiers.set_policies(policies);
    }

    /// The position of a layer among those with experts. The caller guarantees that it has some.
    pub fn row(&self, layer: LayerIdx) -> usize {
        self.rows[layer.index()].expect("only layers with experts are visited")
    }

    /// What comes has nothing to do with what was.
    pub fn new_sequence(&mut self) {
        self.links.tiers.new_sequence();
    }

    /// How the experts of `layer` are laid out.
    pub fn layout(&self, layer: LayerIdx) -> &ExpertLayout {
        self.links.shards.layout(layer)
    }

    /// What `layer` will probably want, likeliest first. The first `most` of them that are in neither tier are read into
    /// memory as soon as the SSD would idle; what was expected before and not begun is forgotten.
    pub fn expect(&mut self, layer: LayerIdx, experts: &[ExpertId], most: usize) {
        let (row, tiers) = (self.row(layer), &self.links.tiers);
        let absent =
            experts.iter().map(|e| (row, e.index())).filter(|(row, e)| tiers.find(*row, *e) == Whereabouts::Absent);
        self.links.guesses = absent.take(most).collect();
    }

    /// Hands each of `wanted` (distinct, in order of rank) to `work` once: those on the device together and first, the
    /// others where and when they can be computed soonest. Each is read at most once. `logits` are what the layer's
    /// router said if it chose for one token, else empty.
    ///
    /// On an error the cache stays usable: nothing that was wanted is under way and no slot is lost.
    pub fn visit(
        &mut self,
        layer: LayerIdx,
        wanted: &[Wanted],
        logits: &[f32],
        work: &mut dyn Work,
    ) -> Result<(), TierError> {
        let row = self.row(layer);
        // What nobody waited for is over without anybody having been told.
        while self.links.collect().is_some() {}
        let experts: Vec<usize> = wanted.iter().map(|w| w.expert.index()).collect();
        self.links.tiers.begin(row, &experts, logits);
        let rest = wanted.to_vec();
        let (links, on_host, grounded) = (&mut self.links, Vec::new(), Vec::new());
        let mut service = Service { links, layer, row, rest, on_host, grounded };
        let outcome = service.serve(work);
        match outcome {
            Ok(()) => service.promote_best(),
            Err(_) => service.give_up(),
        }
        outcome
    }
}

/// A layer's experts on their way.
struct Service<'a> {
    links: &'a mut Links,
    layer: LayerIdx,
    row: usize,
    /// What is not computed yet.
    rest: Vec<Wanted>,
    /// What was computed on the CPU.
    on_host: Vec<usize>,
    /// What was to be on the device by now and could not be copied.
    grounded: Vec<usize>,
}

/// What the device was given, and how long that took if it is known by now.
struct Given {
    experts: Vec<Wanted>,
    took: Option<Duration>,
}

impl Service<'_> {
    fn serve(&mut self, work: &mut dyn Work) -> Result<(), TierError> {
        while !self.rest.is_empty() {
            while let Some(landed) = self.links.collect() {
                self.take_note(landed)?;
            }
            self.begin_reads();
            // Before copies begin, behind which the little that it needs would have to wait.
            let on_device = self.begin_on_device(work);
            let on_host = self.share_out();
            if let Some(Given { experts, took }) = &on_device {
                self.finish(Side::Device, experts, *took);
            }
            // What was computed has let go of its slots, for which others may wait.
            if self.compute_on_host(&on_host, work) || on_device.is_some() {
                continue;
            }
            let landed = self.links.land().expect("what cannot be computed is on its way, or waits for one that is");
            self.take_note(landed)?;
        }
        Ok(())
    }

    /// A failure of what is wanted is an error, but for a copy that was made before anybody wanted it: then the bytes in
    /// memory are as good.
    fn take_note(&mut self, landed: Landed) -> Result<(), TierError> {
        let Landed { row, expert, idle, result } = landed;
        let wanted = row == self.row && self.rest.iter().any(|w| w.expert.index() == expert);
        match result {
            Err(_) if wanted && idle && self.links.tiers.keeps_in_memory() => self.grounded.push(expert),
            Err(cause) if wanted => {
                return Err(TierError { layer: self.layer, expert: ExpertId(expert as u16), cause });
            }
            _ => {}
        }
        Ok(())
    }

    fn begin_reads(&mut self) {
        let tiers = &self.links.tiers;
        let experts = self.rest.iter().map(|w| w.expert.index());
        let absent: Vec<usize> = experts.filter(|e| tiers.find(self.row, *e) == Whereabouts::Absent).collect();
        if self.links.read(self.row, absent.into_iter()) {
            self.links.guess_if_idle();
        }
    }

    /// Begins to copy those in memory that are done sooner on the device, and returns the others.
    fn share_out(&mut self) -> Vec<Wanted> {
        let (row, bytes, keeps) = (self.row, self.links.bytes(self.row), self.links.tiers.keeps_in_memory());
        let in_memory = |w: &Wanted| matches!(self.links.tiers.find(row, w.expert.index()), Whereabouts::Host(_));
        let candidates: Vec<Wanted> = self.rest.iter().copied().filter(in_memory).collect();
        let queued_bytes = self.links.queued_bytes();
        let mut schedule = Schedule::new(&mut self.links.costs, queued_bytes);
        let side = |w: &Wanted| match self.grounded.contains(&w.expert.index()) {
            true => Side::Host,
            // What memory does not keep would have to be read again if it did not go to the device.
            false if !keeps => Side::Device,
            false => schedule.give(bytes, w.tokens),
        };
        let sides: Vec<Side> = candidates.iter().map(side).collect();
        let mut on_host = Vec::new();
        for (wanted, side) in candidates.into_iter().zip(sides) {
            match side {
                Side::Host => on_host.push(wanted),
                Side::Device => self.links.promote(row, wanted.expert.index(), Wish::Wanted),
            }
        }
        on_host
    }

    /// Has those computed that are on the device. They are done only when it is said so: until then nobody takes their
    /// slots.
    fn begin_on_device(&mut self, work: &mut dyn Work) -> Option<Given> {
        let (mut group, mut experts) = (Vec::new(), Vec::new());
        for wanted in &self.rest {
            if let Whereabouts::Device(slot) = self.links.tiers.find(self.row, wanted.expert.index()) {
                group.push((wanted.expert, slot));
                experts.push(*wanted);
            }
        }
        if group.is_empty() {
            return None;
        }
        let start = Instant::now();
        let took = work.device(self.links.shards.layout(self.layer), &group);
        self.links.traffic.computed += start.elapsed();
        self.links.traffic.on_device += group.len() as u64;
        Some(Given { experts, took })
    }

    fn compute_on_host(&mut self, experts: &[Wanted], work: &mut dyn Work) -> bool {
        if experts.is_empty() {
            return false;
        }
        let bytes = |w: &Wanted| match self.links.tiers.find(self.row, w.expert.index()) {
            Whereabouts::Host(at) => (w.expert, self.links.data(self.row, at)),
            _ => unreachable!("what is wanted in memory stays there"),
        };
        let group: Vec<_> = experts.iter().map(bytes).collect();
        let start = Instant::now();
        let took = work.host(self.links.shards.layout(self.layer), &group);
        self.links.traffic.computed += start.elapsed();
        self.links.traffic.on_host += experts.len() as u64;
        self.on_host.extend(experts.iter().map(|w| w.expert.index()));
        self.finish(Side::Host, experts, took);
        true
    }

    fn finish(&mut self, side: Side, experts: &[Wanted], took: Option<Duration>) {
        if let Some(took) = took {
            let bytes = self.links.bytes(self.row);
            let sizes: Vec<_> = experts.iter().map(|w| (bytes, w.tokens)).collect();
            self.links.costs.computed(side, &sizes, took);
        }
        experts.iter().for_each(|w| self.links.tiers.done(self.row, w.expert.index()));
        self.rest.retain(|w| !experts.contains(w));
    }

    /// The best of what was computed on the CPU becomes a hit of the device for the next time, if the link has nothing
    /// else to do. One at a time, so that nobody who is wanted waits for more than that.
    fn promote_best(&mut self) {
        // Nothing is wanted any more, so no failure is anybody's.
        while self.links.collect().is_some() {}
        if let (Some(best), true) = (self.on_host.first(), self.links.link_idles()) {
            self.links.promote(self.row, *best, Wish::Idle);
        }
    }

    /// Waits for what is wanted and on its way, and lets go of all of it.
    fn give_up(&mut self) {
        let row = self.row;
        let is_moving = |links: &Links, w: &Wanted| links.tiers.find(row, w.expert.index()) == Whereabouts::Moving;
        while self.rest.iter().any(|w| is_moving(self.links, w)) {
            self.links.land().expect("it is on its way");
        }
        self.rest.drain(..).for_each(|w| self.links.tiers.done(row, w.expert.index()));
    }
}
