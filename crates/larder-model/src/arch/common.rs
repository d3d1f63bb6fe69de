//! Config keys, weights and layers that most architectures share.

use larder_core::{ExpertNames, Gate, Geometry, LayerIdx};

use crate::config::{Config, config_error};
use crate::embedding::EmbeddingRows;
use crate::error::Result;
use crate::matrix::{Linear, Matrix};
use crate::nn::{
    Activation, Attention, AttentionMask, AttentionShape, Mixer, Mlp, MlpNames, Moe, Norm, QkNorm, Rope, Rotary,
};
use crate::stack::{After, Factors, Ffn, Layer, Stack};
use crate::weights::WeightLoader;

/// Upper limit of layers, far above any model: each layer costs memory before a tensor is read.
const MAX_LAYERS: usize = 2048;

/// The sizes and flags that every config has.
#[derive(Clone)]
pub struct Basics {
    pub vocab: usize,
    pub hidden: usize,
    pub layers: usize,
    pub context: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub eps: f64,
    pub act: Activation,
    pub tied: bool,
    pub head_bias: bool,
}

/// The reference implementation's values for keys that a config does not have.
#[derive(Clone, Copy)]
pub struct Defaults {
    /// Epsilon of the norms.
    pub eps: f64,
    /// Key and value heads; `None` for the number of query heads, which is also the value for `null` in the config.
    pub kv_heads: Option<usize>,
    /// Width of a head; `None` for the hidden size divided by the number of heads.
    pub head_dim: Option<usize>,
    /// Whether the output head uses the embedding's weights.
    pub tied: bool,
}

impl Defaults {
    /// The defaults of most architectures.
    pub const COMMON: Defaults = Defaults { eps: 1e-5, kv_heads: None, head_dim: None, tied: false };
}

impl Basics {
    /// Reads the shared keys; `eps` is the key of the norms' epsilon.
    pub fn parse(config: &mut Config, eps: &str, defaults: Defaults) -> Result<Self> {
        let (hidden, heads) = (config.size(&["hidden_size"])?, config.size(&["num_attention_heads"])?);
        let own = |name: &str, default: Option<usize>| default.filter(|_| !config.contains(name));
        let (default_dim, default_kv) =
            (own("head_dim", defaults.head_dim), own("num_key_value_heads", defaults.kv_heads));
        let head_dim = match config.opt_size(&["head_dim"])?.or(default_dim) {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => {
                return Err(config_error(format!("hidden_size {hidden} is not a multiple of {heads} attention heads")));
            }
        };
        let kv_heads = config.size_or(&["num_key_value_heads"], default_kv.unwrap_or(heads))?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(config_error(format!(
                "num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )));
        }
        let layers = config.size(&["num_hidden_layers"])?;
        if layers > MAX_LAYERS {
            return Err(config_error(format!("num_hidden_layers is {layers}; at most {MAX_LAYERS} are supported")));
        }
        Ok(Basics {
            vocab: config.size(&["vocab_size"])?,
            hidden,
            layers,
            context: config.size(&["max_position_embeddings"])?,
            heads,
            kv_heads,
            head_dim,
            eps: config.positive_or(eps, defaults.eps)?,
            act: Activation::named(config.opt_text("hidden_act")?.unwrap_or("silu"))?,
            tied: config.flag_or("tie_word_embeddings", defaults.tied)?,
            head_bias: false,
        })
    }

    /// The embedding; also as a matrix if the output head uses it.
    fn embedding(&self, weights: &mut WeightLoader) -> Result<(Box<dyn EmbeddingRows>, Option<Matrix>)> {
        let name = "model.embed_tokens.weight";
        if !self.tied {
            return Ok((weights.rows(name, self.vocab, self.hidden)?, None));
        }
        let embed = weights.matrix(name, self.vocab, self.hidden)?;
        Ok((Box::new(embed.clone()), Some(embed)))
    }

    /// The output head: weights of its own, or those of the embedding.
    fn head(&self, weights: &mut WeightLoader, tied: Option<Matrix>) -> Result<Linear> {
        let Some(embed) = tied else {
            return weights.linear("lm_head", self.vocab, self.hidden, self.head_bias);
        };
        let bias = if self.head_bias { Some(weights.tensor("lm_head.bias", &[self.vocab])?) } else { None };
        Linear::new(embed, bias)
    }

    pub fn geometry(&self, moe_layers: Vec<usize>, experts: usize, top_k: usize, inter: usize) -> Result<Geometry> {
        if experts > u16::MAX as usize {
            return Err(config_error(format!("{experts} experts per layer; at most {} are supported", u16::MAX)));
        }
        let moe_layers = moe_layers.into_iter().map(|layer| LayerIdx(layer as u16)).collect();
        let (layers, hidden) = (self.layers, self.hidden);
        Ok(Geometry { layers, moe_layers, experts, top_k, hidden, inter, bias: false })
    }

    /// Plain attention below `prefix`: grouped queries, causal mask, no QK norm.
    pub fn attention(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        bias: AttentionBias,
        rotary: Rotary,
    ) -> Result<Attention> {
        self.attention_as(weights, prefix, "o_proj", self.heads * self.head_dim, bias, rotary)
    }

    /// As [`attention`](Self::attention), with `output` as the name of the output product, and `query_rows` rows in the
    /// query product.
    pub fn attention_as(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        output: &str,
        query_rows: usize,
        bias: AttentionBias,
        rotary: Rotary,
    ) -> Result<Attention> {
        let attention = self.attention_of_keys(weights, prefix, output, query_rows, bias, rotary)?;
        let v = weights.linear(&format!("{prefix}.v_proj"), self.kv_heads * self.head_dim, self.hidden, bias.qkv)?;
        Ok(Attention { v: Some(v), ..attention })
    }

    /// As [`attention_as`](Self::attention_as), without a product for the values: they are what that of the keys yields.
    pub fn attention_of_keys(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        output: &str,
        query_rows: usize,
        bias: AttentionBias,
        rotary: Rotary,
    ) -> Result<Attention> {
        let (mixed, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        Ok(Attention {
            shape: AttentionShape { heads: self.heads, kv_heads: self.kv_heads, head_dim: self.head_dim },
            q: weights.linear(&format!("{prefix}.q_proj"), query_rows, self.hidden, bias.qkv)?,
            k: weights.linear(&format!("{prefix}.k_proj"), kv, self.hidden, bias.qkv)?,
            v: None,
            o: weights.linear(&format!("{prefix}.{output}"), self.hidden, mixed, bias.o)?,
            norm: QkNorm::None,
            clip: None,
            rotary: Some(rotary),
            mask: AttentionMask::Causal,
            scale: (self.head_dim as f64).powf(-0.5),
            sinks: None,
            temperature: None,
            value_norm: None,
            output_gate: false,
        })
    }

    /// QK norm per head: `prefix.q_norm`, `prefix.k_norm`.
    pub fn qk_norm(&self, weights: &mut WeightLoader, prefix: &str) -> Result<QkNorm> {
        let mut norm = |name: &str| Norm::rms(weights, &format!("{prefix}.{name}"), self.head_dim, self.eps);
        Ok(QkNorm::PerHead(norm("q_norm")?, norm("k_norm")?))
    }

    /// Router and experts of a layer, without a shared expert.
    pub fn moe(&self, weights: &mut WeightLoader, layer: usize, router: &str, gate: Gate) -> Result<Moe> {
        let router = weights.linear(router, gate.experts, self.hidden, false)?;
        Ok(Moe { layer: LayerIdx(layer as u16), router, gate, act: self.act, shared: None, beside: None })
    }

    /// A dense MLP `gate_proj`, `up_proj`, `down_proj` below `prefix`.
    pub fn mlp(&self, weights: &mut WeightLoader, prefix: &str, inter: usize, bias: bool) -> Result<Mlp> {
        Mlp::new(weights, prefix, &MlpNames::PROJ, (self.hidden, inter), self.act, bias)
    }

    /// A layer with `input_layernorm` and `post_attention_layernorm` below `prefix`.
    pub fn layer(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        mixer: impl Mixer + 'static,
        ffn: Ffn,
    ) -> Result<Layer> {
        Ok(Layer {
            mixer_norm: Norm::rms(weights, &format!("{prefix}.input_layernorm"), self.hidden, self.eps)?,
            mixer: Box::new(mixer),
            ffn_norm: Norm::rms(weights, &format!("{prefix}.post_attention_layernorm"), self.hidden, self.eps)?,
            ffn,
            after: After::default(),
        })
    }

    /// Embedding, layers, final RMS norm and output head.
    pub fn stack(
        &self,
        weights: &mut WeightLoader,
        rope: Rope,
        geometry: Geometry,
        experts: ExpertNames,
        build_layer: impl FnMut(&mut WeightLoader, usize) -> Result<Layer>,
    ) -> Result<Stack> {
        let norm = |weights: &mut WeightLoader| Norm::rms(weights, "model.norm", self.hidden, self.eps);
        self.stack_with(weights, rope, geometry, experts, build_layer, norm)
    }

    /// As [`stack`](Self::stack), with another final norm.
    pub fn stack_with(
        &self,
        weights: &mut WeightLoader,
        rope: Rope,
        geometry: Geometry,
        experts: ExpertNames,
        mut build_layer: impl FnMut(&mut WeightLoader, usize) -> Result<Layer>,
        norm: impl FnOnce(&mut WeightLoader) -> Result<Norm>,
    ) -> Result<Stack> {
        let (embed, tied) = self.embedding(weights)?;
        let layers = (0..self.layers).map(|layer| build_layer(weights, layer)).collect::<Result<_>>()?;
        let norm = norm(weights)?;
        let head = self.head(weights, tied)?;
        Ok(Stack {
            vocab: self.vocab,
            context: self.context,
            geometry,
            experts,
            embed,
            layers,
            norm,
            head,
            ropes: vec![rope],
            factors: Factors::default(),
        })
    }
}

/// The products of attention that have biases.
#[derive(Clone, Copy)]
pub struct AttentionBias {
    pub qkv: bool,
    pub o: bool,
}

impl AttentionBias {
    pub const NONE: AttentionBias = AttentionBias { qkv: false, o: false };

    pub fn all(on: bool) -> Self {
        AttentionBias { qkv: on, o: on }
    }
}

/// A sliding window of `width` positions, or the plain causal mask.
pub fn sliding_window(width: Option<usize>) -> AttentionMask {
    width.map_or(AttentionMask::Causal, AttentionMask::SlidingWindow)
}

/// The config's `layer_types`, checked against the number of layers and the `known` names.
pub fn layer_types<'a>(config: &mut Config<'a>, layers: usize, known: &[&str]) -> Result<Option<Vec<&'a str>>> {
    let Some(types) = config.opt_texts("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        return Err(config_error(format!("layer_types has {} entries for {layers} layers", types.len())));
    }
    match types.iter().find(|t| !known.contains(t)) {
        Some(other) => {
            Err(config_error(format!("layer type '{other}' is not supported; supported are {}", known.join(" and "))))
        }
        None => Ok(Some(types)),
    }
}

/// The layers with experts by the config's `mlp_layer_types`, if it has them.
pub fn mlp_layer_types(config: &mut Config, layers: usize) -> Result<Option<Vec<usize>>> {
    let Some(types) = config.opt_texts("mlp_layer_types")? else { return Ok(None) };
    if types.len() != layers || types.iter().any(|kind| !["dense", "sparse"].contains(kind)) {
        return Err(config_error(format!("mlp_layer_types must be 'dense' or 'sparse' for each of {layers} layers")));
    }
    Ok(Some((0..layers).filter(|layer| types[*layer] == "sparse").collect()))
}

/// The layers with experts, by the config keys of the Qwen family.
pub fn sparse_layers(config: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let step = config.size_or(&["decoder_sparse_step"], 1)?;
    let dense = config.opt_counts("mlp_only_layers")?.unwrap_or_default();
    Ok((0..layers).filter(|layer| !dense.contains(layer) && (layer + 1).is_multiple_of(step)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn absent_keys_get_the_reference_default_and_null_is_derived() {
        let defaults = Defaults { eps: 1e-6, kv_heads: Some(2), head_dim: Some(24), tied: true };
        let parse = |extra: serde_json::Value| {
            let mut json = json!({
                "vocab_size": 10, "hidden_size": 64, "num_attention_heads": 4,
                "num_hidden_layers": 1, "max_position_embeddings": 16
            });
            json.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let basics = Basics::parse(&mut Config::new(&json).unwrap(), "rms_norm_eps", defaults).unwrap();
            (basics.kv_heads, basics.head_dim, basics.eps, basics.tied)
        };
        assert_eq!(parse(json!({})), (2, 24, 1e-6, true));
        assert_eq!(parse(json!({"num_key_value_heads": null, "head_dim": null})), (4, 16, 1e-6, true));
        let given = json!({"num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 0.5, "tie_word_embeddings": false});
        assert_eq!(parse(given), (1, 8, 0.5, false));
    }
}
