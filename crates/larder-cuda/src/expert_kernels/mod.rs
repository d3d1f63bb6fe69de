//! Launches of expert kernels: gate and up in one, the activation function, down in another, for any number of experts.

mod lists;

use std::collections::VecDeque;
use std::sync::Arc;

use larder_core::{ExpertLayout, ExpertPart};
use larder_kernels::Inputs;
use larder_model::Activation;

use crate::driver::Driver;
use crate::error::Result;
use crate::launches::{Launches, word};
use crate::memory::{DeviceBuffer, Upload};
use lists::{Addresses, Intermediates, Lists};

/// Activations that share a scale.
pub const BLOCK: usize = 32;
/// Size in bytes of a block of activations.
pub const BLOCK_BYTES: usize = 48;
/// Groups whose lists can be in flight to the device at once.
const UPLOADS: usize = 4;

/// Addresses of activations on the device, as floats and quantised.
#[derive(Clone, Copy, Default, Debug)]
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
    launches: Launches,
    uploads: VecDeque<Upload>,
    lists: Lists,
    /// `[tokens of all experts, inter]`, as are `up` and `blocks`.
    gate: DeviceBuffer,
    up: DeviceBuffer,
    /// The combined gate and up, quantised.
    blocks: DeviceBuffer,
}

impl ExpertKernels {
    /// Without buffers.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let buffer = || DeviceBuffer::new(driver);
        Ok(ExpertKernels {
            launches: Launches::new(driver),
            uploads: (0..UPLOADS).map(|_| Upload::new(driver)).collect::<Result<_>>()?,
            lists: Lists::default(),
            gate: buffer(),
            up: buffer(),
            blocks: buffer(),
        })
    }

    /// Allocates memory for groups of up to `experts` experts with `tokens` tokens in all.
    pub fn reserve(&mut self, layout: &ExpertLayout, experts: usize, tokens: usize) -> Result<()> {
        for upload in &mut self.uploads {
            upload.begin(Lists::bytes(experts, tokens))?;
        }
        self.reserve_intermediates(layout, tokens)
    }

    /// Allocates memory for the results of gate and up.
    fn reserve_intermediates(&mut self, layout: &ExpertLayout, tokens: usize) -> Result<()> {
        let values = tokens * layout.up.rows;
        self.gate.ensure(4 * values)?;
        self.up.ensure(4 * values)?;
        self.blocks.ensure(if layout.down.kind.is_float() { 0 } else { values / BLOCK * BLOCK_BYTES })
    }

    /// Copies the lists of a group to the device; [`compute`](Self::compute) can follow.
    pub fn send(&mut self, group: &ExpertBatch) -> Result<Addresses> {
        self.reserve_intermediates(group.layout, group.picks.len())?;
        let activations = DeviceActivations { values: self.gate.at(), blocks: self.blocks.at() };
        let between = Intermediates { gate: self.gate.at(), up: self.up.at(), activations };
        let upload = self.uploads.front_mut().expect("there are several uploads");
        let at = self.lists.send(group, &between, upload)?;
        self.uploads.rotate_left(1);
        Ok(at)
    }

    /// Launches the kernels of the group whose lists were sent last.
    pub fn compute(&self, group: &ExpertBatch, at: &Addresses) -> Result<()> {
        let ExpertBatch { layout: ExpertLayout { gate, up, down, bias, .. }, act, experts, picks, .. } = group;
        let (count, experts) = (word(picks.len() * up.rows)?, word(experts.len())?);
        if count == 0 {
            return Ok(());
        }
        let ExpertKernels { launches, lists, .. } = self;
        let max_tokens = group.experts.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0);
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
                let blocks = if down.kind.is_float() { 0 } else { self.blocks.at() };
                launches.combine(*act, [self.gate.at(), self.up.at(), blocks], count)?;
            }
            None => {
                launches.apply(*act, self.gate.at(), count)?;
                if !down.kind.is_float() {
                    launches.quantise(self.gate.at(), self.blocks.at(), count / BLOCK as u32)?;
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
