//! Hyperparameters of a model from the metadata of a GGUF file, with the defaults of llama.cpp for missing keys.

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use super::{metadata::Metadata, reader::shortest, rope_factors::RopeFactors, stored::HubTensor};
use crate::error::{Result, StoreError, StoreErrorKind};

/// Keys and values of a config.
pub(super) type Keys = Map<String, Value>;

/// The keys and values of a JSON object.
pub(super) fn keys(value: Value) -> Keys {
    match value {
        Value::Object(keys) => keys,
        _ => Keys::new(),
    }
}

/// GGUF's numbers of the router's score functions (`expert_gating_func`).
pub(super) const SOFTMAX_SCORES: u64 = 1;
pub(super) const SIGMOID_SCORES: u64 = 2;
pub(super) const SQRT_SOFTPLUS_SCORES: u64 = 4;

/// The `rope_scaling` of the config as an object that other keys can be added to.
pub(super) fn rope_object(scaling: Value) -> Keys {
    match keys(scaling) {
        none if none.is_empty() => keys(json!({ "rope_type": "default" })),
        some => some,
    }
}

/// The share of a head of `width` values that is `rotated`, from which the number of them can be computed again.
pub(super) fn share(rotated: u64, width: u64) -> f64 {
    let share = rotated as f64 / width as f64;
    if (share * width as f64) as u64 == rotated { share } else { share.next_up() }
}

/// Factor on the cosines and sines of Phi-3.5-MoE (`short_mscale` and `long_mscale`). GGUF has no key for it: under
/// `rope.scaling.attn_factor`, llama.cpp's converter writes what other longrope models derive from their context.
const PHI_AMPLITUDE: f64 = 1.243163121016122;

/// The `rope_scaling` that divides frequencies by the first list in sequences up to `original` tokens, and by the
/// second in longer ones.
fn longrope([short, long]: [&[f32]; 2], original: u64, amplitude: f64) -> Value {
    let list = |factors: &[f32]| factors.iter().map(|f| shortest(*f)).collect::<Vec<_>>();
    json!({
        "rope_type": "longrope",
        "short_factor": list(short),
        "long_factor": list(long),
        "short_mscale": amplitude,
        "long_mscale": amplitude,
        "original_max_position_embeddings": original,
    })
}

/// Number of the file's blocks that are decoder layers; the others are for multi-token prediction.
pub(super) fn layer_count(metadata: &Metadata) -> Result<u64> {
    let number = |key: &str| metadata.uint(&metadata.under_architecture(key)?);
    let blocks = metadata.need("block_count", number("block_count")?)?;
    let predicting = number("nextn_predict_layers")?.unwrap_or(0);
    blocks.checked_sub(predicting).filter(|layers| *layers > 0).ok_or_else(|| {
        let what = format!(
            "has {blocks} blocks, of which {predicting} are for multi-token prediction; no decoder layer is left"
        );
        StoreError::new(StoreErrorKind::Mismatch, metadata.path(), what)
    })
}

/// Reads hyperparameters by key; keys are relative to the architecture's name.
pub(super) struct Hyperparameters<'a> {
    pub metadata: &'a Metadata,
    tensors: &'a HashMap<String, HubTensor>,
    rope_factors: &'a RopeFactors,
}

impl<'a> Hyperparameters<'a> {
    pub fn of(metadata: &'a Metadata, tensors: &'a HashMap<String, HubTensor>, rope_factors: &'a RopeFactors) -> Self {
        Hyperparameters { metadata, tensors, rope_factors }
    }

    pub fn layers(&self) -> Result<u64> {
        layer_count(self.metadata)
    }

    /// The config keys that most architectures have.
    pub fn common(&self) -> Result<Keys> {
        let heads = self.heads()?;
        let arch = self.metadata.architecture()?;
        let shared_heads = match arch {
            "bailingmoe3" | "gemma4" | "glm5-next" | "granitehybrid" | "jamba" | "kimi-linear" | "lfm2moe"
            | "mimo2" | "nemotron_h_moe" | "step35" => Value::Null,
            _ => self.uint_or("attention.head_count_kv", heads)?.into(),
        };
        let id = |what: &str| self.metadata.uint(&format!("tokenizer.ggml.{what}_token_id"));
        Ok(keys(json!({
            "vocab_size": self.vocabulary()?,
            "hidden_size": self.uint("embedding_length")?,
            "num_hidden_layers": self.layers()?,
            "num_attention_heads": heads,
            "num_key_value_heads": shared_heads,
            "hidden_act": "silu",
            "max_position_embeddings": self.uint("context_length")?,
            "rms_norm_eps": self.rms_epsilon()?,
            "rope_theta": self.opt_float("rope.freq_base")?.unwrap_or(10000.0),
            "rope_scaling": self.rope_scaling()?,
            "tie_word_embeddings": !self.has("lm_head.weight"),
            "bos_token_id": id("bos")?,
            "eos_token_id": id("eos")?,
            "pad_token_id": id("padding")?,
        })))
    }

    /// The epsilon of RMS norms, under either of its names.
    pub fn rms_epsilon(&self) -> Result<f64> {
        match self.opt_float("attention.layer_norm_rms_epsilon")? {
            Some(eps) => Ok(eps),
            None if self.metadata.architecture()? == "nemotron_h_moe" => self.float("attention.layer_norm_epsilon"),
            None => self.float("attention.layer_norm_rms_epsilon"),
        }
    }

    fn vocabulary(&self) -> Result<usize> {
        let rows = self.rows("model.embed_tokens.weight").ok_or_else(|| {
            StoreError::new(StoreErrorKind::Missing, self.metadata.path(), "has no tensor 'token_embd.weight'")
        })?;
        match self.metadata.texts("tokenizer.ggml.tokens")? {
            Some(tokens) if tokens.len() != rows => {
                let what = format!("has {} tokens, but {rows} rows in 'token_embd.weight'", tokens.len());
                Err(StoreError::new(StoreErrorKind::Mismatch, self.metadata.path(), what))
            }
            _ => Ok(rows),
        }
    }

    /// The keys of feed-forward parts with the gate of DeepSeek-V3.
    pub fn deepseek_ffn(&self) -> Result<Keys> {
        Ok(keys(json!({
            "intermediate_size": self.uint("feed_forward_length")?,
            "moe_intermediate_size": self.uint("expert_feed_forward_length")?,
            "n_routed_experts": self.uint("expert_count")?,
            "n_shared_experts": self.uint("expert_shared_count")?,
            "num_experts_per_tok": self.uint("expert_used_count")?,
            "first_k_dense_replace": self.uint_or("leading_dense_block_count", 0)?,
            "n_group": self.uint_or("expert_group_count", 1)?,
            "topk_group": self.uint_or("expert_group_used_count", 1)?,
            "norm_topk_prob": self.flag_or("expert_weights_norm", false)?,
            "routed_scaling_factor": self.scale()?,
        })))
    }

    pub fn qwen(&self, model_type: &str, normalised: bool) -> Result<Keys> {
        let (dense, used) = (self.uint("feed_forward_length")?, self.uint("expert_used_count")?);
        let width = match self.opt_uint("expert_feed_forward_length")?.filter(|w| *w > 0) {
            Some(width) => width,
            None => dense.checked_div(used).unwrap_or(0),
        };
        Ok(keys(json!({
            "model_type": model_type,
            "intermediate_size": dense,
            "moe_intermediate_size": width,
            "num_experts": self.uint("expert_count")?,
            "num_experts_per_tok": used,
            "norm_topk_prob": self.flag_or("expert_weights_norm", normalised)?,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "use_sliding_window": false,
        })))
    }

    pub fn rope_scaling(&self) -> Result<Value> {
        self.rope_scaling_of(None)
    }

    /// As [`rope_scaling`](Self::rope_scaling); `pairs` of each head are divided by a tensor of the file, or as many as
    /// it has.
    pub fn rope_scaling_of(&self, pairs: Option<u64>) -> Result<Value> {
        let factor = match self.opt_float("rope.scaling.factor")? {
            None => self.opt_float("rope.scale_linear")?,
            some => some,
        };
        let factor = factor.filter(|f| *f != 0.0).unwrap_or(1.0);
        match self.divided_frequencies(pairs)? {
            Some(_) if factor != 1.0 => return Err(self.unsupported("scales RoPE both by a factor and by tensors")),
            Some(divided) => return Ok(divided),
            None => {}
        }
        match self.metadata.text(&self.key("rope.scaling.type")?)?.unwrap_or("linear") {
            "none" => Ok(Value::Null),
            "linear" if factor == 1.0 => Ok(Value::Null),
            "linear" => Ok(json!({ "rope_type": "linear", "factor": factor })),
            "yarn" => self.yarn(factor),
            other => Err(self.unsupported(format!("uses the RoPE scaling '{other}', which is not supported"))),
        }
    }

    /// RoPE whose frequencies are divided by tensors of the file: one list of divisors, or one for sequences up to the
    /// original context and one for longer sequences.
    fn divided_frequencies(&self, pairs: Option<u64>) -> Result<Option<Value>> {
        let cut = |all: &'a [f32]| pairs.map_or(all, |pairs| &all[..all.len().min(pairs as usize)]);
        let factors = |name: &str| self.rope_factors.of(name).map(cut);
        let context = self.uint("context_length")?;
        if let Some(all) = factors("rope_freqs.weight") {
            return Ok(Some(longrope([all, all], context, 1.0)));
        }
        let original = self.uint_or("rope.scaling.original_context_length", context)?;
        match [factors("rope_factors_short.weight"), factors("rope_factors_long.weight")] {
            [Some(short), Some(long)] => Ok(Some(longrope([short, long], original, PHI_AMPLITUDE))),
            [None, None] => Ok(None),
            _ => Err(self.unsupported("has only one of the tensors 'rope_factors_long' and 'rope_factors_short'")),
        }
    }

    fn yarn(&self, factor: f64) -> Result<Value> {
        if self.opt_float("rope.scaling.yarn_ext_factor")?.is_some_and(|f| f != 1.0) {
            return Err(self.unsupported("sets its own YaRN extrapolation factor, which is not supported"));
        }
        let mut yarn = keys(json!({
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self.uint_or("rope.scaling.original_context_length", self.uint("context_length")?)?,
        }));
        let mut set = |name: &str, value: Option<f64>| {
            yarn.extend(value.map(|v| (name.to_owned(), v.into())));
        };
        set("beta_fast", self.opt_float("rope.scaling.yarn_beta_fast")?);
        set("beta_slow", self.opt_float("rope.scaling.yarn_beta_slow")?);
        let times = self.opt_float("rope.scaling.attn_factor")?.filter(|f| *f != 1.0);
        let given = self.opt_float("rope.scaling.yarn_attn_factor")?;
        set("attention_factor", given.or(times.map(|t| t * (0.1 * factor.ln() + 1.0))));
        if ["deepseek2", "deepseek32", "glm-dsa", "mistral4"].contains(&self.metadata.architecture()?) {
            // GGUF stores a tenth of the hub's value; rounding removes the error of the division.
            let mscale = self.opt_float("rope.scaling.yarn_log_multiplier")?.map(|m| (m * 1e7).round() / 1e6);
            set("mscale", mscale);
            set("mscale_all_dim", mscale);
        }
        if self.metadata.architecture()? == "gpt-oss" {
            yarn.insert("truncate".into(), false.into());
        }
        Ok(Value::Object(yarn))
    }

    /// The query heads; where layers have different numbers of them, the largest.
    pub fn heads(&self) -> Result<u64> {
        let per_layer = self.metadata.ints(&self.key("attention.head_count")?);
        let heads = match per_layer.ok().flatten().and_then(|all| all.iter().max()) {
            Some(most) => u64::try_from(*most).unwrap_or(0),
            None => self.uint("attention.head_count")?,
        };
        self.metadata.need("attention.head_count above 0", Some(heads).filter(|h| *h > 0))
    }

    fn derived_head_dim(&self) -> Result<u64> {
        Ok(self.uint("embedding_length")? / self.heads()?)
    }

    pub fn head_dim(&self) -> Result<u64> {
        let keys = self.uint_or("attention.key_length", self.derived_head_dim()?)?;
        match self.opt_uint("attention.value_length")? {
            Some(values) if values != keys => Err(self.unsupported(format!(
                "has a key length of {keys} and a value length of {values}, which must be equal"
            ))),
            _ if keys == 0 => Err(self.unsupported("has a head size of 0")),
            _ => Ok(keys),
        }
    }

    /// The head size, if it is not the hidden size divided by the number of heads.
    pub fn unusual_head_dim(&self) -> Result<Option<u64>> {
        let usual = self.derived_head_dim()?;
        Ok(Some(self.head_dim()?).filter(|d| *d != usual))
    }

    /// Checks that the head size is the usual one, because the config of the architecture has no key for another.
    pub fn usual_head_dim(&self) -> Result<()> {
        self.whole_heads_rotate()?;
        match self.unusual_head_dim()? {
            None => Ok(()),
            Some(odd) => {
                Err(self.unsupported(format!("has a head size of {odd}, which its architecture does not support")))
            }
        }
    }

    pub fn whole_heads_rotate(&self) -> Result<()> {
        let whole = self.head_dim()?;
        match self.uint_or("rope.dimension_count", whole)? {
            rotated if rotated == whole => Ok(()),
            rotated => Err(self.unsupported(format!(
                "applies RoPE to {rotated} of {whole} values per head, which its architecture does not support"
            ))),
        }
    }

    /// Checks that all layers have the same base of RoPE.
    pub fn one_rope_base(&self) -> Result<()> {
        let base = self.opt_float("rope.freq_base")?;
        match self.opt_float("rope.freq_base_swa")?.filter(|of_windows| Some(*of_windows) != base) {
            None => Ok(()),
            Some(_) => {
                Err(self.unsupported("has a RoPE base of its own for layers with windows, which is not supported"))
            }
        }
    }

    pub fn scores_are(&self, wanted: u64) -> Result<()> {
        match self.uint_or("expert_gating_func", wanted)? {
            scores if scores == wanted => Ok(()),
            other => Err(self.unsupported(format!(
                "uses the expert gating function {other}, which its architecture does not support"
            ))),
        }
    }

    pub fn expert_width(&self) -> Result<u64> {
        match self.opt_uint("expert_feed_forward_length")?.filter(|w| *w > 0) {
            Some(width) => Ok(width),
            None => self.uint("feed_forward_length"),
        }
    }

    /// The number of shared experts, by their joint width.
    pub fn shared_experts(&self) -> Result<u64> {
        let width = self.uint("expert_feed_forward_length")?;
        let shared = self.uint_or("expert_shared_feed_forward_length", width)?;
        let count = shared.checked_div(width).filter(|count| count * width == shared);
        self.metadata.need("shared experts as wide as whole experts", count)
    }

    pub fn scale(&self) -> Result<f64> {
        Ok(self.opt_float("expert_weights_scale")?.filter(|s| *s != 0.0).unwrap_or(1.0))
    }

    /// The divisors of RoPE's frequencies in a tensor of the file.
    pub fn rope_divisors(&self, tensor: &str) -> Option<&[f32]> {
        self.rope_factors.of(tensor)
    }

    /// The rows of a tensor, if the file has it.
    pub fn rows(&self, tensor: &str) -> Option<usize> {
        self.tensors.get(tensor).and_then(|tensor| tensor.meta.shape.first()).copied()
    }

    pub fn has(&self, tensor: &str) -> bool {
        self.tensors.contains_key(tensor)
    }

    /// Whether the name of a tensor ends so.
    pub fn has_suffix(&self, end: &str) -> bool {
        self.tensors.keys().any(|name| name.ends_with(end))
    }

    pub fn key(&self, key: &str) -> Result<String> {
        self.metadata.under_architecture(key)
    }

    pub fn opt_uint(&self, key: &str) -> Result<Option<u64>> {
        self.metadata.uint(&self.key(key)?)
    }

    pub fn uint(&self, key: &str) -> Result<u64> {
        self.metadata.need(&self.key(key)?, self.opt_uint(key)?)
    }

    pub fn uint_or(&self, key: &str, default: u64) -> Result<u64> {
        Ok(self.opt_uint(key)?.unwrap_or(default))
    }

    pub fn opt_float(&self, key: &str) -> Result<Option<f64>> {
        self.metadata.float(&self.key(key)?)
    }

    pub fn float(&self, key: &str) -> Result<f64> {
        self.metadata.need(&self.key(key)?, self.opt_float(key)?)
    }

    pub fn flag_or(&self, key: &str, default: bool) -> Result<bool> {
        Ok(self.metadata.flag(&self.key(key)?)?.unwrap_or(default))
    }

    pub fn unsupported(&self, what: impl Into<String>) -> StoreError {
        StoreError::new(StoreErrorKind::Unsupported, self.metadata.path(), what)
    }
}
