//! The output projection in two steps: one for each group of heads, then one of what all groups yield.

use crate::error::Result;
use crate::nn::CompressedShape;
use crate::ops::{Ops, Rows};
use crate::weights::{Linear, PlacedMatrix, WeightLoader};

/// The two steps.
pub struct GroupedOutput {
    groups: Vec<PlacedMatrix>, // groups × [group_rank, heads / groups · head_dim]
    whole: Linear,             // [hidden, groups · group_rank]
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
        })
    }

    /// `mixed [tokens, heads · head_dim]` → `[tokens, hidden]`
    pub fn forward(&self, mixed: Rows, ops: &dyn Ops) -> Result<Rows> {
        self.whole.forward(ops.matmul_heads(mixed, &self.groups)?, ops)
    }
}
