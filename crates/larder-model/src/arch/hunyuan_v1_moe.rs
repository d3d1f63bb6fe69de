//! Hunyuan-A13B: queries and keys normalised after the rotation, one shared expert as wide as the others.
//!
//! ```text
//! x += attention(rms(x))                    RoPE, then QK norm per head
//! x += Σ_k weight · expert(y) + shared(y)   y = rms(x); softmax, top k, renormalised
//! ```

use larder_core::{ExpertNames, Gate};
use serde_json::json;

use super::common::{AttentionBias, Basics, Defaults};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{Attention, Norm, QkNorm, Rope, SharedExpert};
use crate::ops::Rotary;
use crate::stack::{Ffn, Stack};
use crate::weights::WeightLoader;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let basics = Basics::parse(config, "rms_norm_eps", Defaults::COMMON)?;
    let (rope, rotary) = rope(config, &basics)?;
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let experts = config.opt_size_of_layers(&["num_experts", "num_local_experts"], basics.layers)?.unwrap_or(1);
    let top_k = config.opt_size_of_layers(&["moe_topk", "num_experts_per_tok"], basics.layers)?.unwrap_or(1);
    let gate = Gate::softmax(experts, top_k, true).checked()?;
    let inter = config.size_or(&["intermediate_size"], 11008)?;
    check_fixed(config, &basics, inter)?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    basics.stack(weights, rope, geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let (own, mlp) = (format!("{prefix}.self_attn"), format!("{prefix}.mlp"));
        let attention = basics.attention(weights, &own, bias, rotary)?;
        let q_norm = Norm::rms(weights, &format!("{own}.query_layernorm"), basics.head_dim, basics.eps)?;
        let k_norm = Norm::rms(weights, &format!("{own}.key_layernorm"), basics.head_dim, basics.eps)?;
        let attention = Attention { norm: QkNorm::PerHeadAfterRope(q_norm, k_norm), ..attention };
        let mut moe = basics.moe(weights, layer, &format!("{mlp}.gate.wg"), gate.clone())?;
        let shared = basics.mlp(weights, &format!("{mlp}.shared_mlp"), inter, false)?;
        moe.shared = Some(SharedExpert { mlp: shared, gate: None });
        basics.layer(weights, &prefix, attention, Ffn::moe(moe))
    })
}

/// The type 'dynamic' with an `alpha` is a larger base, the same for every length.
fn rope(config: &mut Config, basics: &Basics) -> Result<(Rope, Rotary)> {
    let outer = config.number_or("rope_theta", 1e4)?;
    let key = if config.is_set("rope_parameters") { "rope_parameters" } else { "rope_scaling" };
    if let Some(mut inner) = config.opt_object(key, "rope_scaling.")? {
        let kind = inner.opt_text("rope_type")?.or(inner.opt_text("type")?);
        if let Some(alpha) = inner.opt_number("alpha")?.filter(|alpha| *alpha != 0.0 && kind == Some("dynamic")) {
            let theta = inner.number_or("rope_theta", outer)?;
            inner.ignore(&["type", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]); // of other types
            inner.finish();
            let dim = basics.head_dim as f64;
            let stretched = theta * alpha.powf(dim / (dim - 2.0));
            if alpha <= 0.0 || !stretched.is_finite() {
                return Err(config_error(format!("rope_scaling.alpha {alpha} is out of range for heads of {dim}")));
            }
            let plain = json!({ "rope_theta": stretched });
            return Rope::parse(&mut Config::new(&plain)?, basics.head_dim, 1e4, basics.context, None);
        }
    }
    Rope::parse(config, basics.head_dim, 1e4, basics.context, None)
}

/// Keys of published configs for which the reference knows one value each.
fn check_fixed(config: &mut Config, basics: &Basics, inter: usize) -> Result<()> {
    for key in ["use_mixed_mlp_moe", "use_rotary_pos_emb"] {
        config.only(key, true);
    }
    let widths = [("moe_intermediate_size", inter), ("num_shared_expert", 1), ("attention_head_dim", basics.head_dim)];
    for (key, want) in widths {
        if config.opt_size_of_layers(&[key], basics.layers)?.is_some_and(|given| given != want) {
            return Err(config_error(format!("{key} must be {want} for this hunyuan_v1_moe")));
        }
    }
    config.only_of("norm_type", &["rms".into(), "hf_rms".into()]);
    // Of training, of layers that share keys (use_cla refuses them), of classification and of pictures.
    config.ignore(&[
        "moe_drop_tokens",
        "moe_random_routing_dropped_token",
        "cla_share_factor",
        "class_num",
        "dense_list",
        "pool_type",
        "org_vocab_size",
        "num_media_embeds",
    ]);
    Ok(())
}
