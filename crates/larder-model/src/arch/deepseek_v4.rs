//! DeepSeek-V4: several residual streams, attention to a window and to compressed entries of everything before it,
//! experts that the token decides on in the first layers.
//!
//! ```text
//! streams = embedding, several times        mHC: each part reads a mixture of the streams and writes to all of them
//! part = attention(rms(read))               one head of keys, which are values; a window, and compressed entries or those of
//!                                           them that an indexer chooses
//! part = Σ_k weight · expert(y) + shared(y) y = rms(read); √softplus; top k of score + bias, or the experts of the token
//! logits = head(rms(merged streams))
//! ```

use larder_core::{ExpertNames, Gate, Renorm, Score, Weighting};

use super::common::{Basics, Defaults};
use crate::config::{Config, config_error};
use crate::error::Result;
use crate::nn::{
    CompressedAttention, CompressedShape, Compressor, CompressorShape, Entries, EntryIndexer, ExpertsByToken,
    ManifoldConnection, ManifoldMerge, ManifoldShape, Mixer, Mlp, MlpNames, Moe, Rope, RopeType, SharedExpert,
};
use crate::ops::{Activation, Rotary};
use crate::stack::{Branch, Ffn, Layer, Stack, Streams};
use crate::weights::WeightLoader;

/// The attention of a layer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LayerType {
    /// To the window.
    Window,
    /// Also to the compressed entries that an indexer chooses.
    Sparse,
    /// Also to all entries, which are of more tokens.
    Heavy,
}

/// What the layers are built from.
struct Parts {
    attention: CompressedShape,
    /// Longest sequence, in tokens.
    context: usize,
    layers: Vec<LayerType>,
    /// Whether the token decides on the experts of each layer.
    by_token: Vec<bool>,
    /// Tokens of an entry, in layers with an indexer and in the others.
    rates: [usize; 2],
    index_heads: usize,
    index_width: usize,
    index_count: usize,
    /// Ropes of layers with a window only, and of the others.
    ropes: [(Rope, Rotary); 2],
    streams: ManifoldShape,
    gate: Gate,
    inter: usize,
    act: Activation,
}

pub fn build(config: &mut Config, weights: &mut WeightLoader) -> Result<Stack> {
    let defaults = Defaults { eps: 1e-6, kv_heads: Some(1), head_dim: Some(512), ..Defaults::COMMON };
    let basics = Basics::parse(config, "rms_norm_eps", defaults)?;
    let parts = Parts::parse(config, &basics)?;
    let Gate { experts, top_k, .. } = parts.gate;
    let geometry = basics.geometry((0..basics.layers).collect(), experts, top_k, parts.inter)?;
    let names = ExpertNames::separate("model.layers.{l}.ffn.experts", "w1", "w3", "w2");
    let [(main, _), (compress, _)] = parts.ropes.clone();
    let stack = basics.stack(weights, main.clone(), geometry, names, |weights, layer| {
        let prefix = format!("model.layers.{layer}");
        let mixer: Box<dyn Mixer> = Box::new(parts.attention(weights, &format!("{prefix}.attn"), layer)?);
        let ffn = Ffn::moe(parts.moe(&basics, weights, layer)?);
        let connection = |weights: &mut WeightLoader, part: &str| {
            ManifoldConnection::load(weights, &format!("{prefix}.hc_{part}"), parts.streams)
        };
        let mixer_norm = basics.norm(weights, &format!("{prefix}.attn_norm"), basics.hidden)?;
        let ffn_norm = basics.norm(weights, &format!("{prefix}.ffn_norm"), basics.hidden)?;
        let mixer = Branch::new(mixer_norm, mixer).connected(connection(weights, "attn")?);
        Ok(Layer::new(mixer, Branch::new(ffn_norm, ffn).connected(connection(weights, "ffn")?)))
    })?;
    let merge = Box::new(ManifoldMerge::load(weights, "model.hc_head", parts.streams)?);
    let streams = Some(Streams { count: parts.streams.streams, merge });
    Ok(Stack { ropes: vec![main, compress], streams, ..stack })
}

impl Parts {
    fn parse(config: &mut Config, basics: &Basics) -> Result<Self> {
        config.only("n_shared_experts", 1);
        config.ignore(&["expert_dtype"]); // the files say how experts are stored
        if basics.kv_heads != 1 {
            return Err(config_error(format!("num_key_value_heads is {}; deepseek_v4 has one", basics.kv_heads)));
        }
        let attention = CompressedShape {
            hidden: basics.hidden,
            heads: basics.heads,
            head_dim: basics.head_dim,
            q_rank: config.size_or(&["q_lora_rank"], 1024)?,
            window: config.size_or(&["sliding_window"], 128)?,
            groups: config.size_or(&["o_groups"], 8)?,
            group_rank: config.size_or(&["o_lora_rank"], 1024)?,
            eps: basics.eps,
        };
        if !basics.heads.is_multiple_of(attention.groups) {
            let (heads, groups) = (basics.heads, attention.groups);
            return Err(config_error(format!("num_attention_heads {heads} is not a multiple of o_groups {groups}")));
        }
        let limit = config.positive_or("swiglu_limit", 10.0)? as f32;
        let layers = layer_types(config, basics.layers)?;
        let streams = stream_shape(config, basics)?;
        let index_width = config.size_or(&["index_head_dim"], 128)?;
        let ropes = ropes(config, basics)?;
        if ropes[1].1.dim > index_width && layers.contains(&LayerType::Sparse) {
            return Err(config_error(format!(
                "index_head_dim {index_width} is less than the {} rotated values of a head",
                ropes[1].1.dim
            )));
        }
        Ok(Parts {
            attention,
            context: basics.context,
            rates: rates(config)?,
            by_token: layers_by_token(config, layers.len())?,
            layers,
            index_heads: config.size_or(&["index_n_heads"], 64)?,
            index_width,
            index_count: config.size_or(&["index_topk"], 512)?,
            ropes,
            streams,
            gate: gate(config)?,
            inter: config.size_or(&["moe_intermediate_size"], 2048)?,
            act: match basics.act {
                Activation::Silu => Activation::ClampedSilu { limit },
                _ => return Err(config_error("hidden_act must be silu for this model")),
            },
        })
    }

    fn attention(&self, weights: &mut WeightLoader, prefix: &str, layer: usize) -> Result<CompressedAttention> {
        let kind = self.layers[layer];
        let rotary = self.ropes[usize::from(kind != LayerType::Window)].1;
        let entries = match kind {
            LayerType::Window => None,
            LayerType::Sparse => Some(self.entries(weights, prefix, self.rates[0], true)?),
            LayerType::Heavy => Some(self.entries(weights, prefix, self.rates[1], false)?),
        };
        CompressedAttention::load(weights, prefix, self.attention, rotary, entries)
    }

    /// The compressed entries of a layer; with `indexed`, some of them are chosen, and each also covers the block
    /// before its own.
    fn entries(&self, weights: &mut WeightLoader, prefix: &str, rate: usize, indexed: bool) -> Result<Entries> {
        let CompressedShape { hidden, q_rank, eps, .. } = self.attention;
        let compressor = |weights: &mut WeightLoader, name: &str, width| {
            let shape = CompressorShape { hidden, width, rate, overlap: indexed };
            Compressor::load(weights, &format!("{prefix}.{name}"), shape, eps, self.ropes[1].clone())
        };
        let own = compressor(weights, "compressor", self.attention.head_dim)?;
        let (heads, width, count) = (self.index_heads, self.index_width, self.index_count);
        let indexer = if indexed {
            Some(EntryIndexer {
                compressor: compressor(weights, "indexer.compressor", width)?,
                queries: weights.linear(&format!("{prefix}.indexer.wq_b"), heads * width, q_rank, false)?,
                weights: weights.linear(&format!("{prefix}.indexer.weights_proj"), heads, hidden, false)?,
                heads,
                width,
                count,
            })
        } else {
            None
        };
        Ok(Entries { compressor: own, rate, most: self.context / rate, indexer })
    }

    fn moe(&self, basics: &Basics, weights: &mut WeightLoader, layer: usize) -> Result<Moe> {
        let prefix = format!("model.layers.{layer}.ffn");
        let (gate, by_token) = if self.by_token[layer] {
            let table = format!("{prefix}.gate.tid2eid");
            (self.gate.clone(), Some(ExpertsByToken::load(weights, &table, basics.vocab, &self.gate)?))
        } else {
            let bias = weights.vector(&format!("{prefix}.gate.bias"), &[self.gate.experts])?;
            (Gate { bias: Some(bias), ..self.gate.clone() }, None)
        };
        let moe = basics.moe(weights, layer, &format!("{prefix}.gate"), gate)?;
        let size = (basics.hidden, self.inter);
        let names = &MlpNames::NUMBERED;
        let mlp = Mlp::new(weights, &format!("{prefix}.shared_experts"), names, size, self.act, false)?;
        Ok(Moe { act: self.act, shared: Some(SharedExpert { mlp, gate: None }), by_token, ..moe })
    }
}

/// The residual streams. More of them than any model has are refused: their weights are as many as their square.
pub fn stream_shape(config: &mut Config, basics: &Basics) -> Result<ManifoldShape> {
    let streams = ManifoldShape {
        streams: config.size_or(&["hc_mult"], 4)?,
        hidden: basics.hidden,
        iterations: config.size_or(&["hc_sinkhorn_iters"], 20)?,
        eps: config.positive_or("hc_eps", 1e-6)? as f32,
        norm_eps: basics.eps,
    };
    match streams {
        ManifoldShape { streams: 1..=64, iterations: 1..=1000, .. } => Ok(streams),
        _ => Err(config_error("hc_mult must be 1 to 64, and hc_sinkhorn_iters 1 to 1000")),
    }
}

fn gate(config: &mut Config) -> Result<Gate> {
    let experts = config.size_or(&["n_routed_experts", "num_local_experts"], 256)?;
    let top_k = config.size_or(&["num_experts_per_tok"], 6)?;
    let scale = config.number_or("routed_scaling_factor", 1.5)? as f32;
    let score = match config.opt_text("scoring_func")?.unwrap_or("sqrtsoftplus") {
        "sqrtsoftplus" => Score::SqrtSoftplus,
        "sigmoid" => Score::Sigmoid,
        "softmax" => Score::Softmax,
        other => {
            let known = "sqrtsoftplus, sigmoid and softmax";
            return Err(config_error(format!("scoring_func '{other}' is not supported; supported are {known}")));
        }
    };
    let weighting = Weighting::Score { renorm: Renorm::Sum { plus: 1e-20 }, scale };
    Ok(Gate { score, weighting, ..Gate::softmax(experts, top_k, true) }.checked()?)
}

/// By `layer_types` or the older `compress_ratios`, else as in the largest published model.
fn layer_types(config: &mut Config, layers: usize) -> Result<Vec<LayerType>> {
    let ratios = config.opt_counts("compress_ratios")?;
    let names = config.opt_texts("layer_types")?;
    let types = match (names, ratios) {
        (Some(names), _) => names.into_iter().map(named_type).collect::<Result<Vec<_>>>()?,
        (None, Some(ratios)) => ratios.into_iter().map(type_of_ratio).collect::<Result<Vec<_>>>()?,
        (None, None) => (0..layers)
            .map(|layer| if layer < 2 || layer.is_multiple_of(2) { LayerType::Heavy } else { LayerType::Sparse })
            .collect(),
    };
    match types.len() {
        // Ratios may also name the layers for multi-token prediction.
        len if len >= layers => Ok(types[..layers].to_vec()),
        len => Err(config_error(format!("layer_types or compress_ratios has {len} entries for {layers} layers"))),
    }
}

fn named_type(name: &str) -> Result<LayerType> {
    match name {
        "sliding_attention" => Ok(LayerType::Window),
        "compressed_sparse_attention" => Ok(LayerType::Sparse),
        "heavily_compressed_attention" => Ok(LayerType::Heavy),
        other => Err(config_error(format!("layer type '{other}' is not supported for deepseek_v4"))),
    }
}

fn type_of_ratio(ratio: usize) -> Result<LayerType> {
    match ratio {
        0 => Ok(LayerType::Window),
        4 => Ok(LayerType::Sparse),
        128 => Ok(LayerType::Heavy),
        other => Err(config_error(format!("compress_ratios has {other}; 0, 4 and 128 are supported"))),
    }
}

/// Tokens of an entry, in layers with an indexer and in the others.
fn rates(config: &mut Config) -> Result<[usize; 2]> {
    let (mut sparse, mut heavy) = (4, 128);
    if let Some(mut rates) = config.opt_object("compress_rates", "compress_rates.")? {
        sparse = rates.size_or(&["compressed_sparse_attention"], sparse)?;
        heavy = rates.size_or(&["heavily_compressed_attention"], heavy)?;
        rates.finish();
    }
    let rates = [config.size_or(&["compress_rate_csa"], sparse)?, config.size_or(&["compress_rate_hca"], heavy)?];
    if rates.iter().all(|rate| *rate <= MOST_RATE) {
        Ok(rates)
    } else {
        Err(config_error(format!("compress rates are {rates:?}; at most {MOST_RATE} tokens are supported")))
    }
}

/// The most tokens of an entry, which are kept until it is complete.
const MOST_RATE: usize = 4096;

/// Whether the token decides on the experts of each layer.
fn layers_by_token(config: &mut Config, layers: usize) -> Result<Vec<bool>> {
    let first = config.count_or(&["num_hash_layers"], 3)?;
    let Some(types) = config.opt_texts("mlp_layer_types")? else {
        return Ok((0..layers).map(|layer| layer < first).collect());
    };
    if types.len() < layers || types.iter().any(|kind| !["hash_moe", "moe"].contains(kind)) {
        return Err(config_error(format!("mlp_layer_types must be 'hash_moe' or 'moe' for each of {layers} layers")));
    }
    Ok(types[..layers].iter().map(|kind| *kind == "hash_moe").collect())
}

/// The rope of layers with a window only, and that of the others, which may be scaled. Both turn the last values of a
/// head.
fn ropes(config: &mut Config, basics: &Basics) -> Result<[(Rope, Rotary); 2]> {
    let (main, compress) = (config.number_or("rope_theta", 1e4)?, config.number_or("compress_rope_theta", 1.6e5)?);
    let share = match config.opt_size(&["qk_rope_head_dim"])? {
        Some(width) => width as f64 / basics.head_dim as f64,
        None => 64.0 / 512.0,
    };
    let partial = config.number_or("partial_rotary_factor", share)?;
    let rope = |name, prefix, older, theta| RopeType {
        name,
        prefix,
        older,
        head_dim: basics.head_dim,
        theta,
        partial,
        amplitude: Some(1.0),
    };
    let kinds = [
        rope("main", "rope_parameters.main.", None, main),
        rope("compress", "rope_parameters.compress.", Some("rope_scaling"), compress),
    ];
    let parsed = Rope::parse_types(config, &kinds, basics.context)?;
    let mut ropes = parsed.into_iter().map(|(rope, rotary)| (rope, Rotary { interleaved: true, ..rotary }));
    match (ropes.next(), ropes.next()) {
        (Some(main), Some(compress)) => Ok([main, compress]),
        _ => Err(config_error("deepseek_v4 has two ropes")),
    }
}
