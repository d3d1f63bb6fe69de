//! Computes experts in the slots of the arena.

mod expert_choice;
mod gate;
mod hits;
mod list_memory;

use std::sync::Arc;
use std::time::Duration;

use larder_core::{ExpertId, ExpertLayout, Gate, NumberFormat, PerMatrix};
use larder_kernels::InputBuffer;
use larder_model::{
    Activation, CallOnDevice, ChosenOnDevice, DeviceExperts, DeviceMoeCall, ExpertWorkspace, MoeCall, Routed, Rows,
};

use crate::arena_sync::ArenaSync;
use crate::driver::{Driver, Stream};
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES, DeviceActivations, ExpertBatch, ExpertKernels, GroupLists};
use crate::launch_queue::LaunchQueue;
use crate::launches::{ExpertTerm, kernel_alone};
use crate::memory::{DeviceBuffer, Download, StreamEvent, Upload};
use crate::ops::GpuOps;
use expert_choice::DeviceChooser;
use hits::{BegunHits, HitsOfCall};

/// Computes the experts of a layer in their slots on the device.
pub struct GpuExperts {
    queue: Arc<LaunchQueue>,
    sync: Arc<ArenaSync>,
    /// Where inputs are rows of a chain, and sums become some.
    ops: Option<Arc<GpuOps>>,
    experts: ExpertKernels,
    /// `[tokens, hidden]`, or `[tokens · k, hidden]` if routing weights scale the inputs.
    inputs: InputBuffer,
    scaled: Vec<f32>,
    upload: Upload,
    x: DeviceActivations,
    hidden: usize,
    /// `[places, hidden]`, in the order in which they were computed.
    outputs: DeviceBuffer,
    download: Download,
    /// The places `token · k + rank` that were submitted since the call began.
    places: Vec<u32>,
    /// By place of the current group: its row in the inputs.
    picks: Vec<u32>,
    /// By expert of the current group: its address and its number of tokens.
    group: Vec<(u64, usize)>,
    /// Experts that the device chooses.
    chosen: DeviceChooser,
    /// Those that were begun for the next call.
    begun: Option<BegunHits>,
    hits: HitsOfCall,
    clock: Clock,
    /// The first error since the call began.
    failed: Option<GpuError>,
}

impl GpuExperts {
    pub(crate) fn new(queue: &Arc<LaunchQueue>, sync: Arc<ArenaSync>, ops: Option<Arc<GpuOps>>) -> Result<Self> {
        let driver: &Arc<dyn Driver> = &(queue.clone() as _);
        let chosen = DeviceChooser::new(driver, sync.clone(), ExpertKernels::new(queue));
        Ok(GpuExperts {
            chosen,
            begun: None,
            hits: HitsOfCall::default(),
            queue: queue.clone(),
            sync,
            ops,
            experts: ExpertKernels::new(queue),
            inputs: InputBuffer::new(),
            scaled: Vec::new(),
            upload: Upload::new(driver)?,
            x: DeviceActivations::default(),
            hidden: 0,
            outputs: DeviceBuffer::new(driver),
            download: Download::new(driver)?,
            places: Vec::new(),
            picks: Vec::new(),
            group: Vec::new(),
            clock: Clock { begin: StreamEvent::new(driver)?, end: StreamEvent::new(driver)?, running: None, groups: 0 },
            failed: None,
        })
    }

    /// Allocates all memory that calls with up to `tokens` tokens need.
    fn reserve(&mut self, layout: &ExpertLayout, gate: &Gate, tokens: usize) -> Result<()> {
        let (places, hidden) = (tokens * gate.top_k, layout.up.cols);
        let rows = if gate.scales_input { places } else { tokens };
        self.upload.begin(rows * hidden * size_of::<f32>() + rows * hidden / BLOCK * BLOCK_BYTES)?;
        self.outputs.ensure(places * hidden * size_of::<f32>())?;
        self.download.reserve(places * hidden * size_of::<f32>())?;
        if self.ops.is_some() {
            self.chosen.reserve(layout, gate)?;
        }
        let of_terms = tokens * gate.top_k * (ExpertTerm::BYTES + hidden * size_of::<f32>());
        self.queue.reserve(GroupLists::bytes(places.min(gate.experts), places).max(of_terms))?;
        self.experts.reserve(layout, places)
    }

    fn take_inputs(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) -> Result<()> {
        self.hidden = call.x.len() / call.tokens;
        self.places.clear();
        let quantise = layout.quantises_input();
        let widely = layout.inputs().any(|part| part.kind.is_float());
        let mut x = call.x;
        if call.gate.scales_input {
            self.scaled.clear();
            for (row, weights) in x.chunks_exact(self.hidden).zip(routed.weights.chunks_exact(call.gate.top_k)) {
                weights.iter().for_each(|weight| self.scaled.extend(row.iter().map(|v| v * weight)));
            }
            x = &self.scaled;
        }
        self.x = match (&self.ops, call.on_device.filter(|_| !call.gate.scales_input)) {
            (Some(ops), Some(on_device)) => ops.activations(on_device.x, quantise)?,
            _ => {
                let inputs = self.inputs.fill(x, self.hidden, quantise);
                DeviceActivations::send(&mut self.upload, &inputs, widely)?
            }
        };
        if self.hits.settle(self.begun.take(), call, &routed.ids, &self.sync) {
            self.chosen.host_chose(call.layer, &routed.ids);
        }
        self.outputs.ensure(4 * routed.ids.len() * self.hidden)
    }

    fn begin_group(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        layout: &ExpertLayout,
        group: &[(ExpertId, usize)],
    ) -> Result<Option<Duration>> {
        let (begun, rest): (Vec<_>, Vec<_>) = group.iter().partition(|(expert, slot)| self.hits.has(*expert, *slot));
        for (expert, _) in &begun {
            self.hits.take((0..).zip(&routed.ids).filter(|(_, id)| *id == expert).map(|(place, _)| place));
        }
        if rest.is_empty() {
            return Ok(None);
        }
        let done = self.places.len();
        self.find_places(call, routed, &rest);
        let out = self.outputs.at() + (4 * done * self.hidden) as u64;
        let (experts, picks) = (&self.group, &self.picks);
        let begun =
            self.clock.time(&mut self.experts, &ExpertBatch { layout, act: call.act, experts, picks, x: self.x, out });
        // Also after an error: some kernels may be in flight.
        self.sync.record_compute(rest.iter().map(|(_, slot)| *slot))?;
        begun
    }

    /// Collects the places of each expert, one expert after another.
    fn find_places(&mut self, call: &MoeCall, routed: &Routed, group: &[(ExpertId, usize)]) {
        let (k, done) = (call.gate.top_k as u32, self.places.len());
        self.group.clear();
        for (expert, slot) in group {
            let before = self.places.len();
            let places = (0..).zip(&routed.ids).filter(|(_, id)| *id == expert);
            self.places.extend(places.map(|(place, _)| place));
            self.group.push((self.sync.address(*slot), self.places.len() - before));
        }
        let row = |place: &u32| if call.gate.scales_input { *place } else { place / k };
        self.picks.clear();
        self.picks.extend(self.places[done..].iter().map(row));
    }
}

impl GpuExperts {
    /// Begins the sums of a call; outputs that were not computed here are those of `host`.
    fn launch_sum(
        &mut self,
        ops: &GpuOps,
        (call, on_device): (&MoeCall, CallOnDevice),
        routed: &Routed,
        host: &ExpertWorkspace,
    ) -> Result<Rows> {
        let (hidden, places) = (self.hidden, routed.ids.len());
        // By place: the address of its output.
        let mut computed = vec![None; places];
        let row_bytes = 4 * hidden as u64;
        let own = self.places.iter().zip(0u64..).map(|(place, row)| (*place, self.outputs.at() + row * row_bytes));
        own.chain(self.hits.outputs(hidden)).for_each(|(place, at)| computed[place as usize] = Some(at));
        let from_host = |place: usize| computed[place].is_none() && routed.ids[place] != ExpertId::NONE;
        let terms = ExpertTerm::BYTES * places;
        let rows = (0..places).filter(|place| from_host(*place)).count();
        let terms = self.queue.stage_varying(terms + 4 * hidden * rows, |base, bytes| {
            let (terms, mut outputs) = bytes.split_at_mut(terms);
            let mut next = base + terms.len() as u64;
            for (place, term) in terms.chunks_exact_mut(ExpertTerm::BYTES).enumerate() {
                let mut output = computed[place].unwrap_or(0);
                if from_host(place) {
                    let (own, rest) = std::mem::take(&mut outputs).split_at_mut(4 * hidden);
                    own.copy_from_slice(bytemuck::cast_slice(host.output(place, hidden)));
                    (output, outputs) = (next, rest);
                    next += 4 * hidden as u64;
                }
                let weight = if call.gate.scales_input { 1.0 } else { routed.weights[place] };
                term.copy_from_slice(&ExpertTerm { output, weight }.to_bytes());
            }
            Ok(())
        })?;
        ops.begin_sum(terms, call.gate.top_k, [call.tokens, hidden], [on_device.shared, on_device.residual])
    }
}

impl DeviceExperts for GpuExperts {
    fn prepare(
        &mut self,
        layout: &ExpertLayout,
        act: Activation,
        gate: &Gate,
        tokens: usize,
    ) -> larder_model::Result<()> {
        if layout.gate.is_none() {
            kernel_alone(act)?;
        }
        let unsupported = layout.bias.iter().flat_map(PerMatrix::iter).find(|bias| bias.kind != NumberFormat::F32);
        if let Some(bias) = unsupported {
            let what = format!("expert biases are {}, but the GPU kernels support only f32", bias.kind);
            return Err(GpuError::Unsupported(what).into());
        }
        Ok(self.reserve(layout, gate, tokens)?)
    }

    fn begin(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) {
        self.failed = self.take_inputs(call, routed, layout).err();
    }

    fn compute(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        layout: &ExpertLayout,
        group: &[(ExpertId, usize)],
    ) -> Option<Duration> {
        if self.failed.is_some() {
            return None;
        }
        match self.begin_group(call, routed, layout, group) {
            Ok(took) => took,
            Err(e) => {
                self.failed = Some(e);
                None
            }
        }
    }

    fn submit(&mut self) {
        if let Err(e) = self.queue.flush() {
            self.failed.get_or_insert(e);
        }
    }

    fn chooses(&self, gate: &Gate, tokens: usize) -> bool {
        self.ops.is_some() && DeviceChooser::chooses(gate, tokens)
    }

    fn begin_chosen(
        &mut self,
        call: &DeviceMoeCall,
        layout: &ExpertLayout,
        slots: &Arc<[usize]>,
    ) -> larder_model::Result<Rows> {
        let ops = self.ops.as_ref().expect("the caller has asked whether the device chooses");
        Ok(self.chosen.begin(call, layout, slots, ops)?)
    }

    fn begin_hits(
        &mut self,
        call: &DeviceMoeCall,
        layout: &ExpertLayout,
        slots: &[Option<usize>],
    ) -> larder_model::Result<()> {
        let ops = self.ops.as_ref().expect("the caller has asked whether the device chooses");
        self.begun = None;
        self.begun = Some(self.chosen.begin_hits(call, layout, slots, ops)?);
        Ok(())
    }

    fn step_begins(&mut self, in_flight: usize) {
        self.chosen.step_begins(in_flight);
    }

    fn take_chosen(&mut self) -> Vec<ChosenOnDevice> {
        self.chosen.take()
    }

    fn begin_sum(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        host: &ExpertWorkspace,
    ) -> larder_model::Result<Option<Rows>> {
        let (Some(ops), Some(on_device), None) = (self.ops.clone(), call.on_device, &self.failed) else {
            return Ok(None);
        };
        match self.launch_sum(&ops, (call, on_device), routed, host) {
            Ok(sums) => Ok(Some(sums)),
            Err(error) => {
                self.failed = Some(error);
                Ok(None)
            }
        }
    }

    fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> larder_model::Result<()> {
        let failed = self.failed.take();
        // Waits also after an error: some kernels may be in flight.
        let outputs = self.download.fetch(self.outputs.at(), 4 * self.places.len() * self.hidden);
        if let Some(e) = failed {
            return Err(e.into());
        }
        let outputs: &[f32] = bytemuck::cast_slice(outputs?);
        for (place, output) in self.places.iter().zip(outputs.chunks_exact(self.hidden)) {
            put(*place as usize, output);
        }
        let hits: Vec<(u32, u64)> = self.hits.outputs(self.hidden).collect();
        for (place, at) in hits {
            put(place as usize, bytemuck::cast_slice(self.download.fetch(at, 4 * self.hidden)?));
        }
        Ok(())
    }
}

/// The size of a group: number of experts, their bytes, and the average number of tokens per expert.
#[derive(Clone, Copy)]
struct Size {
    experts: usize,
    bytes: usize,
    tokens: usize,
}

impl Size {
    fn of(group: &ExpertBatch) -> Self {
        let experts = group.experts.len();
        Size { experts, bytes: experts * group.layout.bytes, tokens: group.picks.len().div_ceil(experts.max(1)) }
    }

    /// Whether two groups take about the same time per byte.
    fn is_similar(self, other: Size) -> bool {
        let experts = self.experts <= 2 * other.experts && other.experts <= 2 * self.experts;
        experts && self.tokens.max(1).ilog2() == other.tokens.max(1).ilog2()
    }
}

/// One group of this number is timed, as an event has launches submitted that could have been collected. It is odd, so
/// that of a layer's hits and the experts that are brought both have their turn.
const TIMED_OF: u64 = 7;

/// Estimates how long a group takes, from the time of an earlier one.
struct Clock {
    begin: StreamEvent,
    end: StreamEvent,
    running: Option<Size>,
    /// Groups so far.
    groups: u64,
}

impl Clock {
    /// Submits a group. The time is that of the kernels alone, without the copy of their lists.
    fn time(&mut self, experts: &mut ExpertKernels, group: &ExpertBatch) -> Result<Option<Duration>> {
        let size = Size::of(group);
        experts.send(group)?;
        self.groups += 1;
        if self.groups % TIMED_OF != 1 {
            experts.compute(group)?;
            return Ok(None);
        }
        let took = self.begin(size)?;
        experts.compute(group)?;
        self.end(size)?;
        Ok(took)
    }

    /// Starts timing a group unless another is being timed. Returns an estimate for this group if the group timed
    /// before was of similar size.
    fn begin(&mut self, size: Size) -> Result<Option<Duration>> {
        let Some(before) = self.running else {
            self.begin.record(Stream::Compute)?;
            return Ok(None);
        };
        if !self.end.is_complete()? {
            return Ok(None);
        }
        self.running = None;
        let took = self.end.since(&self.begin)?;
        self.begin.record(Stream::Compute)?;
        let similar = before.is_similar(size) && before.bytes > 0;
        Ok(similar.then(|| took.mul_f64(size.bytes as f64 / before.bytes as f64)))
    }

    /// Records the end of the group if it is being timed.
    fn end(&mut self, size: Size) -> Result<()> {
        if self.running.is_none() {
            self.end.record(Stream::Compute)?;
            self.running = Some(size);
        }
        Ok(())
    }
}
