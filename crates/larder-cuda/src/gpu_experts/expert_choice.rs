//! Experts that are chosen on the device: a kernel writes the addresses of the chosen ones, and their rows, into lists
//! that are there already.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use larder_core::{ExpertId, ExpertLayout, Gate, LayerIdx, Score, Weighting};
use larder_model::{CHOICE_TOKENS, ChosenOnDevice, DeviceMoeCall, HashRouting, Rows};

use super::gate::KernelGate;
use super::hits::BegunHits;
use super::list_memory::ListMemory;
use crate::arena_sync::ArenaSync;
use crate::driver::Driver;
use crate::error::{GpuError, Result};
use crate::expert_kernels::{BLOCK, BLOCK_BYTES, DeviceActivations, ExpertBatch, ExpertKernels, GroupLists};
use crate::launches::{ChoiceArgs, ExpertList, ExpertTerm, Launches, word};
use crate::memory::{DeviceBuffer, PinnedBuffer};
use crate::ops::{GpuOps, Staging};

/// Chooses the experts of whole layers, and begins them.
pub struct DeviceChooser {
    driver: Arc<dyn Driver>,
    sync: Arc<ArenaSync>,
    launches: Launches,
    kernels: ExpertKernels,
    /// `[places, hidden]`
    outputs: DeviceBuffer,
    /// Scores of the choice, for each token; and by place the experts that are grouped, where those are more than a
    /// block has memory for.
    scratch: [DeviceBuffer; 2],
    /// `[places, hidden]`, where weights scale inputs; and quantised.
    scaled: [DeviceBuffer; 2],
    layers: HashMap<LayerIdx, ChosenLayer>,
    layouts: Vec<ExpertLayout>,
    /// Memory of lists and of arguments.
    memory: ListMemory,
    lists: HashMap<ListKey, ChoiceLists>,
    /// The addresses of arguments of choices, which have addresses of lists.
    args: HashMap<ArgsKey, u64>,
    /// The calls of steps that were not counted, oldest first.
    steps: VecDeque<StepChoices>,
    /// Failures of launches until the lists were written.
    failures: u64,
}

/// The calls of a step in which the device chose.
#[derive(Default)]
struct StepChoices {
    /// Layers and their tokens.
    calls: Vec<(LayerIdx, usize)>,
    /// The buffer that has the choices.
    buffer: usize,
}

/// What the choices of a layer share.
struct ChosenLayer {
    /// `[experts]`: the address of each, or 0, as the device knows them.
    addresses: Vec<u64>,
    table: DeviceBuffer,
    /// The slots of all experts, where these are the addresses.
    whole: Option<Arc<[usize]>>,
    bias: Option<DeviceBuffer>,
    scales: Option<DeviceBuffer>,
    /// `[tokens, k]`: the experts of a call, where they are known.
    known: Option<DeviceBuffer>,
    /// `[tokens, k]`, which the device writes; the second, in a step that begins before the one before is complete.
    chosen: [PinnedBuffer; 2],
    /// `[tokens, k]`: what the host chose in the last call in which both did, and the buffer of the device's choice.
    of_host: (Vec<ExpertId>, usize),
    k: usize,
}

/// The key of lists. Kernels run in order, so that the next layer can have the same lists. Results of a chain are at
/// the same addresses in every other layer of a kind.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ListKey {
    /// The number of the layout.
    layout: usize,
    pub tokens: usize,
    pub k: usize,
    /// Entries of each list: the most experts.
    pub entries: usize,
    x: DeviceActivations,
    /// Whether weights scale the inputs.
    scales_input: bool,
}

/// The key of the arguments of a choice.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct ArgsKey {
    layer: LayerIdx,
    logits: u64,
    /// The buffer of the choices.
    buffer: usize,
    lists: ListKey,
}

/// The lists of a call, on the device.
struct ChoiceLists {
    experts: GroupLists,
    /// Of the lists that the choice writes, and their number.
    by_expert: (u64, usize),
    /// Of the terms of sums, which the choice writes.
    terms: u64,
    /// By row: its row in the inputs, which the choice writes.
    picks: u64,
}

impl DeviceChooser {
    pub fn new(driver: &Arc<dyn Driver>, sync: Arc<ArenaSync>, kernels: ExpertKernels) -> Self {
        let buffer = || DeviceBuffer::new(driver);
        DeviceChooser {
            driver: driver.clone(),
            sync,
            launches: Launches::new(driver),
            kernels,
            outputs: buffer(),
            scratch: [buffer(), buffer()],
            scaled: [buffer(), buffer()],
            layers: HashMap::new(),
            layouts: Vec::new(),
            memory: ListMemory::new(driver),
            lists: HashMap::new(),
            args: HashMap::new(),
            steps: VecDeque::new(),
            failures: 0,
        }
    }

    /// Whether it chooses the experts of `tokens` tokens by this gate.
    pub fn chooses(gate: &Gate, tokens: usize) -> bool {
        tokens <= CHOICE_TOKENS && KernelGate::of(gate).is_some()
    }

    /// Allocates the memory of the largest calls.
    pub fn reserve(&mut self, layout: &ExpertLayout, gate: &Gate) -> Result<()> {
        let Some(of_gate) = KernelGate::of(gate) else { return Ok(()) };
        // These have the addresses of the buffers.
        self.clear_lists();
        let places = CHOICE_TOKENS * gate.top_k;
        self.outputs.ensure(4 * places * layout.down.rows)?;
        self.scratch[0].ensure(4 * CHOICE_TOKENS * of_gate.scratch(gate))?;
        self.scratch[1].ensure(2 * 4 * places)?;
        if gate.scales_input {
            let values = places * layout.up.cols;
            let blocks = if layout.quantises_input() { values / BLOCK * BLOCK_BYTES } else { 0 };
            self.scaled[0].ensure(4 * values)?;
            self.scaled[1].ensure(blocks)?;
        }
        self.kernels.reserve(layout, places)
    }

    /// A step begins, while `in_flight` before it, at most one, are not complete; calls of others were not counted
    /// because they failed.
    pub fn step_begins(&mut self, in_flight: usize) {
        self.steps.drain(..self.steps.len().saturating_sub(in_flight));
        let buffer = self.steps.back().map_or(0, |before| 1 - before.buffer);
        self.steps.push_back(StepChoices { calls: Vec::new(), buffer });
    }

    /// The step that began last.
    fn step(&mut self) -> &mut StepChoices {
        if self.steps.is_empty() {
            self.step_begins(0);
        }
        self.steps.back_mut().expect("a step has begun")
    }

    /// Begins the choice, the experts and their sums. The layer has all of its experts in `slots`.
    pub fn begin(
        &mut self,
        call: &DeviceMoeCall,
        layout: &ExpertLayout,
        slots: &Arc<[usize]>,
        ops: &GpuOps,
    ) -> Result<Rows> {
        let DeviceMoeCall { layer, gate, logits, on_device, .. } = *call;
        let tokens = logits.rows;
        self.know(call, ops)?;
        self.check(layer)?;
        if !self.layers[&layer].whole.as_ref().is_some_and(|whole| Arc::ptr_eq(whole, slots)) {
            self.set_slots(layer, slots.iter().map(|slot| self.sync.address(*slot)).collect(), ops)?;
            self.layer(layer).whole = Some(slots.clone());
        }
        self.set_known(call, ops)?;
        let key = self.args_of(call, layout, ops)?;
        let begun = self.launch(&key, call, layout);
        // Also after an error: some kernels may be in flight.
        self.sync.record_compute(slots.iter().copied())?;
        begun?;
        self.step().calls.push((layer, tokens));
        let terms = self.lists[&key.lists].terms;
        ops.begin_sum(terms, gate.top_k, [tokens, layout.down.rows], [on_device.shared, on_device.residual])
    }

    /// Begins the choice, and the chosen experts that are in `slots`; the host begins the others when it knows the
    /// choice.
    pub fn begin_hits(
        &mut self,
        call: &DeviceMoeCall,
        layout: &ExpertLayout,
        slots: &[Option<usize>],
        ops: &GpuOps,
    ) -> Result<BegunHits> {
        self.know(call, ops)?;
        self.check(call.layer)?;
        let addresses = slots.iter().map(|slot| slot.map_or(0, |slot| self.sync.address(slot))).collect();
        self.set_slots(call.layer, addresses, ops)?;
        self.set_known(call, ops)?;
        let key = self.args_of(call, layout, ops)?;
        let begun = self.launch(&key, call, layout);
        // Also after an error: some kernels may be in flight.
        let candidates = self.sync.record_candidates(slots.iter().flatten().copied())?;
        begun?;
        let (layer, x, outputs) = (call.layer, call.on_device.x, self.outputs.at());
        Ok(BegunHits { layer, x, slots: slots.to_vec(), candidates, outputs })
    }

    /// The host has chosen these experts for the call of a layer whose hits were begun.
    pub fn host_chose(&mut self, layer: LayerIdx, ids: &[ExpertId]) {
        let buffer = self.step().buffer;
        if let Some(known) = self.layers.get_mut(&layer) {
            known.of_host = (ids.to_vec(), buffer);
        }
    }

    /// Compares the choices of the call before, which is complete: outputs are those of the device's choice, weights
    /// those of the host's.
    fn check(&mut self, layer: LayerIdx) -> Result<()> {
        let ChosenLayer { chosen, of_host, .. } = self.layer(layer);
        let (of_host, buffer) = std::mem::take(of_host);
        let device: &[u32] = bytemuck::cast_slice(&chosen[buffer][..size_of::<u32>() * of_host.len()]);
        let same = device.iter().zip(&of_host).all(|(device, host)| *device == u32::from(host.0));
        if same {
            Ok(())
        } else {
            Err(GpuError::failed(format!("choosing experts of {layer}"), "the GPU and the CPU chose others"))
        }
    }

    /// The arguments of a call's choice and its lists, which are written if they are not there.
    fn args_of(&mut self, call: &DeviceMoeCall, layout: &ExpertLayout, ops: &GpuOps) -> Result<ArgsKey> {
        let DeviceMoeCall { layer, gate, .. } = *call;
        let x = ops.activations(call.on_device.x, layout.quantises_input() && !gate.scales_input)?;
        let (logits, buffer) = (ops.address(call.logits)?, self.step().buffer);
        let layout_number = self.layouts.iter().position(|known| known == layout).unwrap_or_else(|| {
            self.layouts.push(layout.clone());
            self.layouts.len() - 1
        });
        let (tokens, k, scales_input) = (call.logits.rows, gate.top_k, gate.scales_input);
        let entries = (tokens * k).min(gate.experts);
        let lists = ListKey { layout: layout_number, tokens, k, entries, x, scales_input };
        let key = ArgsKey { layer, logits, buffer, lists };
        if self.args.contains_key(&key) {
            return Ok(key);
        }
        let lists_bytes = if self.lists.contains_key(&lists) { 0 } else { ListMemory::bytes_of(&lists) };
        if !self.memory.has_room(lists_bytes + ListMemory::ARGS_BYTES) {
            self.clear_lists();
        }
        if !self.lists.contains_key(&lists) {
            let written = self.write_lists(&lists, call, layout, ops)?;
            self.lists.insert(lists, written);
        }
        let args = self.choice_args(&key, call, layout)?.to_bytes();
        let at = self.memory.take(args.len())?;
        ops.fill_at(at, &args, Staging::Varying)?;
        self.args.insert(key, at);
        Ok(key)
    }

    /// Forgets all lists, and the arguments that have their addresses. Others are written to their memory by launches
    /// behind those that read them.
    fn clear_lists(&mut self) {
        self.args.clear();
        self.lists.clear();
        self.memory.begin();
    }

    fn launch(&self, key: &ArgsKey, call: &DeviceMoeCall, layout: &ExpertLayout) -> Result<()> {
        let ListKey { tokens, k, x, .. } = key.lists;
        self.launches.choose_experts(self.args[key], word(tokens)?)?;
        if call.gate.scales_input {
            let of_gate = KernelGate::of(call.gate).expect("the caller has asked");
            let weights = self.scratch[0].at() + 4 * of_gate.weights_at(call.gate) as u64;
            let blocks = if layout.quantises_input() { self.scaled[1].at() } else { 0 };
            let [tokens, k, width, step] = [tokens, k, layout.up.cols, of_gate.scratch(call.gate)].map(word);
            let addresses = [x.values, weights, self.scaled[0].at(), blocks];
            self.launches.scale_inputs(addresses, [tokens?, k?, width?, step?])?;
        }
        self.kernels.launch(&self.lists[&key.lists].experts, layout, call.act)
    }

    /// The experts of the calls of the oldest step that was not counted, which is complete.
    pub fn take(&mut self) -> Vec<ChosenOnDevice> {
        let Some(StepChoices { calls, buffer }) = self.steps.pop_front() else { return Vec::new() };
        let chosen = |(layer, tokens): (LayerIdx, usize)| {
            let ChosenLayer { chosen, k, whole, .. } = self.layers.get(&layer)?;
            let experts: &[u32] = bytemuck::cast_slice(&chosen[buffer][..4 * tokens * k]);
            let experts = experts.iter().map(|id| ExpertId(*id as u16)).collect();
            Some(ChosenOnDevice { layer, experts, slots: whole.clone()? })
        };
        calls.into_iter().filter_map(chosen).collect()
    }

    /// Makes the device know the gate of a layer.
    fn know(&mut self, call: &DeviceMoeCall, ops: &GpuOps) -> Result<()> {
        let DeviceMoeCall { layer, gate, logits, none, .. } = *call;
        let classes = gate.experts + usize::from(none.is_some());
        if logits.width != classes {
            return Err(GpuError::Unsupported(format!("{layer} has {classes} classes, and logits {logits:?}")));
        }
        // The shares of a softmax over all classes are the scores.
        let reads_shares = gate.score == Score::Raw && matches!(gate.weighting, Weighting::Score { .. });
        if none.is_some() && (!reads_shares || gate.groups.is_some()) {
            return Err(GpuError::Unsupported(format!(
                "{layer} has a class for no expert, and a gate of another kind"
            )));
        }
        let failures = ops.failures();
        if std::mem::replace(&mut self.failures, failures) != failures {
            // Copies of lists and tables to the device may have been lost. Kernels may still write to what is freed.
            self.driver.drain();
            self.clear_lists();
            self.layers.clear();
        }
        if self.layers.contains_key(&layer) {
            return Ok(());
        }
        let keep =
            |values: &Option<Vec<f32>>| values.as_ref().map(|v| ops.keep_bytes(bytemuck::cast_slice(v))).transpose();
        let chosen = || PinnedBuffer::of(&self.driver, 4 * CHOICE_TOKENS * gate.top_k);
        let addresses = vec![0; gate.experts];
        let known = ChosenLayer {
            table: ops.keep_bytes(bytemuck::cast_slice(&addresses))?,
            addresses,
            whole: None,
            bias: keep(&gate.bias)?,
            scales: keep(&gate.expert_scales)?,
            known: None,
            chosen: [chosen()?, chosen()?],
            of_host: Default::default(),
            k: gate.top_k,
        };
        self.layers.insert(layer, known);
        self.args.retain(|key, _| key.layer != layer);
        Ok(())
    }

    /// Makes the device know where the experts of a layer are, for the launches that follow.
    fn set_slots(&mut self, layer: LayerIdx, addresses: Vec<u64>, ops: &GpuOps) -> Result<()> {
        let known = self.layer(layer);
        if addresses.len() != known.addresses.len() {
            let (experts, slots) = (known.addresses.len(), addresses.len());
            return Err(GpuError::Unsupported(format!("{layer} has {experts} experts, and {slots} slots")));
        }
        if addresses != known.addresses {
            known.whole = None;
            ops.fill(&known.table, bytemuck::cast_slice(&addresses), Staging::Steady)?;
            known.addresses = addresses;
        }
        Ok(())
    }

    /// Makes the device know the experts of a call, if the host does, for the launches that follow. A layer's calls
    /// have them always, or never.
    fn set_known(&mut self, call: &DeviceMoeCall, ops: &GpuOps) -> Result<()> {
        let Some(experts) = call.known else { return Ok(()) };
        let (places, k) = (call.logits.rows * call.gate.top_k, call.gate.top_k);
        let driver = self.driver.clone();
        let known = &mut self.layer(call.layer).known;
        if known.is_none() {
            *known = Some(DeviceBuffer::of(&driver, 4 * CHOICE_TOKENS * k)?);
            self.args.retain(|key, _| key.layer != call.layer);
        }
        let known = self.layers[&call.layer].known.as_ref().expect("it was made");
        let ids = match experts {
            HashRouting::Ids(ids) => ids,
            HashRouting::OfDrawn(table) if places == k => return ops.take_row_of_drawn(table, known.at(), k),
            HashRouting::OfDrawn(_) => {
                return Err(GpuError::Unsupported(format!("{} has one drawn token for {places} places", call.layer)));
            }
        };
        let numbers: Vec<u32> = ids.iter().map(|expert| u32::from(expert.0)).collect();
        if numbers.len() != places || numbers.iter().any(|number| *number as usize >= call.gate.experts) {
            let (layer, count) = (call.layer, numbers.len());
            return Err(GpuError::Unsupported(format!("{layer} has {count} known experts for {places} places")));
        }
        ops.fill(known, bytemuck::cast_slice(&numbers), Staging::Steady)
    }

    fn layer(&mut self, layer: LayerIdx) -> &mut ChosenLayer {
        self.layers.get_mut(&layer).expect("the device knows the layer")
    }

    /// Writes the lists of calls.
    fn write_lists(
        &mut self,
        key: &ListKey,
        call: &DeviceMoeCall,
        layout: &ExpertLayout,
        ops: &GpuOps,
    ) -> Result<ChoiceLists> {
        let DeviceMoeCall { gate, act, .. } = *call;
        let (places, entries) = (key.tokens * key.k, key.entries);
        // Experts at address 0, so that the addresses of their parts are offsets. The kernel that chooses writes how
        // many rows each has; the number here only decides on the kernel of products.
        let rows = if key.tokens == 1 { 1 } else { places.div_ceil(gate.experts).max(2) };
        let [values, blocks] = self.scaled.each_ref().map(DeviceBuffer::at);
        let x = if gate.scales_input { DeviceActivations { values, blocks } } else { key.x };
        let (experts, picks, out) = (vec![(0, rows); entries], vec![0; places], self.outputs.at());
        let group = ExpertBatch { layout, act, experts: &experts, picks: &picks, x, out };
        let bytes = ExpertKernels::list_bytes(&group);
        let terms_at = bytes.next_multiple_of(16);
        let by_expert_at = terms_at + places * ExpertTerm::BYTES;
        let end = by_expert_at + GroupLists::BY_EXPERT * ExpertList::BYTES;
        let (at, mut image) = (self.memory.take(end)?, vec![0; end]);
        let experts = self.kernels.write(&group, at, &mut image[..bytes])?.with_rows(key.tokens);
        let lists = experts.by_expert(layout);
        let all = image[by_expert_at..].chunks_exact_mut(ExpertList::BYTES);
        lists.iter().zip(all).for_each(|(list, out)| out.copy_from_slice(&list.to_bytes()));
        ops.fill_at(at, &image, Staging::Varying)?;
        let [terms, by_expert] = [terms_at, by_expert_at].map(|offset| at + offset as u64);
        let picks = lists.first().map_or(0, |gate| gate.picks);
        Ok(ChoiceLists { experts, by_expert: (by_expert, lists.len()), terms, picks })
    }

    /// The arguments of a call's choice, whose lists are written.
    fn choice_args(&self, key: &ArgsKey, call: &DeviceMoeCall, layout: &ExpertLayout) -> Result<ChoiceArgs> {
        let DeviceMoeCall { gate, none, .. } = *call;
        let (of_gate, lists) = (KernelGate::of(gate).expect("the caller has asked"), &self.lists[&key.lists]);
        let layer = &self.layers[&key.layer];
        let kept = |buffer: &Option<DeviceBuffer>| buffer.as_ref().map_or(0, DeviceBuffer::at);
        let ListKey { tokens, k, scales_input, .. } = key.lists;
        Ok(ChoiceArgs {
            logits: key.logits,
            bias: kept(&layer.bias),
            scales: kept(&layer.scales),
            slots: layer.table.at(),
            scratch: self.scratch[0].at(),
            known: kept(&layer.known),
            chosen: layer.chosen[key.buffer].as_ptr() as u64,
            terms: lists.terms,
            lists: lists.by_expert.0,
            outputs: self.outputs.at(),
            places: self.scratch[1].at(),
            picks: lists.picks,
            sizes: [word(tokens)?, word(gate.experts)?, word(k)?, word(lists.by_expert.1)?],
            gate: of_gate.words(),
            classes: word(gate.experts + usize::from(none.is_some()))?,
            bias_of_none: none.unwrap_or(0.0),
            width: word(layout.down.rows)?,
            share: if scales_input { 1 } else { word(k)? },
            entries: word(key.lists.entries)?,
        })
    }
}
