//! Multi-head latent attention (MLA) of the DeepSeek family.

use std::slice;
use std::sync::Arc;

use candle_core::{D, Device, Tensor};
use larder_core::{KV_PAGE_TOKENS, Rng};

use super::chained_choice::forward_on_device;
use super::output_gate::gated;
use super::{
    AttentionMask, AttentionTemperature, ChainedMixer, ChoiceShape, ChosenAttention, ForwardPass, GateFunction,
    HandedChoice, Indexer, KeysAndValues, LayerKv, LayerShape, Mixer, Norm, Rotary, Selection, TokenScratch, made_up,
};
use crate::error::Result;
use crate::hidden::Place;
use crate::matrix::{Linear, PlacedMatrix, with_f32};
use crate::step::LayerStates;
use crate::weights::WeightLoader;

/// Heads and widths of latent attention.
#[derive(Clone, Copy)]
pub struct LatentShape {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Rank of the query's low-rank product, `None` for a full one.
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
    /// Name of the output product.
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
    Full(Linear),              // [heads · (nope + rope), hidden]
    Low(Linear, Norm, Linear), // [q_rank, hidden], [q_rank], [heads · (nope + rope), q_rank]
}

impl LatentAttention {
    /// Loads the tensors below `prefix`; `bias` for the products that the config's `attention_bias` applies to.
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
                weights.linear(&name("q_b_proj"), heads * (nope + rope), rank, false)?,
            ),
        };
        let kv_a = weights.linear(&name("kv_a_proj_with_mqa"), kv_rank + rope, hidden, bias)?;
        let kv_norm = Norm::rms(weights, &name("kv_a_layernorm"), kv_rank, shape.norm_eps)?;
        let [to_latent, to_value] = match shape.split_kv_b {
            true => [
                weights.heads(&name("k_b_proj.weight"), [heads, kv_rank, nope])?,
                weights.heads(&name("v_b_proj.weight"), [heads, value, kv_rank])?,
            ],
            false => weights.split_heads(&name("kv_b_proj.weight"), heads, [nope, value], kv_rank)?,
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

    /// What queries are made of: the result of the low-rank product `[n, q_rank]`, or `x` itself.
    fn query_latent(&self, x: &Tensor) -> Result<Tensor> {
        match &self.q {
            Query::Full(_) => Ok(x.clone()),
            Query::Low(a, norm, _) => norm.forward(&a.forward(x)?),
        }
    }

    /// The same attention with its output gated per head, by a function of `product [heads, hidden]`.
    pub fn with_output_gate(self, product: Linear, function: GateFunction) -> Self {
        LatentAttention { output_gate: Some((product, function)), ..self }
    }

    /// The `latent [n, heads, kv_rank]` of queries or keys `x [n, heads, …]`, and beside it the rest of them, from `at` on, rotated.
    fn with_rest(&self, latent: Tensor, x: &Tensor, at: usize, pass: &ForwardPass) -> Result<Tensor> {
        if self.shape.rope == 0 {
            return Ok(latent);
        }
        let rest = x.narrow(2, at, self.shape.rope)?.contiguous()?;
        let rest = self.rotary.map_or(Ok(rest.clone()), |rotary| rotary.apply(&rest, pass))?;
        Ok(Tensor::cat(&[latent, rest], D::Minus1)?)
    }

    /// `[n, heads, kv_rank + rope]`: each head's query, with the unrotated part projected into the latent space.
    fn query(&self, latent: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let LatentShape { heads, nope, rope, .. } = self.shape;
        let (Query::Full(product) | Query::Low(_, _, product)) = &self.q;
        let q = product.forward(latent)?.reshape((pass.tokens(), heads, nope + rope))?;
        let latent = PlacedMatrix::forward_heads(&self.to_latent, &q.narrow(2, 0, nope)?)?; // [n, heads, kv_rank]
        self.query_of(latent, &q, pass)
    }

    /// As [`query`](Self::query), of its part in the latent space and of the whole `q [n, heads, nope + rope]`.
    pub(super) fn query_of(&self, latent: Tensor, q: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let q = self.with_rest(latent, q, self.shape.nope, pass)?;
        self.temperature.map_or(Ok(q.clone()), |temperature| temperature.apply(&q, pass))
    }

    /// Appends the rows of these tokens to the KV cache; `both [n, kv_rank + rope]` is what their product yields.
    pub(super) fn append_keys(&self, both: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<()> {
        let (kv_rank, width) = (self.shape.kv_rank, self.shape.kv_rank + self.shape.rope);
        let both = both.unsqueeze(1)?;
        let latent = self.kv_norm.forward(&both.narrow(2, 0, kv_rank)?)?;
        let key = self.with_rest(latent, &both, kv_rank, pass)?; // [n, 1, kv_rank + rope]
        for (i, span) in pass.spans.iter().enumerate() {
            with_f32(&key, |k| states.of_mut(i).keys.append(span.rows(k, width), 1, width))??;
        }
        Ok(())
    }
}

impl LatentAttention {
    /// The positions that each token attends to; `None` for all. Appends what the indexer keeps.
    fn select(
        &self,
        x: &Tensor,
        latent: &Tensor,
        states: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<Option<Arc<Selection>>> {
        match &self.choice {
            RowChoice::All => Ok(None),
            RowChoice::Shared(_) => match pass.handed_on.get() {
                None => Ok(None),
                Some(HandedChoice::Host(selection)) => Ok(Some(selection)),
                Some(HandedChoice::Device(lengths)) => self.received_choice(lengths.as_deref(), pass),
            },
            RowChoice::Indexed(indexer) => {
                let selection = indexer.select(x, latent, states, pass)?;
                pass.handed_on.set(HandedChoice::Host(selection.clone()));
                Ok(Some(selection))
            }
        }
    }

    /// A choice of the device, whose lists have these lengths.
    fn received_choice(&self, lengths: Option<&[usize]>, pass: &ForwardPass) -> Result<Option<Arc<Selection>>> {
        let Some((lengths, ops)) = lengths.zip(self.o.compute().device_ops.as_deref()) else { return Ok(None) };
        let mut selection = Selection::default();
        for (list, at) in ops.receive_choice(lengths)?.into_iter().zip(pass.positions()) {
            if list.len() > at { selection.push_all() } else { selection.push(list) }
        }
        let selection = Arc::new(selection);
        pass.handed_on.set(HandedChoice::Host(selection.clone()));
        Ok(Some(selection))
    }

    /// The attention `[n, heads · kv_rank]` of each token to all rows that it sees, or to those chosen.
    pub(super) fn attend(
        &self,
        query: &Tensor,
        states: &LayerStates,
        pass: &ForwardPass,
        selections: &[Selection],
    ) -> Result<Tensor> {
        let (n, width) = (pass.tokens(), self.shape.heads * self.shape.kv_rank);
        let (rows, pass) = ((states, (|kv| (&kv.keys, None)) as KeysAndValues), (pass, AttentionMask::Causal));
        let mut out = vec![0.0; n * width];
        let (attention, compute) = (self.over_rows(), self.o.compute());
        with_f32(query, |q| attention.attend_step(compute, q, rows, pass, selections, &mut out))??;
        Ok(Tensor::from_vec(out, (n, width), &Device::Cpu)?)
    }

    /// The attention over the rows of the KV cache.
    pub(super) fn over_rows(&self) -> ChosenAttention<'_> {
        let LatentShape { heads, kv_rank, rope, .. } = self.shape;
        let (key_width, scale) = (kv_rank + rope, self.scale as f32);
        ChosenAttention { heads, kv_heads: 1, key_width, value_width: kv_rank, scale, sinks: None }
    }
}

impl Mixer for LatentAttention {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let LatentShape { heads, kv_rank, value, .. } = self.shape;
        let n = pass.tokens();
        if let (Place::Device, Some(ops)) = (states.place(), &self.o.compute().device_ops)
            && !matches!(self.choice, RowChoice::All)
        {
            return forward_on_device(self, x, states, pass, ops.as_ref());
        }
        self.append_keys(&self.kv_a.forward(x)?, states, pass)?;
        let latent = self.query_latent(x)?;
        let selection = self.select(x, &latent, states, pass)?;
        let query = self.query(&latent, pass)?;
        let selections = selection.as_deref().map_or(&[][..], slice::from_ref);
        let mixed = self.attend(&query, states, pass, selections)?.reshape((n, heads, kv_rank))?;
        let mixed = PlacedMatrix::forward_heads(&self.to_value, &mixed)?; // [n, heads, value]
        let mixed = mixed.reshape((n, heads * value))?;
        self.o.forward(&match &self.output_gate {
            Some((product, function)) => gated(mixed, &function.apply(&product.forward(x)?)?, heads)?,
            None => mixed,
        })
    }

    fn chained(&self) -> Option<&dyn ChainedMixer> {
        self.is_for_devices().then_some(self)
    }

    fn layer_shape(&self) -> LayerShape {
        let further = match &self.choice {
            RowChoice::Indexed(indexer) => indexer.kept(),
            RowChoice::All | RowChoice::Shared(_) => Vec::new(),
        };
        LayerShape::latents(self.shape.kv_rank + self.shape.rope).with_further(further)
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        let width = self.shape.kv_rank + self.shape.rope;
        (0..tokens).step_by(KV_PAGE_TOKENS).try_for_each(|start| {
            let rows = KV_PAGE_TOKENS.min(tokens - start);
            state.keys.append(&made_up(rows * width, rng), 1, width)
        })?;
        let all = state.keys.len();
        state.further.iter_mut().try_for_each(|further| further.fill(all, rng))
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

    fn chooses_on_device(&self) -> bool {
        // Where there is no device, this is what one with operations of chains would do.
        let compute = self.o.compute();
        let here = compute.device_attention.is_none() || (compute.device_ops.is_some() && self.is_for_devices());
        self.has_device_form() && here
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
