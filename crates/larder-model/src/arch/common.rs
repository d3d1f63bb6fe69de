//! What most architectures say in the same words.

use larder_core::{ExpertNames, Gate, Geometry, LayerIdx};

use crate::config::{Config, bad};
use crate::decoder::{Factors, Ffn, Layer, Stack};
use crate::error::Result;
use crate::matrix::{Linear, Matrix};
use crate::nn::{
    Activation, Attention, AttentionShape, HeadNorm, Mixer, Mlp, MlpNames, Moe, Norm, Rope, Rotary, Visible,
};
use crate::weights::Weights;

/// More layers than any model has; each costs memory before a single tensor is read.
const MOST_LAYERS: usize = 2048;

/// The sizes that every config names.
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

/// What the reference implementation takes where a config names nothing.
#[derive(Clone, Copy)]
pub struct Defaults {
    /// Epsilon of the norms.
    pub eps: f64,
    /// Key and value heads; as many as query heads if `None`, and if the config says `null`.
    pub kv_heads: Option<usize>,
    /// Width of a head; the hidden size over the heads if `None`.
    pub head_dim: Option<usize>,
    /// Whether the embedding is the head.
    pub tied: bool,
}

impl Defaults {
    /// Those that most architectures share.
    pub const COMMON: Defaults = Defaults { eps: 1e-5, kv_heads: None, head_dim: None, tied: false };
}

impl Basics {
    /// `eps` names the key of the norms' epsilon.
    pub fn parse(c: &mut Config, eps: &str, defaults: Defaults) -> Result<Self> {
        let (hidden, heads) = (c.size(&["hidden_size"])?, c.size(&["num_attention_heads"])?);
        let own = |name: &str, default: Option<usize>| default.filter(|_| !c.names(name));
        let (default_dim, default_kv) =
            (own("head_dim", defaults.head_dim), own("num_key_value_heads", defaults.kv_heads));
        let head_dim = match c.opt_size(&["head_dim"])?.or(default_dim) {
            Some(dim) => dim,
            None if hidden.is_multiple_of(heads) => hidden / heads,
            None => return Err(bad(format!("hidden_size {hidden} is not a multiple of {heads} attention heads"))),
        };
        let kv_heads = c.size_or(&["num_key_value_heads"], default_kv.unwrap_or(heads))?;
        if !heads.is_multiple_of(kv_heads) {
            return Err(bad(format!("{heads} attention heads cannot share {kv_heads} key-value heads")));
        }
        let layers = c.size(&["num_hidden_layers"])?;
        if layers > MOST_LAYERS {
            return Err(bad(format!("num_hidden_layers is {layers}, more than {MOST_LAYERS}")));
        }
        Ok(Basics {
            vocab: c.size(&["vocab_size"])?,
            hidden,
            layers,
            context: c.size(&["max_position_embeddings"])?,
            heads,
            kv_heads,
            head_dim,
            eps: c.positive_or(eps, defaults.eps)?,
            act: Activation::named(c.opt_text("hidden_act")?.unwrap_or("silu"))?,
            tied: c.flag_or("tie_word_embeddings", defaults.tied)?,
            head_bias: false,
        })
    }

    /// The head of its own, or the embedding again.
    fn head(&self, w: &mut Weights, embed: &Matrix) -> Result<Linear> {
        if !self.tied {
            return w.linear("lm_head", self.vocab, self.hidden, self.head_bias);
        }
        let bias = if self.head_bias { Some(w.tensor("lm_head.bias", &[self.vocab])?) } else { None };
        Linear::new(embed.clone(), bias)
    }

    pub fn geometry(&self, moe_layers: Vec<usize>, experts: usize, top_k: usize, inter: usize) -> Result<Geometry> {
        if experts > u16::MAX as usize {
            return Err(bad(format!("{experts} experts per layer are more than {}", u16::MAX)));
        }
        let moe_layers = moe_layers.into_iter().map(|l| LayerIdx(l as u16)).collect();
        let (layers, hidden) = (self.layers, self.hidden);
        Ok(Geometry { layers, moe_layers, experts, top_k, hidden, inter, bias: false })
    }

    /// Plain attention below `prefix`: grouped queries, rotation in halves, every earlier position visible.
    pub fn attention(&self, w: &mut Weights, prefix: &str, bias: Bias, rotary: Rotary) -> Result<Attention> {
        self.attention_as(w, prefix, "o_proj", self.heads * self.head_dim, bias, rotary)
    }

    /// As [`attention`](Self::attention), with another name for the output product and another height of the query's.
    pub fn attention_as(
        &self,
        w: &mut Weights,
        prefix: &str,
        output: &str,
        query_rows: usize,
        bias: Bias,
        rotary: Rotary,
    ) -> Result<Attention> {
        let (mixed, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        Ok(Attention {
            shape: AttentionShape { heads: self.heads, kv_heads: self.kv_heads, head_dim: self.head_dim },
            q: w.linear(&format!("{prefix}.q_proj"), query_rows, self.hidden, bias.qkv)?,
            k: w.linear(&format!("{prefix}.k_proj"), kv, self.hidden, bias.qkv)?,
            v: w.linear(&format!("{prefix}.v_proj"), kv, self.hidden, bias.qkv)?,
            o: w.linear(&format!("{prefix}.{output}"), self.hidden, mixed, bias.o)?,
            norm: HeadNorm::No,
            clip: None,
            rotary: Some(rotary),
            visible: Visible::All,
            scale: (self.head_dim as f64).powf(-0.5),
            sinks: None,
            temperature: None,
            output_gate: false,
        })
    }

    /// `prefix.q_norm`, `prefix.k_norm`, each over a head.
    pub fn head_norm(&self, w: &mut Weights, prefix: &str) -> Result<HeadNorm> {
        let mut norm = |name: &str| Norm::rms(w, &format!("{prefix}.{name}"), self.head_dim, self.eps);
        Ok(HeadNorm::PerHead(norm("q_norm")?, norm("k_norm")?))
    }

    /// The experts of layer `l`: their router and nothing beside them.
    pub fn moe(&self, w: &mut Weights, l: usize, router: &str, gate: Gate) -> Result<Moe> {
        let router = w.linear(router, gate.experts, self.hidden, false)?;
        Ok(Moe { layer: LayerIdx(l as u16), router, gate, act: self.act, shared: None })
    }

    /// A dense MLP with the usual names.
    pub fn mlp(&self, w: &mut Weights, prefix: &str, inter: usize, bias: bool) -> Result<Mlp> {
        Mlp::new(w, prefix, &MlpNames::PROJ, (self.hidden, inter), self.act, bias)
    }

    /// A layer with the usual two norms below `prefix`.
    pub fn layer(&self, w: &mut Weights, prefix: &str, mixer: impl Mixer + 'static, ffn: Ffn) -> Result<Layer> {
        Ok(Layer {
            mixer_norm: Norm::rms(w, &format!("{prefix}.input_layernorm"), self.hidden, self.eps)?,
            mixer: Box::new(mixer),
            ffn_norm: Norm::rms(w, &format!("{prefix}.post_attention_layernorm"), self.hidden, self.eps)?,
            ffn,
        })
    }

    /// The usual model around its layers.
    pub fn stack(
        &self,
        w: &mut Weights,
        rope: Rope,
        geometry: Geometry,
        experts: ExpertNames,
        layer: impl FnMut(&mut Weights, usize) -> Result<Layer>,
    ) -> Result<Stack> {
        let norm = |w: &mut Weights| Norm::rms(w, "model.norm", self.hidden, self.eps);
        self.stack_with(w, rope, geometry, experts, layer, norm)
    }

    /// As [`stack`](Self::stack), with another final norm.
    pub fn stack_with(
        &self,
        w: &mut Weights,
        rope: Rope,
        geometry: Geometry,
        experts: ExpertNames,
        mut layer: impl FnMut(&mut Weights, usize) -> Result<Layer>,
        norm: impl FnOnce(&mut Weights) -> Result<Norm>,
    ) -> Result<Stack> {
        let embed = w.matrix("model.embed_tokens.weight", self.vocab, self.hidden)?;
        let layers = (0..self.layers).map(|l| layer(w, l)).collect::<Result<_>>()?;
        let norm = norm(w)?;
        let head = self.head(w, &embed)?;
        Ok(Stack {
            vocab: self.vocab,
            context: self.context,
            geometry,
            experts,
            embed,
            layers,
            norm,
            head,
            rope: Some(rope),
            factors: Factors::default(),
        })
    }
}

/// Which products of an attention have biases.
#[derive(Clone, Copy)]
pub struct Bias {
    pub qkv: bool,
    pub o: bool,
}

impl Bias {
    pub const NO: Bias = Bias { qkv: false, o: false };

    pub fn all(on: bool) -> Self {
        Bias { qkv: on, o: on }
    }
}

/// A window of `width`, or everything.
pub fn window(width: Option<usize>) -> Visible {
    width.map_or(Visible::All, Visible::Window)
}

/// The kinds of layers that a config lists, checked against their number and the names that are known.
pub fn layer_types<'a>(c: &mut Config<'a>, layers: usize, known: &[&str]) -> Result<Option<Vec<&'a str>>> {
    let Some(types) = c.opt_texts("layer_types")? else { return Ok(None) };
    if types.len() != layers {
        return Err(bad(format!("layer_types names {} layers of {layers}", types.len())));
    }
    match types.iter().find(|t| !known.contains(t)) {
        Some(other) => Err(bad(format!("layer type '{other}' is unknown; known are {}", known.join(" and ")))),
        None => Ok(Some(types)),
    }
}

/// Which layers have experts, as the Qwen family says it.
pub fn sparse_layers(c: &mut Config, layers: usize) -> Result<Vec<usize>> {
    let step = c.size_or(&["decoder_sparse_step"], 1)?;
    let dense = c.opt_counts("mlp_only_layers")?.unwrap_or_default();
    Ok((0..layers).filter(|l| !dense.contains(l) && (l + 1).is_multiple_of(step)).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_absent_is_the_references_default_and_null_is_derived() {
        let defaults = Defaults { eps: 1e-6, kv_heads: Some(2), head_dim: Some(24), tied: true };
        let parse = |extra: serde_json::Value| {
            let mut config = json!({
                "vocab_size": 10, "hidden_size": 64, "num_attention_heads": 4,
                "num_hidden_layers": 1, "max_position_embeddings": 16
            });
            config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let b = Basics::parse(&mut Config::new(&config).unwrap(), "rms_norm_eps", defaults).unwrap();
            (b.kv_heads, b.head_dim, b.eps, b.tied)
        };
        assert_eq!(parse(json!({})), (2, 24, 1e-6, true));
        assert_eq!(parse(json!({"num_key_value_heads": null, "head_dim": null})), (4, 16, 1e-6, true));
        let given = json!({"num_key_value_heads": 1, "head_dim": 8, "rms_norm_eps": 0.5, "tie_word_embeddings": false});
        assert_eq!(parse(given), (1, 8, 0.5, false));
    }
}
