//! Softmax attention with grouped queries, QK norm, sinks, masks, output gates.

use candle_core::{Device, Tensor};
use larder_core::{KV_PAGE_TOKENS, Rng};

use super::chained_choice::forward_on_device;
use super::norm::rms;
use super::output_gate::{GateFunction, OutputGate, gated};
use super::{
    AttentionIndexer, AttentionMask, ChainedMixer, ChoiceShape, ChosenAttention, ConvolvedInputs, ForwardPass,
    KeysAndValues, LayerKv, LayerShape, Mixer, Norm, Rotary, RowShape, Selection, TokenScratch, made_up,
};
use crate::error::Result;
use crate::hidden::Place;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;

/// Heads and widths of attention.
#[derive(Clone, Copy)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Width of a head's queries and keys.
    pub head_dim: usize,
    /// Width of a head's values.
    pub value_dim: usize,
}

impl AttentionShape {
    /// Widths of a token's rows of queries, keys, values, and of what attention yields.
    fn widths(self) -> [usize; 4] {
        let AttentionShape { heads, kv_heads, head_dim, value_dim } = self;
        [heads * head_dim, kv_heads * head_dim, kv_heads * value_dim, heads * value_dim]
    }
}

/// Normalisation of queries and keys (QK norm).
pub enum QkNorm {
    /// None.
    None,
    /// Over the whole projection, before it is split into heads.
    Whole(Norm, Norm),
    /// Over each head.
    PerHead(Norm, Norm),
    /// Over each head, after the rotation.
    PerHeadAfterRope(Norm, Norm),
    /// Over each head, without a weight, after the rotation.
    AfterRope {
        /// Added under the root.
        eps: f64,
    },
}

/// Queries scaled up as the sequence grows: `1 + scale · ln(1 + floor((position + first) / floor))`.
#[derive(Clone, Copy)]
pub struct AttentionTemperature {
    /// Positions per step.
    pub floor: f64,
    /// Factor on the logarithm.
    pub scale: f64,
    /// The number of the first position.
    pub first: usize,
}

impl AttentionTemperature {
    /// Queries `q [n, heads, width]` → same shape
    pub fn apply(self, q: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        Ok(q.broadcast_mul(&Tensor::from_vec(self.scales(pass), (pass.tokens(), 1, 1), &Device::Cpu)?)?)
    }

    /// The factor of each token.
    pub(super) fn scales(self, pass: &ForwardPass) -> Vec<f32> {
        let factor = |at| (((at + self.first) as f64 / self.floor).floor().ln_1p() * self.scale + 1.0) as f32;
        pass.positions().map(factor).collect()
    }
}

/// Softmax attention with all options that an architecture uses.
pub struct Attention {
    /// Heads and widths.
    pub shape: AttentionShape,
    /// The products that yield queries, keys and values.
    pub inputs: InputProducts,
    /// `[hidden, heads · value_dim]`
    pub o: Linear,
    /// Normalisation of queries and keys.
    pub norm: QkNorm,
    /// Values are normalised over each head, without a weight; this is added under the root.
    pub value_norm: Option<f64>,
    /// Factor on the values.
    pub value_scale: f64,
    /// Queries, keys and values are clamped to ± this.
    pub clip: Option<f64>,
    /// Rotation of queries and keys, or none.
    pub rotary: Option<Rotary>,
    /// The earlier positions that a query attends to.
    pub mask: AttentionMask,
    /// Factor on the scores.
    pub scale: f64,
    /// `[heads]`: attention sinks, one extra score per head that takes part in the softmax without a value.
    pub sinks: Option<Vec<f32>>,
    /// Scaling of queries with the position.
    pub temperature: Option<AttentionTemperature>,
    /// Factor on what attention yields, before the output product.
    pub output_gate: OutputGate,
    /// Chooses the positions that a query attends to, out of all earlier ones.
    pub indexer: Option<Box<AttentionIndexer>>,
}

/// The rows that attention reads of what a layer keeps.
pub(super) const KEYS_AND_VALUES: KeysAndValues = |kv| (&kv.keys, Some(&kv.values));

/// The products that yield queries, keys and values.
#[expect(clippy::large_enum_variant, reason = "there is one for each layer")]
pub enum InputProducts {
    /// One for each.
    Apart {
        /// `[heads · head_dim, hidden]`
        q: Linear,
        /// `[kv_heads · head_dim, hidden]`
        k: Linear,
        /// `[kv_heads · value_dim, hidden]`; without it values are what the product of the keys yields.
        v: Option<Linear>,
    },
    /// Products and convolutions, with a state beside the KV cache.
    Convolved(Box<ConvolvedInputs>),
}

impl InputProducts {
    /// Queries, keys and values, `[n, heads · width]` each.
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<[Tensor; 3]> {
        match self {
            InputProducts::Apart { q, k, v: Some(v) } => Linear::forward_all([q, k, v], x),
            InputProducts::Apart { q, k, v: None } => {
                let [q, k] = Linear::forward_all([q, k], x)?;
                Ok([q, k.clone(), k])
            }
            InputProducts::Convolved(inputs) => inputs.forward(x, states, pass),
        }
    }
}

impl Mixer for Attention {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        if let (Place::Device, Some(ops), Some(_)) = (states.place(), &self.o.compute().device_ops, &self.indexer) {
            return forward_on_device(self, x, states, pass, ops.as_ref());
        }
        let (q, gate) = self.queries(x, states, pass)?;
        let selections = match &self.indexer {
            Some(indexer) => indexer.select(x, states, pass)?,
            None => Vec::new(),
        };
        let mixed = self.attend(&q, states, pass, &selections)?;
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask));
        self.o.forward(&match gate {
            Some((gate, function)) => gated(mixed, &function.apply(&gate)?, self.shape.heads)?,
            None => mixed,
        })
    }

    fn chained(&self) -> Option<&dyn ChainedMixer> {
        let is_chained = self.o.is_on_device() && (self.indexer.is_none() || self.is_for_devices());
        is_chained.then_some(self)
    }

    fn layer_shape(&self) -> LayerShape {
        let AttentionShape { kv_heads: heads, head_dim, value_dim, .. } = self.shape;
        let rows = |width| RowShape { heads, width };
        let further = self.indexer.as_ref().map_or(Vec::new(), |indexer| indexer.kept());
        let kept = LayerShape::attention(rows(head_dim), rows(value_dim), self.mask).with_further(further);
        LayerShape { recurrent: self.convolved().map(ConvolvedInputs::state_lens), ..kept }
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        let AttentionShape { kv_heads, head_dim, value_dim, .. } = self.shape;
        if let Some(inputs) = self.convolved() {
            state.recurrent.fill(tokens, inputs.state_lens(), rng)?;
        }
        for start in (0..tokens).step_by(KV_PAGE_TOKENS) {
            let rows = KV_PAGE_TOKENS.min(tokens - start) * kv_heads;
            state.keys.append(&made_up(rows * head_dim, rng), kv_heads, head_dim)?;
            state.values.append(&made_up(rows * value_dim, rng), kv_heads, value_dim)?;
            state.release_unseen(self.mask);
        }
        let all = state.keys.len();
        state.further.iter_mut().try_for_each(|further| further.fill(all, rng))
    }

    fn heads(&self) -> usize {
        self.shape.heads
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let [q, k, v, mixed] = self.shape.widths();
        // Queries and what attention makes of them; with an output gate also that, its sigmoid and their product.
        // Values that are normalised or scaled exist twice for a while.
        let changed = if self.value_norm.is_some() || self.value_scale != 1.0 { v } else { 0 };
        let queries = match &self.output_gate {
            OutputGate::None => q + mixed,
            OutputGate::Product(product, _) => q + 2 * mixed + 2 * product.rows(),
        };
        let indexer = self.indexer.as_ref().map_or(0, |indexer| indexer.scratch());
        let convolved = self.convolved().map(ConvolvedInputs::scratch).unwrap_or_default();
        let floats = 2 * hidden + queries + 2 * k + v + changed + indexer + convolved.floats;
        TokenScratch { floats, input: hidden.max(mixed).max(convolved.input) }
    }

    fn chooses_on_device(&self) -> bool {
        // Where there is no device, this is what one with operations of chains would do.
        let compute = self.o.compute();
        let here = compute.device_attention.is_none() || (compute.device_ops.is_some() && self.is_for_devices());
        self.has_device_form() && here
    }

    fn choice(&self) -> Option<ChoiceShape> {
        let AttentionShape { kv_heads, head_dim, value_dim, .. } = self.shape;
        let indexer = self.indexer.as_ref()?;
        let (lists, rows) = (indexer.parts(), indexer.most_rows());
        Some(ChoiceShape { lists, rows, values: (kv_heads / lists).max(1) * (head_dim + value_dim) })
    }
}

impl Attention {
    /// The inputs, if they are convolved.
    fn convolved(&self) -> Option<&ConvolvedInputs> {
        match &self.inputs {
            InputProducts::Convolved(inputs) => Some(inputs),
            _ => None,
        }
    }

    /// The queries `[n, heads, head_dim]`, and what the output gate is made of, with its function. Appends keys and values to the KV
    /// cache.
    pub(super) fn queries(
        &self,
        x: &Tensor,
        states: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<(Tensor, Option<(Tensor, GateFunction)>)> {
        let (products, gate) = match (&self.inputs, &self.output_gate) {
            (InputProducts::Apart { q, k, v: Some(v) }, OutputGate::Product(gate, function)) => {
                let [q, k, v, gate] = Linear::forward_all([q, k, v, gate], x)?;
                ([q, k, v], Some((gate, *function)))
            }
            (inputs, OutputGate::Product(gate, function)) => {
                (inputs.forward(x, states, pass)?, Some((gate.forward(x)?, *function)))
            }
            (inputs, OutputGate::None) => (inputs.forward(x, states, pass)?, None),
        };
        Ok((self.queries_of(products, states, pass)?, gate))
    }

    /// The queries `[n, heads, head_dim]` of products with the input. Appends keys and values to the KV cache.
    pub(super) fn queries_of(
        &self,
        [q, k, v]: [Tensor; 3],
        states: &mut LayerStates,
        pass: &ForwardPass,
    ) -> Result<Tensor> {
        let AttentionShape { heads, kv_heads, head_dim, value_dim } = self.shape;
        let [_, k_width, v_width, _] = self.shape.widths();
        let (q, k) = self.norm_whole(q, k)?;
        let [q, k, v] = [q, k, v].map(|t| self.clip(t));

        let q = self.position(self.heads(q?, heads, true)?, true, pass)?; // [n, heads, head_dim]
        let q = self.temperature.map_or(Ok(q.clone()), |temperature| temperature.apply(&q, pass))?;
        let k = self.position(self.heads(k?, kv_heads, false)?, false, pass)?; // [n, kv, head_dim]
        let v = self.norm_values(v?)?; // [n, kv · value_dim]
        for (i, span) in pass.spans.iter().enumerate() {
            let layer_kv = states.of_mut(i);
            with_f32(&k, |k| layer_kv.keys.append(span.rows(k, k_width), kv_heads, head_dim))??;
            with_f32(&v, |v| layer_kv.values.append(span.rows(v, v_width), kv_heads, value_dim))??;
        }
        Ok(q)
    }

    /// The attention `[n, heads · value_dim]` of each token to all rows that it sees, or to those chosen.
    pub(super) fn attend(
        &self,
        q: &Tensor,
        states: &LayerStates,
        pass: &ForwardPass,
        selections: &[Selection],
    ) -> Result<Tensor> {
        let ([.., width], rows) = (self.shape.widths(), (states, KEYS_AND_VALUES));
        let mut out = vec![0.0; pass.tokens() * width];
        let (attention, compute) = (self.over_rows(), self.o.compute());
        with_f32(q, |q| attention.attend_step(compute, q, rows, (pass, self.mask), selections, &mut out))??;
        Ok(Tensor::from_vec(out, (pass.tokens(), width), &Device::Cpu)?)
    }

    /// The shape of the attention over the rows of keys and values.
    pub(super) fn over_rows(&self) -> ChosenAttention<'_> {
        let AttentionShape { heads, kv_heads, head_dim: key_width, value_dim: value_width } = self.shape;
        let (scale, sinks) = (self.scale as f32, self.sinks.as_deref());
        ChosenAttention { heads, kv_heads, key_width, value_width, scale, sinks }
    }

    fn norm_whole(&self, q: Tensor, k: Tensor) -> Result<(Tensor, Tensor)> {
        match &self.norm {
            QkNorm::Whole(q_norm, k_norm) => Ok((q_norm.forward(&q)?, k_norm.forward(&k)?)),
            _ => Ok((q, k)),
        }
    }

    /// Values `[n, kv_heads · value_dim]`, normalised and scaled.
    fn norm_values(&self, v: Tensor) -> Result<Tensor> {
        let v = match self.value_norm {
            Some(eps) => rms(&v.reshape(((), self.shape.value_dim))?, eps)?,
            None => v,
        };
        if self.value_scale == 1.0 { Ok(v) } else { Ok(v.affine(self.value_scale, 0.0)?) }
    }

    fn clip(&self, x: Tensor) -> Result<Tensor> {
        match self.clip {
            Some(limit) => Ok(x.clamp(-limit, limit)?),
            None => Ok(x),
        }
    }

    /// `[n, heads · head_dim]` → `[n, heads, head_dim]`
    fn heads(&self, x: Tensor, heads: usize, query: bool) -> Result<Tensor> {
        let x = x.reshape(((), heads, self.shape.head_dim))?;
        match &self.norm {
            QkNorm::PerHead(q_norm, k_norm) => if query { q_norm } else { k_norm }.forward(&x),
            _ => Ok(x),
        }
    }

    fn position(&self, x: Tensor, query: bool, pass: &ForwardPass) -> Result<Tensor> {
        let Some(rotary) = self.rotary else { return Ok(x) };
        let x = rotary.apply(&x, pass)?;
        match &self.norm {
            QkNorm::AfterRope { eps } => rms(&x, *eps),
            QkNorm::PerHeadAfterRope(q_norm, k_norm) => if query { q_norm } else { k_norm }.forward(&x),
            _ => Ok(x),
        }
    }
}
