//! Multi-head latent attention (MLA) of the DeepSeek family.

use larder_core::{KV_PAGE_TOKENS, Rng};

use super::output_gate::GateRows;
use crate::error::Result;
use crate::kv::{AttentionMask, LayerKv, LayerShape, made_up};
use crate::nn::indexers::head_rotation;
use crate::nn::{AttentionTemperature, ChoiceShape, Indexer, KeysAndValues, Mixer, Norm, RowAttention, TokenScratch};
use crate::ops::{Few, GateFunction, HandedChoice, HeadNorm, HeadRest, Heads, ListLengths, Near, Ops, Rotary, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::{Linear, PlacedMatrix, WeightLoader};

/// Heads and widths of latent attention.
#[derive(Clone, Copy)]
pub struct LatentShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Rank of the query's low-rank projection, `None` for a full one.
    pub q_rank: Option<usize>,
    /// Rank of keys and values: width of the latent vector in the KV cache.
    pub kv_rank: usize,
    /// Width of a head's unrotated part.
    pub nope: usize,
    /// Width of a head's rotated part, which some models do not rotate; all heads share that part of the key.
    pub rope: usize,
    /// Width of a head's value.
    pub value: usize,
    /// Whether the weights hold the two halves of `kv_b_proj` by head, the first transposed, and not the whole.
    pub split_kv_b: bool,
    /// Epsilon of the norms of latents, which is not that of other norms in most models.
    pub norm_eps: f64,
    /// Name of the output projection.
    pub output: &'static str,
}

/// Multi-head latent attention: the KV cache holds one vector of `kv_rank + rope` numbers per token.
///
/// Keys and values are never expanded: the query is projected into the latent space, and the result out of it.
pub struct LatentAttention {
    pub(super) shape: LatentShape,
    pub(super) q: Query,
    pub(super) kv_a: Linear,                 // [kv_rank + rope, hidden]
    pub(super) kv_norm: Norm,                // [kv_rank]
    pub(super) to_latent: Vec<PlacedMatrix>, // heads × [kv_rank, nope]
    pub(super) to_value: Vec<PlacedMatrix>,  // heads × [value, kv_rank]
    pub(super) o: Linear,                    // [hidden, heads · value]
    pub(super) rotary: Option<Rotary>,
    scale: f64,
    pub(super) temperature: Option<AttentionTemperature>,
    pub(super) output_gate: Option<(Linear, GateFunction)>, // [heads, hidden]
    pub(super) choice: RowChoice,
}

/// The rows that a query of latent attention attends to, of those before it and its own.
pub enum RowChoice {
    /// All.
    All,
    /// Those that an indexer chooses.
    Indexed(Box<Indexer>),
    /// Those that the indexer of an earlier layer chose: the most of them.
    Shared(usize),
}

pub(super) enum Query {
    Full(Linear),                   // [heads · (nope + rope), hidden]
    Low(Linear, Norm, Box<Linear>), // [q_rank, hidden], [q_rank], [heads · (nope + rope), q_rank]
}

impl LatentAttention {
    /// Loads the tensors below `prefix`; `bias` for the matmuls that the config's `attention_bias` applies to.
    pub fn new(
        weights: &mut WeightLoader,
        prefix: &str,
        shape: LatentShape,
        bias: bool,
        rotary: impl Into<Option<Rotary>>,
        scale: f64,
    ) -> Result<Self> {
        let LatentShape { hidden, heads, kv_rank, nope, rope, value, .. } = shape;
        let name = |part: &str| format!("{prefix}.{part}");
        let q = match shape.q_rank {
            None => Query::Full(weights.linear(&name("q_proj"), heads * (nope + rope), hidden, false)?),
            Some(rank) => Query::Low(
                weights.linear(&name("q_a_proj"), rank, hidden, bias)?,
                Norm::rms(weights, &name("q_a_layernorm"), rank, shape.norm_eps)?,
                weights.linear(&name("q_b_proj"), heads * (nope + rope), rank, false)?.into(),
            ),
        };
        let kv_a = weights.linear(&name("kv_a_proj_with_mqa"), kv_rank + rope, hidden, bias)?;
        let kv_norm = Norm::rms(weights, &name("kv_a_layernorm"), kv_rank, shape.norm_eps)?;
        let [to_latent, to_value] = if shape.split_kv_b {
            [
                weights.heads(&name("k_b_proj.weight"), [heads, kv_rank, nope])?,
                weights.heads(&name("v_b_proj.weight"), [heads, value, kv_rank])?,
            ]
        } else {
            weights.split_heads(&name("kv_b_proj.weight"), heads, [nope, value], kv_rank)?
        };
        let o = weights.linear(&name(shape.output), hidden, heads * value, bias)?;
        Ok(LatentAttention {
            shape,
            q,
            kv_a,
            kv_norm,
            to_latent,
            to_value,
            o,
            rotary: rotary.into(),
            scale,
            temperature: None,
            output_gate: None,
            choice: RowChoice::All,
        })
    }

    /// The same attention with queries scaled by their position.
    pub fn with_temperature(self, temperature: Option<AttentionTemperature>) -> Self {
        LatentAttention { temperature, ..self }
    }

    /// The same attention to some rows.
    pub fn with_choice(self, choice: RowChoice) -> Self {
        LatentAttention { choice, ..self }
    }

    /// The same attention with its output gated per head, by a function of `product [heads, hidden]`.
    pub fn with_output_gate(self, product: Linear, function: GateFunction) -> Self {
        LatentAttention { output_gate: Some((product, function)), ..self }
    }

    /// The choice of an earlier layer, of lists with at most `most` positions, where the rows of this one are.
    fn handed_choice(&self, most: usize, near: &Near, pass: &ForwardPass) -> Result<ListLengths> {
        let Some(choice) = pass.handed_on.get() else { return Ok(None) };
        near.take_choice(&choice, most, self.o.compute())?;
        Ok(choice.lengths)
    }

    /// The attention over the rows of the KV cache.
    fn over_rows(&self) -> RowAttention<'_> {
        let LatentShape { heads, kv_rank, rope, .. } = self.shape;
        let (key_width, scale) = (kv_rank + rope, self.scale as f32);
        RowAttention { heads, kv_heads: 1, key_width, value_width: kv_rank, scale, sinks: None }
    }
}

impl Mixer for LatentAttention {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let LatentShape { heads, kv_rank, nope, rope, .. } = self.shape;
        let (Query::Full(first) | Query::Low(first, ..)) = &self.q;
        let mut linears = Few::from_iter([first, &self.kv_a]);
        linears.extend(self.output_gate.iter().map(|(product, _)| product));
        let of_index = linears.len();
        if let RowChoice::Indexed(indexer) = &self.choice {
            linears.extend(indexer.products(pass));
        }
        let products = Linear::forward_each(&linears, x, ops)?;
        let (latent, queries) = match &self.q {
            Query::Full(_) => (x, products[0]),
            Query::Low(_, norm, product) => {
                let latent = norm.forward(products[0], ops)?;
                (latent, product.forward(latent, ops)?)
            }
        }; // [n, q_rank], [n, heads · (nope + rope)]
        let latents = ops.matmul_heads(queries, &self.to_latent)?; // [n, heads · kv_rank]

        let near = Near::new(self.o.compute(), states.place(), ops);
        let chosen = match &self.choice {
            RowChoice::All => None,
            RowChoice::Shared(most) => self.handed_choice(*most, &near, pass)?,
            RowChoice::Indexed(indexer) => {
                let [latent] = near.take([latent])?;
                indexer.select(&near.take_all(products[of_index..].into())?, latent, states, pass, near.ops)?
            }
        };
        if !matches!(self.choice, RowChoice::All) {
            pass.handed_on.set(HandedChoice { place: near.ops.place(), lengths: chosen.clone() });
        }
        for (i, span) in pass.spans.iter().enumerate() {
            states.of_mut(i).keys.extend(span.tokens, 1, kv_rank + rope)?;
        }
        let (weight, eps) = self.kv_norm.rms_parts();
        let weights = [None, Some(weight.of(near.ops)?)];
        let scales = self.temperature.map_or_else(Vec::new, |temperature| temperature.scales(pass));
        let [latents, queries, keys] = near.take([latents, queries, products[1]])?;
        let new = Heads {
            queries: latents,
            rest: Some(HeadRest { rows: queries, first: nope }),
            keys,
            values: None,
            norm: Some(HeadNorm { weights, eps: [eps; 2], whole: false, width: Some(kv_rank), after_rotation: false }),
            clip: None,
            value_norm: None,
            value_factor: 1.0,
            rotation: head_rotation(self.rotary.filter(|_| rope > 0), kv_rank, &pass.ropes),
            scales: &scales,
            bias: None,
        };
        let rows = (&*states, (|kv| (&kv.keys, None)) as KeysAndValues);
        let seen = (pass, AttentionMask::Causal);
        let mixed = near.give(self.over_rows().forward(&new, rows, seen, chosen.as_deref(), near.ops)?)?;
        let values = ops.matmul_heads(mixed, &self.to_value)?; // [n, heads · value]
        let values = match &self.output_gate {
            Some((_, function)) => GateRows { rows: products[2], function: *function }.apply(values, heads, ops)?,
            None => values,
        };
        self.o.forward(values, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        let auxiliary = match &self.choice {
            RowChoice::Indexed(indexer) => indexer.kept(),
            RowChoice::All | RowChoice::Shared(_) => Vec::new(),
        };
        LayerShape::latents(self.shape.kv_rank + self.shape.rope).with_auxiliary(auxiliary)
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        let width = self.shape.kv_rank + self.shape.rope;
        (0..tokens).step_by(KV_PAGE_TOKENS).try_for_each(|start| {
            let rows = KV_PAGE_TOKENS.min(tokens - start);
            state.keys.append(&made_up(rows * width, rng), 1, width)
        })?;
        let all = state.keys.len();
        state.auxiliary.iter_mut().try_for_each(|auxiliary| auxiliary.fill(all, rng))
    }

    fn heads(&self) -> usize {
        self.shape.heads
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let LatentShape { heads, q_rank, kv_rank, nope, rope, value, .. } = self.shape;
        let (q, width) = (nope + rope, kv_rank + rope);
        // Per head: its query, the part of it in the latent space twice, since heads and tokens change places; then all
        // parts and their concatenation; then the latent result beside the value, likewise twice.
        let latent = q + nope + 2 * kv_rank;
        let whole = q + kv_rank + 2 * rope + width;
        let result = width + kv_rank + 2 * value;
        let gate = if self.output_gate.is_some() { 2 + value } else { 0 };
        // One number more is the row of a head in the input.
        let per_head = 1 + latent.max(whole).max(result) + gate;
        let indexer = match &self.choice {
            RowChoice::Indexed(indexer) => indexer.scratch(),
            RowChoice::All | RowChoice::Shared(_) => 0,
        };
        TokenScratch {
            floats: 2 * hidden + 2 * q_rank.unwrap_or(0) + 3 * width + (heads * per_head).max(indexer),
            input: hidden.max(heads * nope.max(kv_rank).max(value)).max(q_rank.unwrap_or(0)),
        }
    }

    fn choice(&self) -> Option<ChoiceShape> {
        let rows = match &self.choice {
            RowChoice::All => return None,
            RowChoice::Indexed(indexer) => indexer.positions(),
            RowChoice::Shared(top_k) => *top_k,
        };
        Some(ChoiceShape { lists: 1, rows, values: self.shape.kv_rank + self.shape.rope })
    }
}
