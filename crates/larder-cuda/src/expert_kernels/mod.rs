//! Launches of expert kernels: gate and up in one, the activation function, down in another, for any number of experts.

mod lists;

use std::sync::Arc;

use larder_core::{ExpertLayout, ExpertPart};
use larder_kernels::Inputs;
use larder_model::Activation;

use crate::driver::Driver;
use crate::error::Result;
use crate::launch_queue::LaunchQueue;
use crate::launches::{Launches, word};
use crate::memory::{DeviceBuffer, Upload};
pub use lists::GroupLists;
use lists::Intermediates;

/// Activations that share a scale.
pub const BLOCK: usize = 32;
/// Size in bytes of a block of activations.
pub const BLOCK_BYTES: usize = 64;
/// Addresses of activations on the device, as floats and quantised.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct DeviceActivations {
    /// `[tokens, cols]`
    pub values: u64,
    /// `[tokens, cols / 32]`
    pub blocks: u64,
}

impl DeviceActivations {
    /// Copies inputs to the device: the blocks if there are any, and the values if `values` is set.
    pub fn send(upload: &mut Upload, inputs: &Inputs, values: bool) -> Result<Self> {
        let values: &[u8] = if values { bytemuck::cast_slice(inputs.all_values()) } else { &[] };
        let blocks = inputs.all_blocks();
        let (base, bytes) = upload.begin(blocks.len() + values.len())?;
        let (front, back) = bytes.split_at_mut(blocks.len());
        front.copy_from_slice(blocks);
        back.copy_from_slice(values);
        upload.send()?;
        Ok(DeviceActivations { blocks: base, values: base + blocks.len() as u64 })
    }

    /// The address of the form that the weights of this part take.
    pub fn for_part(&self, part: &ExpertPart) -> u64 {
        if part.kind.is_float() { self.values } else { self.blocks }
    }
}

/// Experts that are computed together.
pub struct ExpertBatch<'a> {
    /// The layout of every expert.
    pub layout: &'a ExpertLayout,
    /// The activation function of every expert.
    pub act: Activation,
    /// By expert: its address on the device and its number of tokens.
    pub experts: &'a [(u64, usize)],
    /// By token of each expert, one expert after another: its row in the inputs.
    pub picks: &'a [u32],
    /// `[any, hidden]`
    pub x: DeviceActivations,
    /// `[tokens of all experts, hidden]`
    pub out: u64,
}

/// Launches the kernels of experts. Its buffers grow and are kept.
pub struct ExpertKernels {
    queue: Arc<LaunchQueue>,
    launches: Launches,
    /// Of the group that was sent last.
    lists: GroupLists,
    /// `[tokens of all experts, inter]`, as are `up` and `blocks`.
    gate: DeviceBuffer,
    up: DeviceBuffer,
    /// The combined gate and up, quantised.
    blocks: DeviceBuffer,
}

impl ExpertKernels {
    /// Without buffers.
    pub fn new(queue: &Arc<LaunchQueue>) -> Self {
        let driver: &Arc<dyn Driver> = &(queue.clone() as _);
        let buffer = || DeviceBuffer::new(driver);
        ExpertKernels {
            queue: queue.clone(),
            launches: Launches::new(driver),
            lists: GroupLists::default(),
            gate: buffer(),
            up: buffer(),
            blocks: buffer(),
        }
    }

    /// Allocates memory for the results of gate and up, for groups with up to `tokens` tokens in all.
    pub fn reserve(&mut self, layout: &ExpertLayout, tokens: usize) -> Result<()> {
        let values = tokens * layout.up.rows;
        self.gate.ensure(4 * values)?;
        self.up.ensure(4 * values)?;
        self.blocks.ensure(if layout.down.kind.is_float() { 0 } else { values / BLOCK * BLOCK_BYTES })
    }

    /// Stages the lists of a group; [`compute`](Self::compute) can follow.
    pub fn send(&mut self, group: &ExpertBatch) -> Result<()> {
        self.reserve(group.layout, group.picks.len())?;
        let between = self.between();
        let ExpertKernels { queue, lists, .. } = self;
        queue
            .stage_varying(ExpertKernels::list_bytes(group), |base, bytes| lists.write(group, between, base, bytes))?;
        Ok(())
    }

    /// An upper bound of the bytes of the lists of a group.
    pub fn list_bytes(group: &ExpertBatch) -> usize {
        GroupLists::bytes(group.experts.len(), group.picks.len())
    }

    /// Writes the lists of a group, which the caller keeps and copies to address `base`. Memory was
    /// [reserved](Self::reserve) for it.
    pub fn write(&self, group: &ExpertBatch, base: u64, bytes: &mut [u8]) -> Result<GroupLists> {
        let mut lists = GroupLists::default();
        lists.write(group, self.between(), base, bytes)?;
        Ok(lists)
    }

    fn between(&self) -> Intermediates {
        let activations = DeviceActivations { values: self.gate.at(), blocks: self.blocks.at() };
        Intermediates { gate: self.gate.at(), up: self.up.at(), activations }
    }

    /// Launches the kernels of the group whose lists were sent last.
    pub fn compute(&self, group: &ExpertBatch) -> Result<()> {
        self.launch(&self.lists, group.layout, group.act)
    }

    /// Launches the kernels of a group with these lists.
    pub fn launch(&self, lists: &GroupLists, layout: &ExpertLayout, act: Activation) -> Result<()> {
        let ExpertLayout { gate, up, down, bias, .. } = layout;
        let GroupLists { at, between, tokens, max_tokens, .. } = lists;
        let (count, experts) = (word(tokens * up.rows)?, word(lists.experts)?);
        if count == 0 {
            return Ok(());
        }
        let launches = &self.launches;
        launches.products(&lists.gate, at.gate)?;
        if gate.as_ref().is_some_and(|gate| gate.kind != up.kind) {
            launches.products(&lists.up, at.up)?;
        }
        if bias.is_some() {
            let per_expert = if gate.is_some() { 2 } else { 1 };
            launches.add_biases(at.biases, per_expert * experts, word(max_tokens * up.rows)?)?;
        }
        match gate {
            Some(_) => {
                let blocks = if down.kind.is_float() { 0 } else { between.activations.blocks };
                launches.combine(act, [between.gate, between.up, blocks], count)?;
            }
            None => {
                launches.apply(act, between.gate, count)?;
                if !down.kind.is_float() {
                    launches.quantise(between.gate, between.activations.blocks, count / BLOCK as u32)?;
                }
            }
        }
        launches.products(&lists.down, at.down)?;
        if bias.is_some() {
            launches.add_biases(at.down_biases, experts, word(max_tokens * down.rows)?)?;
        }
        Ok(())
    }
}
