//! Switch Transformers: an encoder and a decoder in the style of T5, whose sparse layers have one expert per token.
//!
//! ```text
//! x  = embedding
//! x += attention(rms(x))              unscaled scores, a bias by distance; of the encoder over all tokens
//! x += attention(rms(x), encoded)     in the decoder
//! x += weight · expert(rms(x))        softmax, the best expert, without renormalisation; or the dense MLP
//! logits = embedding · rms(x) / √hidden
//! ```
//!
//! An expert takes a bounded number of tokens of a prompt, in their order; the others skip the layer. The decoder reads
//! one token after the other, so its experts never overflow.

use std::ops::Range;
use std::sync::Arc;

use larder_core::{ExpertNames, Gate, Geometry, LayerIdx, TensorSlice};

use super::common::MAX_LAYERS;
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{DistanceBuckets, Mlp, Moe, Norm, PositionBias, RelativeAttention};
use crate::ops::Activation;
use crate::stack::{Branch, CrossAttention, Encoder, EncoderLayer, Factors, Ffn, Layer, Stack};
use crate::weights::{EmbeddingRows, Linear, WeightLoader};

/// Tokens of prompt and generated text together. The reference has no limit: positions beyond a distance of
/// `relative_attention_max_distance` look alike. The published models were trained on 512 and generate 512.
const CONTEXT: usize = 2048;

struct Sizes {
    hidden: usize,
    heads: usize,
    head_dim: usize,
    inter: usize,
    eps: f64,
    act: Activation,
    buckets: DistanceBuckets,
    gate: Gate,
    router_bias: bool,
    capacity: usize,
    encoder: usize,
    decoder: usize,
    sparse: Vec<LayerIdx>,
}

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    check_fixed(config)?;
    let sizes = Sizes::parse(config)?;
    let (vocab, hidden) = (config.size(&["vocab_size"])?, sizes.hidden);
    let start = config.opt_count(&["decoder_start_token_id", "pad_token_id"])?.unwrap_or(0);
    if start >= vocab {
        return Err(config_error(format!("decoder_start_token_id {start} is not below vocab_size {vocab}")));
    }
    let tied = config.flag_or("tie_word_embeddings", true)?;

    let (embed, head): (Box<dyn EmbeddingRows>, Linear) = if tied {
        let embed = weights.matrix("shared.weight", vocab, hidden)?;
        (Box::new(embed.clone()), Linear::new(embed, None)?)
    } else {
        let embed = weights.rows("decoder.embed_tokens.weight", vocab, hidden)?;
        (embed, weights.linear("lm_head", vocab, hidden, false)?)
    };
    let own = if tied { None } else { Some(weights.rows("encoder.embed_tokens.weight", vocab, hidden)?) };
    let encoder = Encoder { embed: own, ..sizes.encoder(weights, start as u32)? };
    let bias = sizes.bias(weights, "decoder", false)?;
    let layers = (0..sizes.decoder).map(|layer| sizes.decoder_layer(weights, layer, &bias)).collect::<Result<_>>()?;
    let geometry = Geometry {
        layers: sizes.encoder + sizes.decoder,
        moe_layers: sizes.sparse.clone(),
        experts: sizes.gate.experts,
        top_k: 1,
        hidden,
        inter: sizes.inter,
        bias: false,
    };
    Ok(Stack {
        vocab,
        context: CONTEXT,
        hidden,
        geometry,
        experts: sizes.expert_names(),
        embed,
        layers,
        norm: sizes.norm(weights, "decoder.final_layer_norm")?,
        head,
        ropes: vec![],
        factors: Factors { logits: if tied { (hidden as f64).powf(-0.5) } else { 1.0 }, ..Factors::default() },
        encoder: Some(encoder),
        mtp: None,
        streams: None,
        image_token: None,
    })
}

impl Sizes {
    fn parse(config: &mut Config) -> Result<Self> {
        let encoder = config.size_or(&["num_layers"], 12)?;
        let decoder = config.opt_size(&["num_decoder_layers"])?.unwrap_or(encoder);
        if encoder.max(decoder) > MAX_LAYERS {
            return Err(config_error(format!("at most {MAX_LAYERS} layers are supported")));
        }
        let in_encoder = sparse(0..encoder, config.count_or(&["num_sparse_encoder_layers"], 3)?);
        let in_decoder = sparse(encoder..encoder + decoder, config.count_or(&["num_sparse_decoder_layers"], 3)?);
        let experts = config.size_or(&["num_experts"], 8)?;
        if experts > u16::MAX as usize {
            return Err(config_error(format!("{experts} experts per layer; at most {} are supported", u16::MAX)));
        }
        let buckets = DistanceBuckets {
            count: config.size_or(&["relative_attention_num_buckets"], 32)?,
            max_distance: config.size_or(&["relative_attention_max_distance"], 128)?,
            bidirectional: false,
        };
        if buckets.count < 4 || buckets.max_distance <= buckets.count / 2 {
            return Err(config_error(
                "relative_attention_num_buckets must be at least 4, and relative_attention_max_distance above half of it",
            ));
        }
        Ok(Sizes {
            hidden: config.size_or(&["d_model"], 768)?,
            heads: config.size_or(&["num_heads"], 12)?,
            head_dim: config.size_or(&["d_kv"], 64)?,
            inter: config.size_or(&["d_ff"], 2048)?,
            eps: config.positive_or("layer_norm_epsilon", 1e-6)?,
            act: Activation::named(config.opt_text("dense_act_fn")?.unwrap_or("relu"))?,
            buckets,
            gate: Gate::softmax(experts, 1, false).checked()?,
            router_bias: config.flag_or("router_bias", false)?,
            capacity: config.size_or(&["expert_capacity"], 64)?,
            encoder,
            decoder,
            sparse: in_encoder.chain(in_decoder).collect(),
        })
    }

    /// Names of the feed-forward parts of all layers.
    fn ffn_names(&self) -> impl Iterator<Item = String> {
        let encoder = (0..self.encoder).map(|layer| format!("encoder.block.{layer}.layer.1"));
        encoder.chain((0..self.decoder).map(|layer| format!("decoder.block.{layer}.layer.2")))
    }

    fn expert_names(&self) -> ExpertNames {
        let layers: Vec<String> = self.ffn_names().collect();
        let part = |name: &str| TensorSlice {
            layer_names: Some(layers.clone()),
            ..TensorSlice::whole(format!("{{l}}.mlp.experts.expert_{{e}}.{name}.weight"))
        };
        ExpertNames { matrices: ["wi", "wo"].map(part).into(), bias: None }
    }

    fn encoder(&self, weights: &mut WeightLoader, start: u32) -> Result<Encoder> {
        let bias = self.bias(weights, "encoder", true)?;
        let layer = |weights: &mut WeightLoader, layer: usize| {
            let prefix = format!("encoder.block.{layer}.layer");
            Ok(EncoderLayer {
                attention_norm: self.norm(weights, &format!("{prefix}.0.layer_norm"))?,
                attention: self.attention(weights, &format!("{prefix}.0.SelfAttention"), Some(&bias))?,
                ffn_norm: self.norm(weights, &format!("{prefix}.1.layer_norm"))?,
                ffn: self.ffn(weights, &format!("{prefix}.1.mlp"), layer, Some(self.capacity))?,
            })
        };
        let layers = (0..self.encoder).map(|at| layer(weights, at)).collect::<Result<_>>()?;
        let norm = self.norm(weights, "encoder.final_layer_norm")?;
        let cross = |weights: &mut WeightLoader, layer: usize| {
            let prefix = format!("decoder.block.{layer}.layer.1");
            Ok(CrossAttention {
                norm: self.norm(weights, &format!("{prefix}.layer_norm"))?,
                attention: self.attention(weights, &format!("{prefix}.EncDecAttention"), None)?,
            })
        };
        let cross = (0..self.decoder).map(|at| cross(weights, at)).collect::<Result<_>>()?;
        Ok(Encoder { embed: None, layers, norm, cross, start })
    }

    fn decoder_layer(&self, weights: &mut WeightLoader, layer: usize, bias: &Arc<PositionBias>) -> Result<Layer> {
        let prefix = format!("decoder.block.{layer}.layer");
        let mixer_norm = self.norm(weights, &format!("{prefix}.0.layer_norm"))?;
        let attention = self.attention(weights, &format!("{prefix}.0.SelfAttention"), Some(bias))?;
        let ffn_norm = self.norm(weights, &format!("{prefix}.2.layer_norm"))?;
        let ffn = self.ffn(weights, &format!("{prefix}.2.mlp"), self.encoder + layer, None)?;
        Ok(Layer::new(Branch::new(mixer_norm, Box::new(attention)), Branch::new(ffn_norm, ffn)))
    }

    fn norm(&self, weights: &mut WeightLoader, prefix: &str) -> Result<Norm> {
        Norm::rms(weights, prefix, self.hidden, self.eps)
    }

    /// The bias of scores of an encoder or decoder, which its first layer has.
    fn bias(&self, weights: &mut WeightLoader, part: &str, bidirectional: bool) -> Result<Arc<PositionBias>> {
        let name = format!("{part}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
        let table = weights.vector(&name, &[self.buckets.count, self.heads])?;
        let buckets = DistanceBuckets { bidirectional, ..self.buckets };
        Ok(Arc::new(PositionBias::new(&table, self.heads, buckets, CONTEXT)))
    }

    fn attention(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        bias: Option<&Arc<PositionBias>>,
    ) -> Result<RelativeAttention> {
        let (hidden, width) = (self.hidden, self.heads * self.head_dim);
        let mut product = |name: &str, rows, cols| weights.linear(&format!("{prefix}.{name}"), rows, cols, false);
        Ok(RelativeAttention {
            heads: self.heads,
            head_dim: self.head_dim,
            q: product("q", width, hidden)?,
            k: product("k", width, hidden)?,
            v: product("v", width, hidden)?,
            o: product("o", hidden, width)?,
            bias: bias.cloned(),
        })
    }

    /// The feed-forward part of a layer; those of the decoder are counted after those of the encoder.
    fn ffn(&self, weights: &mut WeightLoader, prefix: &str, layer: usize, capacity: Option<usize>) -> Result<Ffn> {
        let index = LayerIdx(layer as u16);
        if !self.sparse.contains(&index) {
            let sizes = (self.hidden, self.inter);
            return Ok(Ffn::dense(Mlp::ungated(weights, prefix, ["wi", "wo"], sizes, self.act, false)?));
        }
        let name = format!("{prefix}.router.classifier");
        let router = weights.linear(&name, self.gate.experts, self.hidden, self.router_bias)?;
        let gate = self.gate.clone();
        Ok(Ffn::moe(Moe { capacity, ..Moe::new(index, router, gate, self.act) }))
    }
}

/// Of `layers`, those with experts: every n-th, from the second on, by the rule of the reference.
fn sparse(layers: Range<usize>, count: usize) -> impl Iterator<Item = LayerIdx> {
    let step = layers.len().checked_div(count).unwrap_or(layers.len());
    let has_experts = move |at: usize| step == 1 || step > 1 && at % step == 1;
    let first = layers.start;
    layers.filter(move |layer| has_experts(layer - first)).map(|layer| LayerIdx(layer as u16))
}

/// Keys that have to be as they are here, and keys without effect.
fn check_fixed(config: &mut Config) -> Result<()> {
    config.only("is_encoder_decoder", true);
    let projection = config.opt_text("feed_forward_proj")?.unwrap_or("relu");
    if config.flag_or("is_gated_act", false)? || projection.starts_with("gated") {
        return Err(config_error("gated experts (is_gated_act, feed_forward_proj) are not supported"));
    }
    config.ignore(&[
        "add_cross_attention",
        "add_router_probs",
        "batch_prioritized_routing", // not read by the reference
        "decoder_sparse_step",       // computed from the number of sparse layers
        "dropout_rate",
        "encoder_sparse_step",
        "initializer_factor",
        "is_decoder",
        "n_positions",
        "router_ignore_padding_tokens", // there is no padding
        "router_type",
    ]);
    Ok(())
}
