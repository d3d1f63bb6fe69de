//! FlexOlmo: OLMoE's attention and gate, with norms after each part instead of before it.
//!
//! ```text
//! x += rms(attention(x))                    QK norm over the whole projection, RoPE
//! x += rms(Σ_k weight · expert(x))          softmax, top k
//! ```

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::Config;
use crate::error::Result;
use crate::nn::{Attention, Mixer, Norm, QkNorm, Rope};
use crate::stack::{Branch, Ffn, Layer, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults { eps: 1e-6, ..Defaults::COMMON })?;
    let (rope, rotary) = Rope::parse(config, basics.head_dim, 5e5, basics.context, None)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let experts = config.size_or(&["num_experts", "num_local_experts"], 7)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 5)?;
    let gate = Gate::softmax(experts, top_k, config.flag_or("norm_topk_prob", false)?).checked()?;
    let inter = config.size_or(&["intermediate_size"], 11008)?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let attention = basics.attention(weights, &format!("{prefix}.self_attn"), bias, rotary)?;
        let mut norm = |name: &str, width| Norm::rms(weights, &format!("{prefix}.{name}"), width, basics.eps);
        let q_norm = norm("self_attn.q_norm", basics.heads * basics.head_dim)?;
        let k_norm = norm("self_attn.k_norm", basics.kv_heads * basics.head_dim)?;
        let mixer = Some(norm("post_attention_layernorm", basics.hidden)?);
        let ffn = Some(norm("post_feedforward_layernorm", basics.hidden)?);
        let moe = basics.moe(weights, layer, &format!("{prefix}.mlp.gate"), gate.clone())?;
        let attention: Box<dyn Mixer> = Box::new(Attention { norm: QkNorm::Whole(q_norm, k_norm), ..attention });
        let mixer = Branch { after: mixer, ..Branch::new(Norm::None, attention) };
        Ok(Layer::new(mixer, Branch { after: ffn, ..Branch::new(Norm::None, Ffn::moe(moe)) }))
    })
}
