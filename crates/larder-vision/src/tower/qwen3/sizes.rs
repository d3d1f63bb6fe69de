//! Sizes of the tower and of its memory, from its config and the formats of its tensors.

use larder_core::NumberFormat;

use super::config::Qwen3TowerConfig;
use super::names::{MergerNames, Qwen3Names};
use crate::compute::attention_scratch_bytes;
use crate::error::VisionError;
use crate::processor::Processor;
use crate::tower::sizes::{TowerLimits, TowerSizes};
use crate::tower::weights::WeightReader;

impl Qwen3TowerConfig {
    /// The sizes of the tower with these tensors.
    pub fn sizes(
        &self,
        processor: &Processor,
        weights: &WeightReader,
        names: &Qwen3Names,
        limits: TowerLimits,
    ) -> Result<TowerSizes, VisionError> {
        let token_pixels = (self.patch * self.merge).pow(2);
        let most_tokens = (processor.config().most_pixels / token_pixels).min(limits.tokens).max(1);
        Ok(TowerSizes {
            layers: self.depth,
            width: self.hidden,
            out: self.out,
            deepstack_layers: self.deepstack.len(),
            token_pixels,
            most_tokens,
            weight_bytes: self.weight_bytes(weights, names)?,
            encoding_bytes: self.encoding_bytes(most_tokens * token_pixels, limits.threads),
        })
    }

    /// Bytes that encoding a picture with this many pixels, when resized, takes beside the weights.
    pub fn encoding_bytes(&self, pixels: usize, threads: usize) -> u64 {
        let Qwen3TowerConfig { hidden, intermediate, heads, out, .. } = *self;
        let patches = pixels / self.patch.pow(2);
        // The residual stream, its norm, and either queries, keys, values and the mixed rows, or the MLP.
        let widest = (2 * hidden + (5 * hidden).max(intermediate + hidden)).max(3 * self.patch.pow(2) + hidden);
        let results = (self.deepstack.len() + 1) * out / self.patches_per_token() + 1;
        let rows = (patches * (widest + results + self.head_dim()) * size_of::<f32>()) as u64;
        // A picture on its way through both passes of the resize.
        rows + attention_scratch_bytes(patches, heads, self.head_dim(), threads) + 12 * pixels as u64
    }

    /// Bytes of the weights in memory: halves and bfloats stay what they are. The matrices must be there.
    fn weight_bytes(&self, weights: &WeightReader, names: &Qwen3Names) -> Result<u64, VisionError> {
        let (hidden, joined) = (self.hidden, self.hidden * self.patches_per_token());
        let linear = |name: &str, columns: usize, depth: usize| {
            let kind = weights.meta(&format!("{name}.weight"), &[columns, depth])?.kind;
            let halves = matches!(kind, NumberFormat::F16 | NumberFormat::Bf16);
            Ok::<_, VisionError>((columns * depth * if halves { 2 } else { 4 } + 4 * columns) as u64)
        };
        let patches = 4 * (hidden * (3 * self.patch.pow(2) + 1)) as u64;
        let positions = 4 * (self.positions.pow(2) * hidden) as u64;
        let mut all = patches + positions;
        for block in 0..self.depth {
            let [up, down] = names.mlp(block);
            all += linear(&names.qkv(block), 3 * hidden, hidden)?;
            all += linear(&names.projection(block), hidden, hidden)?;
            all += linear(&up, self.intermediate, hidden)? + linear(&down, hidden, self.intermediate)?;
            all += 16 * hidden as u64;
        }
        let deepstack = (0..self.deepstack.len()).map(|index| names.deepstack(self, index));
        for MergerNames { first, second, .. } in deepstack.chain([names.merger()]) {
            all += linear(&first, joined, joined)? + linear(&second, self.out, joined)? + 8 * joined as u64;
        }
        Ok(all)
    }
}
