//! Computes experts in a GPU's slots.

use std::sync::Arc;
use std::time::Duration;

use larder_core::{ExpertId, ExpertLayout, Gate, NumberFormat};
use larder_kernels::Inputs;
use larder_model::{Activation, DeviceExperts, MoeCall, Routed};

use crate::arena_sync::ArenaSync;
use crate::driver::{Driver, Stream};
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES, DeviceActivations, ExpertBatch, ExpertKernels};
use crate::memory::{DeviceBuffer, Download, StreamEvent, Upload};

/// A layer's experts, computed in the slots where they are.
pub struct GpuExperts {
    sync: Arc<ArenaSync>,
    experts: ExpertKernels,
    /// `[tokens, hidden]`, or `[tokens · k, hidden]` where the routing weight scales the input.
    inputs: Inputs,
    scaled: Vec<f32>,
    upload: Upload,
    x: DeviceActivations,
    hidden: usize,
    /// `[places, hidden]`, in the order computed.
    outputs: DeviceBuffer,
    download: Download,
    /// The places `token · k + rank` that were computed since the call began.
    places: Vec<u32>,
    /// Of each place of the group at hand, its row in the inputs.
    picks: Vec<u32>,
    /// Of each expert of the group at hand, where it is, and for how many tokens.
    group: Vec<(u64, usize)>,
    clock: Clock,
    /// What went wrong since the call began.
    failed: Option<GpuError>,
}

impl GpuExperts {
    pub(crate) fn new(driver: &Arc<dyn Driver>, sync: Arc<ArenaSync>) -> Result<Self> {
        Ok(GpuExperts {
            sync,
            experts: ExpertKernels::new(driver)?,
            inputs: Inputs::new(),
            scaled: Vec::new(),
            upload: Upload::new(driver)?,
            x: DeviceActivations::default(),
            hidden: 0,
            outputs: DeviceBuffer::new(driver),
            download: Download::new(driver)?,
            places: Vec::new(),
            picks: Vec::new(),
            group: Vec::new(),
            clock: Clock { begin: StreamEvent::new(driver)?, end: StreamEvent::new(driver)?, running: None },
            failed: None,
        })
    }

    /// Takes all the memory that calls with so many tokens will need.
    fn reserve(&mut self, layout: &ExpertLayout, gate: &Gate, tokens: usize) -> Result<()> {
        let (places, hidden) = (tokens * gate.top_k, layout.gate.cols);
        let rows = if gate.scales_input { places } else { tokens };
        self.upload.begin(rows * hidden * size_of::<f32>() + rows * hidden / BLOCK * BLOCK_BYTES)?;
        self.outputs.ensure(places * hidden * size_of::<f32>())?;
        self.download.reserve(places * hidden * size_of::<f32>())?;
        self.experts.reserve(layout, places.min(gate.experts), places)
    }

    fn take_inputs(&mut self, call: &MoeCall, routed: &Routed, layout: &ExpertLayout) -> Result<()> {
        self.hidden = call.x.len() / call.tokens;
        self.places.clear();
        let quantise = !layout.gate.kind.is_float() || !layout.up.kind.is_float();
        let widely = layout.gate.kind.is_float() || layout.up.kind.is_float();
        let mut x = call.x;
        if call.gate.scales_input {
            self.scaled.clear();
            for (row, weights) in x.chunks_exact(self.hidden).zip(routed.weights.chunks_exact(call.gate.top_k)) {
                weights.iter().for_each(|weight| self.scaled.extend(row.iter().map(|v| v * weight)));
            }
            x = &self.scaled;
        }
        self.inputs.fill(x, self.hidden, quantise);
        self.x = DeviceActivations::send(&mut self.upload, &self.inputs, widely)?;
        self.outputs.ensure(4 * routed.ids.len() * self.hidden)
    }

    fn begin_group(
        &mut self,
        call: &MoeCall,
        routed: &Routed,
        layout: &ExpertLayout,
        group: &[(ExpertId, usize)],
    ) -> Result<Option<Duration>> {
        let done = self.places.len();
        self.find_places(call, routed, group);
        let out = self.outputs.at() + (4 * done * self.hidden) as u64;
        let (experts, picks) = (&self.group, &self.picks);
        let begun =
            self.clock.time(&mut self.experts, &ExpertBatch { layout, act: call.act, experts, picks, x: self.x, out });
        // Also after an error: some of it may be under way.
        self.sync.computes(group.iter().map(|(_, slot)| *slot))?;
        begun
    }

    /// Notes the places of each expert, one expert after the other.
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

impl DeviceExperts for GpuExperts {
    fn prepare(
        &mut self,
        layout: &ExpertLayout,
        _: Activation,
        gate: &Gate,
        tokens: usize,
    ) -> larder_model::Result<()> {
        let odd = layout.bias.iter().flatten().find(|bias| bias.kind != NumberFormat::F32);
        if let Some(bias) = odd {
            let what = format!("biases of experts are {} here, and the GPU has kernels for f32 alone", bias.kind);
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

    fn finish(&mut self, put: &mut dyn FnMut(usize, &[f32])) -> larder_model::Result<()> {
        let failed = self.failed.take();
        // Waits also after an error, as some of it may be under way.
        let outputs = self.download.fetch(self.outputs.at(), 4 * self.places.len() * self.hidden);
        if let Some(e) = failed {
            return Err(e.into());
        }
        let outputs: &[f32] = bytemuck::cast_slice(outputs?);
        for (place, output) in self.places.iter().zip(outputs.chunks_exact(self.hidden)) {
            put(*place as usize, output);
        }
        Ok(())
    }
}

/// How much there is to compute: experts and their bytes, and tokens of each on average.
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

    /// Whether one takes about as long for its bytes as the other.
    fn is_like(self, other: Size) -> bool {
        let experts = self.experts <= 2 * other.experts && other.experts <= 2 * self.experts;
        experts && self.tokens.max(1).ilog2() == other.tokens.max(1).ilog2()
    }
}

/// Says how long a group takes, from one that was computed before.
struct Clock {
    begin: StreamEvent,
    end: StreamEvent,
    running: Option<Size>,
}

impl Clock {
    /// Begins to compute a group. The time is that of kernels alone, without the lists that they wait for.
    fn time(&mut self, experts: &mut ExpertKernels, group: &ExpertBatch) -> Result<Option<Duration>> {
        let (lists, size) = (experts.send(group)?, Size::of(group));
        let took = self.begin(size)?;
        experts.compute(group, &lists)?;
        self.end(size)?;
        Ok(took)
    }

    /// Begins to time a group unless another is being timed. What was timed before says how long this one takes, if it
    /// was alike.
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
        let alike = before.is_like(size) && before.bytes > 0;
        Ok(alike.then(|| took.mul_f64(size.bytes as f64 / before.bytes as f64)))
    }

    /// The group is through.
    fn end(&mut self, size: Size) -> Result<()> {
        if self.running.is_none() {
            self.end.record(Stream::Compute)?;
            self.running = Some(size);
        }
        Ok(())
    }
}
