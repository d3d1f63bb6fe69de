//! Qwen3.5-MoE, also Qwen3.6: Qwen3-Next with the delta rule's matmuls stored apart, and experts in every layer.
//!
//! ```text
//! x += gated_delta_net(rms(x))              linear attention; three of four layers
//! x += sigmoid(gate) · attention(rms(x))    the others: QK norm per head, RoPE on a quarter of each head, output gate
//! x += Σ_k weight · expert(y) + sigmoid(gate(y)) · shared(y)      y = rms(x); softmax, top k, renormalised
//! ```

use larder_core::Gate;

use super::qwen3_next::{FfnParts, build_with};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{DeltaForm, RotarySections};
use crate::stack::Stack;
use crate::weights::WeightLoader;

/// The sections of a head, unless the config says otherwise.
pub const SECTIONS: RotarySections = RotarySections::new([11, 11, 10]);
/// The token that stands for those of images in a config that does not say.
pub const IMAGE_TOKEN: u32 = 248_056;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    // The reference computes in f32 and has experts in every layer, whatever these say.
    config.ignore(&["mamba_ssm_dtype", "mlp_only_layers", "decoder_sparse_step", "intermediate_size"]);
    let ffn = |config: &mut Config, layers| {
        let experts = config.size_or(&["num_experts", "num_local_experts"], 256)?;
        let top_k = config.size_or(&["num_experts_per_tok"], 8)?;
        Ok(FfnParts {
            gate: Gate::softmax(experts, top_k, true).checked()?,
            sparse: (0..layers).collect(),
            dense_width: 1, // of no layer
            inter: config.size_or(&["moe_intermediate_size"], 512)?,
            shared_width: config.size_or(&["shared_expert_intermediate_size"], 512)?,
        })
    };
    let image_token = Some(config.opt_token("image_token_id")?.unwrap_or(IMAGE_TOKEN));
    let stack = build_with(config, weights, DeltaForm::Separate, Some(SECTIONS), ffn)?;
    Ok(Stack { image_token, ..stack })
}
