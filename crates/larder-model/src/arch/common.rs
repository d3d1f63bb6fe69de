//! Config keys, weights and layers that most architectures share.

use larder_core::{ExpertNames, Gate, Geometry, LayerIdx};

use crate::config::{Config, config_error};
use crate::error::Result;
use crate::kv::AttentionMask;
use crate::nn::{
    Attention, AttentionShape, InputProducts, Mixer, Mlp, MlpNames, Moe, Norm, OutputGate, QkNorm, Rope, RopeType,
};
use crate::ops::{Activation, Rotary};
use crate::stack::{Branch, ColumnFactors, Factors, Ffn, Layer, Stack};
use crate::weights::{EmbeddingRows, Linear, Matrix, WeightLoader};

/// Upper limit of layers, far above any model: each layer costs memory before a tensor is read.
pub const MAX_LAYERS: usize = 2048;

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
    /// Width of a head's values, where it is not that of its keys.
    pub value_dim: Option<usize>,
    pub eps: f64,
    pub act: Activation,
    pub tied: bool,
    pub head_bias: bool,
    /// Whether the norms' weights are stored less one.
    pub norms_less_one: bool,
    /// Whether each column of the output head is divided by its length.
    pub unit_columns: bool,
    /// Whether the layer for multi-token prediction is used.
    pub mtp: bool,
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
        let layers = config.size(&["num_hidden_layers"])?;
        Self::parse_with(config, layers, eps, defaults)
    }

    /// As [`parse`](Self::parse), for a config that states the number of layers in another way.
    pub fn parse_with(config: &mut Config, layers: usize, eps: &str, defaults: Defaults) -> Result<Self> {
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
        if layers > MAX_LAYERS {
            return Err(config_error(format!("the model has {layers} layers; at most {MAX_LAYERS} are supported")));
        }
        Ok(Basics {
            vocab: config.size(&["vocab_size"])?,
            hidden,
            layers,
            context: config.size(&["max_position_embeddings"])?,
            heads,
            kv_heads,
            head_dim,
            value_dim: None,
            eps: config.positive_or(eps, defaults.eps)?,
            act: Activation::named(config.opt_text("hidden_act")?.unwrap_or("silu"))?,
            tied: config.flag_or("tie_word_embeddings", defaults.tied)?,
            head_bias: false,
            norms_less_one: false,
            unit_columns: false,
            mtp: config.with_mtp,
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

    /// The output head, of weights of its own or of those of the embedding, and the factors on its columns.
    fn head(&self, weights: &mut WeightLoader, tied: Option<Matrix>) -> Result<(Linear, Factors)> {
        let matrix = match tied {
            Some(embed) => embed,
            None => weights.matrix("lm_head.weight", self.vocab, self.hidden)?,
        };
        let mut factors = Factors::default();
        if self.unit_columns {
            let inverse: Vec<f32> = matrix.column_lengths().into_iter().map(|length| 1.0 / (length + 1e-7)).collect();
            factors.columns = Some(ColumnFactors::new(inverse));
        }
        let bias = if self.head_bias { Some(weights.vector("lm_head.bias", &[self.vocab])?) } else { None };
        Ok((Linear::new(matrix, bias)?, factors))
    }

    pub fn geometry(&self, moe_layers: Vec<usize>, experts: usize, top_k: usize, inter: usize) -> Result<Geometry> {
        if experts > u16::MAX as usize {
            return Err(config_error(format!("{experts} experts per layer; at most {} are supported", u16::MAX)));
        }
        let mtp = self.mtp.then_some(self.layers);
        let moe_layers = moe_layers.into_iter().chain(mtp).map(|layer| LayerIdx(layer as u16)).collect();
        let (layers, hidden) = (self.layers + usize::from(self.mtp), self.hidden);
        Ok(Geometry { layers, moe_layers, experts, top_k, hidden, inter, bias: false })
    }

    /// Plain attention below `prefix`: grouped queries, causal mask, no QK norm.
    pub fn attention(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        bias: AttentionBias,
        rotary: impl Into<Option<Rotary>>,
    ) -> Result<Attention> {
        self.attention_as(weights, prefix, "o_proj", self.heads * self.head_dim, bias, rotary)
    }

    /// As [`attention`](Self::attention), with `output` as the name of the output projection, and `query_rows` rows in
    /// the query projection.
    pub fn attention_as(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        output: &str,
        query_rows: usize,
        bias: AttentionBias,
        rotary: impl Into<Option<Rotary>>,
    ) -> Result<Attention> {
        let AttentionShape { kv_heads, head_dim, value_dim, .. } = self.attention_shape();
        let rows = [("q_proj", query_rows), ("k_proj", kv_heads * head_dim), ("v_proj", kv_heads * value_dim)];
        let [q, k, v] =
            rows.map(|(name, rows)| weights.linear(&format!("{prefix}.{name}"), rows, self.hidden, bias.qkv));
        let inputs = InputProducts::Apart { q: q?, k: k?, v: Some(v?) };
        self.attention_with(weights, inputs, &format!("{prefix}.{output}"), bias, rotary)
    }

    /// As [`attention_as`](Self::attention_as), without a matmul for the values: they are what that of the keys
    /// yields.
    pub fn attention_of_keys(
        &self,
        weights: &mut WeightLoader,
        prefix: &str,
        output: &str,
        query_rows: usize,
        bias: AttentionBias,
        rotary: Rotary,
    ) -> Result<Attention> {
        let [q, k] = [("q_proj", query_rows), ("k_proj", self.kv_heads * self.head_dim)]
            .map(|(name, rows)| weights.linear(&format!("{prefix}.{name}"), rows, self.hidden, bias.qkv));
        let inputs = InputProducts::Apart { q: q?, k: k?, v: None };
        self.attention_with(weights, inputs, &format!("{prefix}.{output}"), bias, rotary)
    }

    /// Plain attention of these matmuls; `output` is the name of the output projection.
    pub fn attention_with(
        &self,
        weights: &mut WeightLoader,
        inputs: InputProducts,
        output: &str,
        bias: AttentionBias,
        rotary: impl Into<Option<Rotary>>,
    ) -> Result<Attention> {
        let shape = self.attention_shape();
        Ok(Attention {
            shape,
            inputs,
            o: weights.linear(output, self.hidden, shape.heads * shape.value_dim, bias.o)?,
            norm: QkNorm::None,
            clip: None,
            rotary: rotary.into(),
            mask: AttentionMask::Causal,
            scale: (self.head_dim as f64).powf(-0.5),
            sinks: None,
            temperature: None,
            value_norm: None,
            value_scale: 1.0,
            output_gate: OutputGate::None,
            indexer: None,
        })
    }

    fn attention_shape(&self) -> AttentionShape {
        let Basics { heads, kv_heads, head_dim, .. } = *self;
        AttentionShape { heads, kv_heads, head_dim, value_dim: self.value_dim.unwrap_or(head_dim) }
    }

    /// The RMS norm `prefix` of rows of `width` values.
    pub fn norm(&self, weights: &mut WeightLoader, prefix: &str, width: usize) -> Result<Norm> {
        if self.norms_less_one {
            Norm::rms_plus_one(weights, prefix, width, self.eps)
        } else {
            Norm::rms(weights, prefix, width, self.eps)
        }
    }

    /// QK norm per head: `prefix.q_norm`, `prefix.k_norm`.
    pub fn qk_norm(&self, weights: &mut WeightLoader, prefix: &str) -> Result<QkNorm> {
        let mut norm = |name: &str| self.norm(weights, &format!("{prefix}.{name}"), self.head_dim);
        Ok(QkNorm::PerHead(norm("q_norm")?, norm("k_norm")?))
    }

    /// Router and experts of a layer, without a shared expert.
    pub fn moe(&self, weights: &mut WeightLoader, layer: usize, router: &str, gate: Gate) -> Result<Moe> {
        let router = weights.linear(router, gate.experts, self.hidden, false)?;
        Ok(Moe::new(LayerIdx(layer as u16), router, gate, self.act))
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
        self.layer_of(weights, prefix, Box::new(mixer), ffn)
    }

    /// As [`layer`](Self::layer), with a mixer of any kind.
    pub fn layer_of(&self, weights: &mut WeightLoader, prefix: &str, mixer: Box<dyn Mixer>, ffn: Ffn) -> Result<Layer> {
        let mixer_norm = self.norm(weights, &format!("{prefix}.input_layernorm"), self.hidden)?;
        let ffn_norm = self.norm(weights, &format!("{prefix}.post_attention_layernorm"), self.hidden)?;
        Ok(Layer::new(Branch::new(mixer_norm, mixer), Branch::new(ffn_norm, ffn)))
    }

    /// Embedding, layers, final RMS norm and output head.
    pub fn stack(
        &self,
        weights: &mut WeightLoader,
        rope: impl Into<Option<Rope>>,
        geometry: Geometry,
        experts: ExpertNames,
        build_layer: impl FnMut(&mut WeightLoader, usize) -> Result<Layer>,
    ) -> Result<Stack> {
        let norm = |weights: &mut WeightLoader| self.norm(weights, "model.norm", self.hidden);
        self.stack_with(weights, rope, geometry, experts, build_layer, norm)
    }

    /// As [`stack`](Self::stack), with another final norm.
    pub fn stack_with(
        &self,
        weights: &mut WeightLoader,
        rope: impl Into<Option<Rope>>,
        geometry: Geometry,
        experts: ExpertNames,
        mut build_layer: impl FnMut(&mut WeightLoader, usize) -> Result<Layer>,
        norm: impl FnOnce(&mut WeightLoader) -> Result<Norm>,
    ) -> Result<Stack> {
        let (embed, tied) = self.embedding(weights)?;
        let layers = (0..self.layers).map(|layer| build_layer(weights, layer)).collect::<Result<_>>()?;
        let norm = norm(weights)?;
        let (head, factors) = self.head(weights, tied)?;
        let mtp = self.mtp.then(|| self.mtp_layer(weights, build_layer)).transpose()?;
        Ok(Stack {
            vocab: self.vocab,
            context: self.context,
            hidden: self.hidden,
            geometry,
            experts,
            embed,
            layers,
            norm,
            head,
            ropes: rope.into().into_iter().collect(),
            factors,
            encoder: None,
            mtp,
            streams: None,
            image_token: None,
        })
    }
}

/// The matmuls of attention that have biases.
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

/// Mask and rope of each layer, where the type of a layer decides on both; and the ropes.
pub struct TypedLayers {
    pub layers: Vec<(AttentionMask, Rotary)>,
    pub ropes: Vec<Rope>,
}

/// What the rope of a type of layers has where the config does not say.
pub struct TypedRope {
    pub theta: f64,
    /// Share of a head that is rotated in a config without `rope_parameters`.
    pub partial: f64,
}

impl TypedLayers {
    /// By `layer_types`, else full attention everywhere. The windows are `sliding_window` wide, which is `window` by
    /// default; `sliding` and `full` are the ropes of the two types.
    pub fn parse(
        config: &mut Config,
        basics: &Basics,
        window: usize,
        sliding: TypedRope,
        full: TypedRope,
    ) -> Result<Self> {
        let types = layer_types(config, basics.layers, &["sliding_attention", "full_attention"])?;
        let given = config.is_set("rope_parameters");
        let rope = |name, prefix, TypedRope { theta, partial }| {
            let partial = if given { 1.0 } else { partial };
            RopeType { name, prefix, older: None, head_dim: basics.head_dim, theta, partial, amplitude: None }
        };
        let kinds = [
            rope("sliding_attention", "rope_parameters.sliding_attention.", sliding),
            rope("full_attention", "rope_parameters.full_attention.", full),
        ];
        let (ropes, rotaries): (Vec<_>, Vec<_>) =
            Rope::parse_types(config, &kinds, basics.context)?.into_iter().unzip();
        let default = if config.contains("sliding_window") { None } else { Some(window) };
        let window = config.opt_size(&["sliding_window"])?.or(default);
        let types = types.unwrap_or_else(|| vec!["full_attention"; basics.layers]);
        if window.is_none() && types.contains(&"sliding_attention") {
            return Err(config_error("sliding_window is null, but layer_types names layers with sliding_attention"));
        }
        let layer = |kind: &str| match kind {
            "sliding_attention" => (sliding_window(window), rotaries[0]),
            _ => (AttentionMask::Causal, rotaries[1]),
        };
        Ok(TypedLayers { layers: types.into_iter().map(layer).collect(), ropes })
    }
}

/// `heads`, which the config states by `key`, checked against the number of layers and the heads of keys.
pub fn heads_of_layers(heads: Vec<usize>, key: &str, basics: &Basics) -> Result<Vec<usize>> {
    if heads.len() == basics.layers && heads.iter().all(|n| *n > 0 && n.is_multiple_of(basics.kv_heads)) {
        Ok(heads)
    } else {
        Err(config_error(format!(
            "{key} must have a multiple of the {} heads of keys for each of {} layers",
            basics.kv_heads, basics.layers
        )))
    }
}

/// Hands the object of each layer in `per_layer_config` to `read`; whether the config has any.
pub fn per_layer_config(
    config: &mut Config,
    layers: usize,
    mut read: impl FnMut(usize, &mut Config) -> Result<()>,
) -> Result<bool> {
    const KEY: &str = "per_layer_config";
    let Some(mut all) = config.opt_object(KEY, "per_layer_config.")? else { return Ok(false) };
    for layer in 0..layers {
        if let Some(mut own) = all.opt_object(&layer.to_string(), "per_layer_config.")? {
            read(layer, &mut own)?;
            own.finish();
        }
    }
    all.finish();
    Ok(true)
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
