//! Qwen3-MoE: queries and keys normalised per head, no shared expert. Also the text models of Qwen3-VL and Qwen3-Omni,
//! whose positions in images have three dimensions.
//!
//! ```text
//! x += attention(rms(x))                    QK norm per head, RoPE, optional sliding window
//! x += Σ_k weight · expert(rms(x))          softmax, top k
//! x += mlp(rms(x))                          instead, in dense layers
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults, sliding_window, sparse_layers};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, Rope, RotarySections};
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

/// The sections of a head of Qwen3-VL and Qwen3-Omni, unless their config says otherwise.
const SECTIONS: RotarySections = RotarySections::new([24, 20, 20]);
/// The token that stands for those of images in a config that does not say.
const IMAGE_TOKEN: u32 = 151_655;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { eps: 1e-6, kv_heads: Some(4), ..Defaults::COMMON })?;
    let image_token = image_token(config)?;
    let (rope, rotary) = match image_token {
        None => Rope::parse(config, basics.head_dim, 1e4, basics.context, None)?,
        Some(_) => Rope::parse_with_sections(config, basics.head_dim, 1e4, basics.context, None, SECTIONS)?,
    };
    let slides = config.flag_or("use_sliding_window", false)?;
    config.ignore(&["sliding_window", "max_window_layers"]); // the first is used only with the flag, the second never
    let mask = sliding_window(if slides { Some(config.size_or(&["sliding_window"], 4096)?) } else { None });
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let experts = config.size(&["num_experts", "num_local_experts"])?;
    let top_k = config.size_or(&["num_experts_per_tok"], 8)?;
    let gate = Gate::softmax(experts, top_k, config.flag_or("norm_topk_prob", false)?).checked()?;
    let sparse = sparse_layers(config, basics.layers)?;
    let dense_width = config.size(&["intermediate_size"])?;
    let inter = config.size(&["moe_intermediate_size"])?;

    let geometry = basics.geometry(sparse.clone(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let stack = basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let own = format!("{prefix}.self_attn");
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let attention = Attention { norm: basics.qk_norm(weights, &own)?, mask, ..attention };
        let ffn = if sparse.contains(&layer) {
            Ffn::moe(basics.moe(weights, layer, &format!("{prefix}.mlp.gate"), gate.clone())?)
        } else {
            Ffn::dense(basics.mlp(weights, &format!("{prefix}.mlp"), dense_width, false)?)
        };
        basics.layer(weights, &prefix, attention, ffn)
    })?;
    Ok(Stack { image_token, ..stack })
}

/// The token that stands for those of images, if the model takes any.
fn image_token(config: &mut Config) -> Result<Option<u32>> {
    if config.flag_or("takes_images", false)? {
        Ok(Some(config.opt_token("image_token_id")?.unwrap_or(IMAGE_TOKEN)))
    } else {
        Ok(None)
    }
}
