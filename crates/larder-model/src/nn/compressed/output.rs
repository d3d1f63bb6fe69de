//! The output product in two steps: one for each group of heads, then one of what all groups yield.

use candle_core::{Device, Tensor};

use super::CompressedShape;
use crate::device::{DeviceOps, DeviceRows};
use crate::error::Result;
use crate::matrix::{Linear, PlacedMatrix};
use crate::weights::WeightLoader;

/// The two steps.
pub struct GroupedOutput {
    groups: Vec<PlacedMatrix>, // groups × [group_rank, heads / groups · head_dim]
    whole: Linear,             // [hidden, groups · group_rank]
    /// Values of what is mixed.
    width: usize,
}

impl GroupedOutput {
    /// `wo_a [groups · group_rank, heads / groups · head_dim]` and `wo_b [hidden, groups · group_rank]` below `prefix`
    pub fn load(weights: &mut WeightLoader, prefix: &str, shape: CompressedShape) -> Result<Self> {
        let CompressedShape { hidden, heads, head_dim, groups, group_rank, .. } = shape;
        let width = heads * head_dim;
        let name = |part: &str| format!("{prefix}.{part}");
        Ok(GroupedOutput {
            groups: weights.row_groups(&name("wo_a.weight"), groups, group_rank, width / groups)?,
            whole: weights.linear(&name("wo_b"), hidden, groups * group_rank, false)?,
            width,
        })
    }

    /// `mixed [tokens, heads · head_dim]` → `[tokens, hidden]`
    pub fn forward(&self, mixed: Vec<f32>) -> Result<Tensor> {
        let (tokens, groups) = (mixed.len() / self.width, self.groups.len());
        let mixed = Tensor::from_vec(mixed, (tokens, groups, self.width / groups), &Device::Cpu)?;
        let grouped = PlacedMatrix::forward_heads(&self.groups, &mixed)?; // [tokens, groups, group_rank]
        self.whole.forward(&grouped.reshape((tokens, self.whole.input_width()))?)
    }

    /// Whether a device computes both steps.
    pub fn is_on_device(&self) -> bool {
        PlacedMatrix::begins_heads(&self.groups, self.width / self.groups.len()) && self.whole.is_on_device()
    }

    /// As [`forward`](Self::forward), begun on a device. The caller guarantees that it [is there](Self::is_on_device).
    pub fn begin(&self, mixed: DeviceRows, ops: &dyn DeviceOps) -> Result<DeviceRows> {
        let grouped = PlacedMatrix::begin_heads(&self.groups, mixed, ops)?;
        Ok(self.whole.begin(grouped, ops)?.expect("the product is on the device"))
    }
}
