//! Qwen4 (experimental), as in Qwen3.8-Flash-Next: the layers of Qwen3.5 on several residual streams, features of
//! n-grams, indexed attention.
//!
//! ```text
//! x_i = embedding                                     each of the streams
//! x += features(n-grams, x)                           in some layers, for all streams at once
//! x_i += a_i · gated_delta_net(mix(x))                linear attention; three of four layers
//! x_i += a_i · sigmoid(gate) · attention(mix(x))      the others, to the blocks of positions that an indexer chooses
//! x_i += a_i · (Σ_k weight · expert(y) + sigmoid(gate(y)) · shared(y))    y = mix(x); softmax, top k
//! logits = head(mix(x))
//! ```
//!
//! Each `mix` normalises the streams and has weights of its own, as the `a_i` that are made of its input.

use larder_core::{ExpertNames, Gate};

use super::common::{AttentionBias, Basics, Defaults, layer_types};
use super::qwen2_moe::with_shared;
use super::qwen3_5_moe::{IMAGE_TOKEN, SECTIONS};
use super::qwen3_next::{attention, delta_shape};
use crate::config::{Config, config_error};
use crate::error::{ModelError, Result};
use crate::nn::{
    Attention, AttentionIndexer, BlockIndexer, BlockIndexerShape, CausalConv, DeltaForm, DeltaShape, GatedDeltaNet,
    IndexProducts, LowRankConnection, LowRankMixer, LowRankShape, Mixer, NGramFeatures, NGramHash, NGramShape, Norm,
    Rope, primes,
};
use crate::ops::{Activation, GateFunction, Rotary};
use crate::stack::{Branch, Ffn, Layer, Stack, Streams};
use crate::weights::WeightLoader;

/// Upper limit of the heads of all tables, far above any model: the rows of each are a prime number, which is searched
/// for.
const MAX_HEADS: usize = 4096;

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(2), head_dim: Some(256), ..Defaults::COMMON };
    let basics = Basics { norms_less_one: true, ..Basics::parse(config, "rms_norm_eps", defaults)? };
    if basics.act != Activation::Silu {
        return Err(config_error("hidden_act must be silu for this model"));
    }
    config.only("attn_output_gate", true);
    // The reference computes in f32 and has experts in every layer, whatever these say; the files say how a table is
    // stored.
    config.ignore(&[
        "mamba_ssm_dtype",
        "mlp_only_layers",
        "decoder_sparse_step",
        "intermediate_size",
        "number_of_conv_states",
        "ple_embedding_dtype",
    ]);
    let (rope, rotary) = Rope::parse_with_sections(config, basics.head_dim, 1e4, basics.context, Some(1.0), SECTIONS)?;
    let image_token = config.opt_token("image_token_id")?.unwrap_or(IMAGE_TOKEN);
    let linear = linear_layers(config, basics.layers)?;
    let delta = DeltaShape { gate: output_gate(config)?, ..delta_shape(config, DeltaForm::Separate)? };
    let bias = AttentionBias::all(config.flag_or("attention_bias", false)?);
    let shape = stream_shape(config, &basics)?;
    let (indexer, blocks_rope) = (IndexerConfig::parse(config, &linear, (&rope, rotary))?, rope.clone());
    let tables = NGramTables::parse(config, &basics, &linear, image_token)?;
    let experts = config.size_or(&["num_experts", "num_local_experts"], 512)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 10)?;
    let gate = Gate::softmax(experts, top_k, config.flag_or("norm_topk_prob", true)?).checked()?;
    let inter = config.size_or(&["moe_intermediate_size"], 512)?;
    let shared_width = config.size_or(&["shared_expert_intermediate_size"], 512)?;

    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, inter)?;
    let names = ExpertNames::separate("model.layers.{l}.mlp.experts", "gate_proj", "up_proj", "down_proj");
    let build_layer = |weights: &mut WeightLoader, layer: usize| {
        let prefix = format!("model.layers.{layer}");
        let mixer: Box<dyn Mixer> = if linear[layer] {
            let prefix = format!("{prefix}.linear_attn");
            Box::new(GatedDeltaNet::new(weights, &prefix, basics.hidden, delta, basics.eps)?)
        } else {
            let prefix = format!("{prefix}.self_attn");
            let gated = attention(&basics, weights, &prefix, bias, rotary)?;
            let indexer = indexer.load(&basics, weights, &format!("{prefix}.indexer"), (&blocks_rope, rotary))?;
            Box::new(Attention { indexer: Some(Box::new(AttentionIndexer::Blocks(indexer))), ..gated })
        };
        let ffn = Ffn::moe(with_shared(&basics, weights, layer, gate.clone(), shared_width)?);
        let [of_mixer, of_ffn] = ["attn", "mlp"].map(|part| {
            let prefix = format!("{prefix}.{part}_hyper_connection");
            let norm = stream_norm(&basics, weights, &format!("{prefix}.hc_norm"), shape)?;
            LowRankConnection::new(weights, &prefix, shape, norm)
        });
        Ok(Layer::new(connected(mixer, of_mixer?), connected(ffn, of_ffn?)))
    };
    let stack = basics.stack_with(weights, rope, geometry, names, build_layer, |_| Ok(Norm::None))?;
    let mut stack = Stack { image_token: Some(image_token), ..stack };
    let prefix = "model.hyper_connection_mixer";
    let norm = stream_norm(&basics, weights, &format!("{prefix}.hc_norm"), shape)?;
    let merge = Box::new(LowRankMixer::new(weights, prefix, shape, norm)?);
    stack.streams = Some(Streams { count: shape.streams, merge });
    // From the last on, so that the numbers of those before stay right.
    for (index, layer) in tables.layers.iter().enumerate().rev() {
        let features = tables.features(&basics, weights, shape, (index, *layer))?;
        stack.layers.insert(*layer, Layer::beginning_next(features));
    }
    Ok(stack)
}

/// A size that is small in any model, so that products with it do not overflow.
fn few(key: &str, size: usize) -> Result<usize> {
    match size {
        0..=64 => Ok(size),
        _ => Err(config_error(format!("{key} is {size}; at most 64 are supported"))),
    }
}

/// A part of a layer that reads and writes all streams.
fn connected<Part>(part: Part, connection: LowRankConnection) -> Branch<Part> {
    Branch { connection: Some(Box::new(connection)), ..Branch::new(Norm::None, part) }
}

/// The RMS norm `name` over each stream.
fn stream_norm(basics: &Basics, weights: &mut WeightLoader, name: &str, shape: LowRankShape) -> Result<Norm> {
    Ok(basics.norm(weights, name, shape.streams * shape.hidden)?.of_groups(shape.hidden))
}

fn stream_shape(config: &mut Config, basics: &Basics) -> Result<LowRankShape> {
    let streams = few("hc_count", config.size_or(&["hc_count"], 4)?)?;
    let rank = config.size_or(&["hc_lowrank"], 320)?;
    match streams {
        1 => Err(config_error("hc_count is 1; this model has at least two streams")),
        _ => Ok(LowRankShape { streams, hidden: basics.hidden, rank }),
    }
}

/// The function of the output gate of linear attention, which is `hidden_act` by default.
fn output_gate(config: &mut Config) -> Result<GateFunction> {
    match config.opt_text("output_gate_type")?.unwrap_or("silu") {
        "silu" => Ok(GateFunction::Silu),
        "sigmoid" => Ok(GateFunction::Sigmoid),
        other => {
            Err(config_error(format!("output_gate_type '{other}' is not supported; supported are silu and sigmoid")))
        }
    }
}

fn linear_layers(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let every = config.size_or(&["full_attention_interval"], 4)?;
    let types = layer_types(config, layers, &["linear_attention", "full_attention", "indexed_attention"])?;
    let is_linear = |layer: usize| match &types {
        Some(types) => types[layer] == "linear_attention",
        None => !(layer + 1).is_multiple_of(every),
    };
    Ok((0..layers).map(is_linear).collect())
}

/// The indexer of all layers with attention.
struct IndexerConfig {
    shape: BlockIndexerShape,
    /// Whether the matmuls of queries and keys are apart, as in GGUF.
    split: bool,
}

impl IndexerConfig {
    fn parse(config: &mut Config, linear: &[bool], (rope, rotary): (&Rope, Rotary)) -> Result<Self> {
        let mut size = |name| config.opt_size(&[name]);
        let sizes = [size("indexer_n_heads")?, size("indexer_head_dim")?, size("indexer_budget")?];
        let (tokens, keys) = (size("indexer_compress_ratio")?, size("indexer_kv_heads")?);
        let split = config.flag_or("split_index_qk", false)?;
        if linear.iter().all(|linear| *linear) {
            let shape = BlockIndexerShape { heads: 1, width: 1, tokens: 1, blocks: 1 };
            return Ok(IndexerConfig { shape, split });
        }
        let ([Some(heads), Some(width), Some(budget)], Some(tokens), Some(1)) = (sizes, tokens, keys) else {
            return Err(config_error(
                "indexer_n_heads, indexer_head_dim, indexer_budget, indexer_compress_ratio and indexer_kv_heads, which is 1, must be \
                 given",
            ));
        };
        if !budget.is_multiple_of(tokens) || rotary.dim > width {
            return Err(config_error(format!(
                "indexer_budget {budget} is not a multiple of indexer_compress_ratio {tokens}, or indexer_head_dim {width} is less \
                 than the {} values that are rotated",
                rotary.dim
            )));
        }
        if !rope.same_angles(1, usize::MAX) {
            return Err(config_error("rope scaling by the length of the sequence is not supported for this model"));
        }
        Ok(IndexerConfig { shape: BlockIndexerShape { heads, width, tokens, blocks: budget / tokens }, split })
    }

    /// The indexer below `prefix`.
    fn load(
        &self,
        basics: &Basics,
        weights: &mut WeightLoader,
        prefix: &str,
        (rope, rotary): (&Rope, Rotary),
    ) -> Result<BlockIndexer> {
        let BlockIndexerShape { heads, width, .. } = self.shape;
        let mut linear = |name, rows| weights.linear(&format!("{prefix}.{name}"), rows, basics.hidden, false);
        let products = if self.split {
            IndexProducts::Apart(linear("q_proj", heads * width)?, linear("k_proj", width)?)
        } else {
            IndexProducts::Joined(linear("index_qk_proj", (heads + 1) * width)?)
        };
        Ok(BlockIndexer {
            shape: self.shape,
            products,
            query_norm: basics.norm(weights, &format!("{prefix}.q_layernorm"), width)?,
            key_norm: basics.norm(weights, &format!("{prefix}.k_layernorm"), width)?,
            rope: rope.clone(),
            rotary,
        })
    }
}

/// The tables of n-grams, one for each layer that has features of them.
struct NGramTables {
    /// These layers, ascending.
    layers: Vec<usize>,
    /// Tokens of the longest n-gram.
    longest: usize,
    /// Rows of a token.
    heads: usize,
    /// Width of all rows of a token.
    embedded: usize,
    /// Rows of each table.
    rows: Vec<usize>,
    /// Width of the convolution.
    conv: usize,
    /// The token that ends a text.
    end: u32,
    /// The token that stands for those of images.
    image_token: u32,
    /// The integers of the one table, where the config has them: it is one from GGUF.
    given: Option<[Vec<i64>; 3]>,
}

/// The integers of a table, by their keys in a config from GGUF and their names in the weights of others: multipliers
/// of the hash, first row and number of rows of each head.
const INTEGERS: [(&str, &str); 3] = [
    ("ngram_multipliers", "layer_multipliers"),
    ("ngram_heads_offsets", "ngram_heads_offsets"),
    ("ngram_heads_vocab_sizes", "ngram_heads_vocab_sizes"),
];

impl NGramTables {
    fn parse(config: &mut Config, basics: &Basics, linear: &[bool], image_token: u32) -> Result<Self> {
        // The multipliers that follow from the seed are stored, and parts of a table are joined when they are read.
        config.ignore(&["seed", "split_ngram_parts"]);
        let mut ids = config.opt_counts("ple_layer_ids")?.unwrap_or_default();
        ids.sort_unstable();
        ids.dedup();
        if let Some(id) = ids.iter().find(|id| **id == 0 || !linear.get(**id - 1).is_some_and(|linear| *linear)) {
            let what = format!("ple_layer_ids names layer {id}, counted from 1, which is none with linear attention");
            return Err(config_error(what));
        }
        let longest = few("ngram_size", config.size_or(&["ngram_size"], 3)?)?;
        let heads = (longest - 1) * config.size_or(&["heads_per_ngram"], 8)?;
        let embedded = config.size_or(&["ple_embed_dim"], basics.hidden)?;
        let base = config.wide_size_or("ngram_vocab_size_base", 20_000_000)?;
        let divisor = config.wide_size_or("make_ngram_vocab_size_divisible_by", 128)?;
        let conv = config.size_or(&["ple_conv_kernel_size"], 4)?;
        let end = if ids.is_empty() { None } else { config.opt_token("eos_token_id")? };
        let given = INTEGERS.map(|(key, _)| config.opt_integers(key));
        let given = given.into_iter().collect::<Result<Option<Vec<_>>>>()?.and_then(|given| given.try_into().ok());
        let given_rows = config.wide_size_or("ngram_table_rows", 1)?;
        let mut tables = NGramTables {
            layers: ids.iter().map(|id| id - 1).collect(),
            longest,
            heads,
            embedded,
            rows: vec![],
            conv,
            end: end.unwrap_or_default(),
            image_token,
            given,
        };
        if !tables.layers.is_empty() {
            tables.check(end)?;
            tables.rows = match tables.given {
                Some(_) => vec![given_rows as usize],
                None => table_rows(tables.layers.len(), heads, base, divisor)?,
            };
        }
        Ok(tables)
    }

    fn check(&self, end: Option<u32>) -> Result<()> {
        let NGramTables { layers, longest, heads, embedded, .. } = self;
        if end.is_none() {
            return Err(config_error("eos_token_id is missing, which n-grams end with"));
        }
        if *heads == 0 || !embedded.is_multiple_of(*heads) || layers.len().saturating_mul(*heads) > MAX_HEADS {
            return Err(config_error(format!(
                "ple_embed_dim {embedded} cannot be divided among the {heads} heads of n-grams of up to {longest} tokens"
            )));
        }
        match &self.given {
            Some(given) if layers.len() > 1 || given.each_ref().map(Vec::len) != [*longest, *heads, *heads] => {
                Err(config_error("ngram_multipliers and the like must be those of the n-grams of one layer"))
            }
            _ => Ok(()),
        }
    }

    /// The features of the `index`-th table in layer `layer`.
    fn features(
        &self,
        basics: &Basics,
        weights: &mut WeightLoader,
        LowRankShape { streams, hidden, .. }: LowRankShape,
        (index, layer): (usize, usize),
    ) -> Result<NGramFeatures> {
        let NGramTables { longest, heads, embedded, .. } = *self;
        let shape = NGramShape { streams, hidden, longest, heads, row: embedded / heads };
        let (prefix, width) = (format!("model.layers.{layer}.ple"), streams * hidden);
        let table = match self.given {
            Some(_) => "model.ngram_embedding.weight".to_owned(),
            None => format!("{prefix}.ple_embedding.ngram_embedding.weight"),
        };
        let norms = ["norm_key", "norm_query", "norm_conv"]
            .map(|name| basics.norm(weights, &format!("{prefix}.{name}"), width));
        let [key_norm, query_norm, conv_norm] = norms;
        Ok(NGramFeatures {
            shape,
            hash: self.hash(weights, &prefix, self.rows[index])?,
            image_token: self.image_token,
            table: weights.rows(&table, self.rows[index], shape.row)?,
            key: weights.linear(&format!("{prefix}.key_proj"), width, embedded, false)?,
            value: weights.linear(&format!("{prefix}.value_proj"), hidden, embedded, false)?,
            norms: [key_norm?, query_norm?, conv_norm?].map(|norm| norm.of_groups(hidden)),
            conv: CausalConv::new(weights, &format!("{prefix}.conv1d"), width, self.conv, false)?.dilated(longest),
        })
    }

    /// The hash of the table with `rows` rows below `prefix`.
    fn hash(&self, weights: &mut WeightLoader, prefix: &str, rows: usize) -> Result<NGramHash> {
        let [multipliers, firsts, sizes] = match &self.given {
            Some(given) => given.clone(),
            None => {
                let mut load = |which: usize, count| {
                    weights.integers(&format!("{prefix}.ple_embedding.{}", INTEGERS[which].1), &[count])
                };
                [load(0, self.longest)?, load(1, self.heads)?, load(2, self.heads)?]
            }
        };
        let head = |(size, first): (i64, i64)| {
            let end = first.checked_add(size).filter(|_| size > 0)?;
            (end as u64 <= rows as u64).then_some((size, u32::try_from(first).ok()?))
        };
        let heads: Option<Vec<_>> = sizes.into_iter().zip(firsts).map(head).collect();
        let heads = heads.ok_or_else(|| {
            ModelError::Weights(format!("{prefix}.ple_embedding has heads that do not fit into a table of {rows} rows"))
        })?;
        Ok(NGramHash::new(multipliers, heads, self.end))
    }
}

/// Rows of each of `tables` tables: those of all heads, each a prime number of its own from `base` on, padded to a
/// multiple of `divisor`.
fn table_rows(tables: usize, heads: usize, base: u64, divisor: u64) -> Result<Vec<usize>> {
    let sizes = primes(base, tables * heads);
    let rows = sizes.chunks_exact(heads).map(|sizes| sizes.iter().sum::<u64>().next_multiple_of(divisor));
    let rows: Vec<_> = rows.collect();
    match rows.iter().find(|rows| **rows > u64::from(u32::MAX)) {
        Some(rows) => Err(config_error(format!(
            "ngram_vocab_size_base {base} makes a table of {rows} rows; at most {} are supported",
            u32::MAX
        ))),
        None => Ok(rows.into_iter().map(|rows| rows as usize).collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_have_the_rows_of_distinct_primes() {
        assert_eq!(table_rows(2, 4, 400, 8).unwrap(), [1656, 1752]);
        assert_eq!(table_rows(1, 16, 20_000_000, 128).unwrap(), [320_001_536]);
        assert!(table_rows(1, 16, u64::from(u32::MAX), 128).is_err());
    }
}
