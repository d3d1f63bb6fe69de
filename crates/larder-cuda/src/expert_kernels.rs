//! Computing experts: gate and up in one launch, what is between, down in another, whatever their number.

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

/// Values that share a scale.
pub const BLOCK: usize = 32;
/// The length of a block of activations.
pub const BLOCK_BYTES: usize = 48;
/// Groups whose lists can be on their way to the device at once.
const UPLOADS: usize = 4;

/// Where activations are on the device, in each form that some weights take.
#[derive(Clone, Copy, Default, Debug)]
pub struct DeviceActivations {
    /// `[tokens, cols]`
    pub values: u64,
    /// `[tokens, cols / 32]`
    pub blocks: u64,
}

impl DeviceActivations {
    /// Copies inputs to the device: the blocks, if there are any, and the values if they are wanted.
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

    /// As weights of this part take them.
    pub fn for_part(&self, part: &ExpertPart) -> u64 {
        if part.kind.is_float() { self.values } else { self.blocks }
    }
}

/// Experts to be computed together.
pub struct ExpertBatch<'a> {
    /// Of each of them.
    pub layout: &'a ExpertLayout,
    /// Of each of them.
    pub act: Activation,
    /// Where each begins on the device, and how many tokens it has.
    pub experts: &'a [(u64, usize)],
    /// Of each token of each expert, one expert after the other, its row in the inputs.
    pub picks: &'a [u32],
    /// `[any, hidden]`
    pub x: DeviceActivations,
    /// `[tokens of all experts, hidden]`
    pub out: u64,
}

/// What computing takes on the device. Its buffers grow and stay.
pub struct ExpertKernels {
    launches: Launches,
    uploads: VecDeque<Upload>,
    lists: Lists,
    /// `[tokens of all experts, inter]`, as are the other two.
    gate: DeviceBuffer,
    up: DeviceBuffer,
    /// The gate as blocks.
    blocks: DeviceBuffer,
}

impl ExpertKernels {
    /// Without buffers yet.
    pub fn new(driver: &Arc<dyn Driver>) -> Result<Self> {
        let room = || DeviceBuffer::new(driver);
        Ok(ExpertKernels {
            launches: Launches::new(driver),
            uploads: (0..UPLOADS).map(|_| Upload::new(driver)).collect::<Result<_>>()?,
            lists: Lists::default(),
            gate: room(),
            up: room(),
            blocks: room(),
        })
    }

    /// Takes the memory for groups of so many experts with so many tokens together.
    pub fn reserve(&mut self, layout: &ExpertLayout, experts: usize, tokens: usize) -> Result<()> {
        for upload in &mut self.uploads {
            upload.begin(Lists::bytes(experts, tokens))?;
        }
        self.make_room(layout, tokens)
    }

    /// For what is between the products.
    fn make_room(&mut self, layout: &ExpertLayout, tokens: usize) -> Result<()> {
        let values = tokens * layout.gate.rows;
        self.gate.ensure(4 * values)?;
        self.up.ensure(4 * values)?;
        self.blocks.ensure(if layout.down.kind.is_float() { 0 } else { values / BLOCK * BLOCK_BYTES })
    }

    /// Brings a group's lists to the device, behind which it can be computed.
    pub fn send(&mut self, group: &ExpertBatch) -> Result<Addresses> {
        self.make_room(group.layout, group.picks.len())?;
        let activations = DeviceActivations { values: self.gate.at(), blocks: self.blocks.at() };
        let between = Intermediates { gate: self.gate.at(), up: self.up.at(), activations };
        let upload = self.uploads.front_mut().expect("there are some");
        let at = self.lists.send(group, &between, upload)?;
        self.uploads.rotate_left(1);
        Ok(at)
    }

    /// Begins to compute the group whose lists were sent last.
    pub fn compute(&self, group: &ExpertBatch, at: &Addresses) -> Result<()> {
        let ExpertBatch { layout: ExpertLayout { gate, up, down, bias, .. }, act, experts, picks, .. } = *group;
        let (count, experts) = (word(picks.len() * gate.rows)?, word(experts.len())?);
        if count == 0 {
            return Ok(());
        }
        let ExpertKernels { launches, lists, .. } = self;
        let most = group.experts.iter().map(|(_, tokens)| *tokens).max().unwrap_or(0);
        launches.products(&lists.gate, at.gate)?;
        if up.kind != gate.kind {
            launches.products(&lists.up, at.up)?;
        }
        if bias.is_some() {
            launches.add_biases(at.biases, 2 * experts, word(most * gate.rows)?)?;
        }
        launches.combine(act, self.gate.at(), self.up.at(), count)?;
        if !down.kind.is_float() {
            launches.quantise(self.gate.at(), self.blocks.at(), count / BLOCK as u32)?;
        }
        launches.products(&lists.down, at.down)?;
        if bias.is_some() {
            launches.add_biases(at.down_biases, experts, word(most * down.rows)?)?;
        }
        Ok(())
    }
}
