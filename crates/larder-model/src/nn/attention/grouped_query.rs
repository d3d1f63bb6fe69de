//! Softmax attention with grouped queries, QK norm, sinks, masks, output gates.

use larder_core::{KV_PAGE_TOKENS, Rng};

use super::output_gate::GateRows;
use crate::error::Result;
use crate::kv::{AttentionMask, LayerKv, LayerShape, RowShape, made_up};
use crate::nn::indexers::head_rotation;
use crate::nn::{
    AttentionIndexer, CcaInputs, ChoiceShape, KeysAndValues, Mixer, Norm, OutputGate, RowAttention, TokenScratch,
};
use crate::ops::{Few, HeadNorm, Heads, Near, Ops, Rotary, Rows};
use crate::step::{ForwardPass, LayerStates};
use crate::weights::Linear;

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
    /// The matmuls that yield queries, keys and values.
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
    /// Factor on what attention yields, before the output projection.
    pub output_gate: OutputGate,
    /// Chooses the positions that a query attends to, out of all earlier ones.
    pub indexer: Option<Box<AttentionIndexer>>,
}

/// The rows that attention reads of what a layer keeps.
const KEYS_AND_VALUES: KeysAndValues = |kv| (&kv.keys, Some(&kv.values));

/// The matmuls that yield queries, keys and values.
#[expect(clippy::large_enum_variant, reason = "there is one for each layer")]
pub enum InputProducts {
    /// One for each.
    Apart {
        /// `[heads · head_dim, hidden]`
        q: Linear,
        /// `[kv_heads · head_dim, hidden]`
        k: Linear,
        /// `[kv_heads · value_dim, hidden]`; without it values are what the matmul of the keys yields.
        v: Option<Linear>,
    },
    /// Matmuls and convolutions, with a state beside the KV cache.
    Cca(Box<CcaInputs>),
}

impl InputProducts {
    /// The matmuls with the input.
    fn linears(&self) -> Few<&Linear> {
        match self {
            InputProducts::Apart { q, k, v } => [Some(q), Some(k), v.as_ref()].into_iter().flatten().collect(),
            InputProducts::Cca(inputs) => inputs.products().iter().copied().collect(),
        }
    }

    /// Queries, keys and values, `[n, heads · width]` each, of what the matmuls yield.
    fn forward(
        &self,
        products: &[Rows],
        states: &mut LayerStates,
        pass: &ForwardPass,
        ops: &dyn Ops,
    ) -> Result<[Rows; 3]> {
        match (self, products) {
            (InputProducts::Cca(inputs), [q, k, current, delayed]) => {
                inputs.forward([*q, *k, *current, *delayed], states, pass, ops)
            }
            (_, [q, k, v]) => Ok([*q, *k, *v]),
            (_, products) => Ok([products[0], products[1], products[1]]),
        }
    }
}

impl Mixer for Attention {
    fn forward(&self, x: Rows, states: &mut LayerStates, pass: &ForwardPass, ops: &dyn Ops) -> Result<Rows> {
        let gate = match &self.output_gate {
            OutputGate::Product(product, function) => Some((product, *function)),
            OutputGate::None => None,
        };
        let mut linears = self.inputs.linears();
        let inputs = linears.len();
        linears.extend(gate.map(|(product, _)| product));
        let of_index = linears.len();
        linears.extend(self.indexer.iter().flat_map(|indexer| indexer.products(pass)));
        let products = Linear::forward_each(&linears, x, ops)?;
        let [queries, keys, values] = self.inputs.forward(&products[..inputs], states, pass, ops)?;

        let near = Near::new(self.o.compute(), states.place(), ops);
        let chosen = match &self.indexer {
            Some(indexer) => indexer.select(&near.take_all(products[of_index..].into())?, states, pass, near.ops)?,
            None => None,
        };
        let AttentionShape { kv_heads, head_dim, value_dim, .. } = self.shape;
        for (i, span) in pass.spans.iter().enumerate() {
            let kv = states.of_mut(i);
            kv.keys.extend(span.tokens, kv_heads, head_dim)?;
            kv.values.extend(span.tokens, kv_heads, value_dim)?;
        }
        let scales = self.temperature.map_or_else(Vec::new, |temperature| temperature.scales(pass));
        let [queries, keys, values] = near.take([queries, keys, values])?;
        let heads = Heads {
            queries,
            rest: None,
            keys,
            values: Some(values),
            norm: self.head_norm(near.ops)?,
            clip: self.clip.map(|limit| limit as f32),
            value_norm: self.value_norm,
            value_factor: self.value_scale as f32,
            rotation: head_rotation(self.rotary, 0, &pass.ropes),
            scales: &scales,
            bias: None,
        };
        let (rows, seen) = ((&*states, KEYS_AND_VALUES), (pass, self.mask));
        let mixed = self.over_rows().forward(&heads, rows, seen, chosen.as_deref(), near.ops)?;
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask));
        let mixed = match gate {
            Some((_, function)) => {
                GateRows { rows: products[inputs], function }.apply(near.give(mixed)?, self.shape.heads, ops)?
            }
            None => near.give(mixed)?,
        };
        self.o.forward(mixed, ops)
    }

    fn layer_shape(&self) -> LayerShape {
        let AttentionShape { kv_heads: heads, head_dim, value_dim, .. } = self.shape;
        let rows = |width| RowShape { heads, width };
        let auxiliary = self.indexer.as_ref().map_or(Vec::new(), |indexer| indexer.kept());
        let kept = LayerShape::attention(rows(head_dim), rows(value_dim), self.mask).with_auxiliary(auxiliary);
        LayerShape { recurrent: self.convolved().map(CcaInputs::state_lens), ..kept }
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        let AttentionShape { kv_heads, head_dim, value_dim, .. } = self.shape;
        if let Some(inputs) = self.convolved() {
            state.fill_recurrent(tokens, inputs.state_lens(), rng)?;
        }
        for start in (0..tokens).step_by(KV_PAGE_TOKENS) {
            let rows = KV_PAGE_TOKENS.min(tokens - start) * kv_heads;
            state.keys.append(&made_up(rows * head_dim, rng), kv_heads, head_dim)?;
            state.values.append(&made_up(rows * value_dim, rng), kv_heads, value_dim)?;
            state.release_unseen(self.mask);
        }
        let all = state.keys.len();
        state.auxiliary.iter_mut().try_for_each(|auxiliary| auxiliary.fill(all, rng))
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
        let convolved = self.convolved().map(CcaInputs::scratch).unwrap_or_default();
        let floats = 2 * hidden + queries + 2 * k + v + changed + indexer + convolved.floats;
        TokenScratch { floats, input: hidden.max(mixed).max(convolved.input) }
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
    fn convolved(&self) -> Option<&CcaInputs> {
        match &self.inputs {
            InputProducts::Cca(inputs) => Some(inputs),
            _ => None,
        }
    }

    /// The attention over the rows of keys and values.
    fn over_rows(&self) -> RowAttention<'_> {
        let AttentionShape { heads, kv_heads, head_dim: key_width, value_dim: value_width } = self.shape;
        let (scale, sinks) = (self.scale as f32, self.sinks.as_deref());
        RowAttention { heads, kv_heads, key_width, value_width, scale, sinks }
    }

    /// The norm of queries and keys.
    fn head_norm(&self, ops: &dyn Ops) -> Result<Option<HeadNorm>> {
        let (after_rotation, whole) = match &self.norm {
            QkNorm::None => return Ok(None),
            // Without a rotation there is no norm after it.
            QkNorm::PerHeadAfterRope(..) | QkNorm::AfterRope { .. } if self.rotary.is_none() => return Ok(None),
            QkNorm::PerHeadAfterRope(..) | QkNorm::AfterRope { .. } => (true, false),
            QkNorm::PerHead(..) => (false, false),
            QkNorm::Whole(..) => (false, true),
        };
        let (weights, eps) = match &self.norm {
            QkNorm::Whole(q, k) | QkNorm::PerHead(q, k) | QkNorm::PerHeadAfterRope(q, k) => {
                let [(of_queries, query_eps), (of_keys, key_eps)] = [q, k].map(Norm::rms_parts);
                ([Some(of_queries.of(ops)?), Some(of_keys.of(ops)?)], [query_eps, key_eps])
            }
            QkNorm::AfterRope { eps } => ([None; 2], [*eps; 2]),
            QkNorm::None => unreachable!("there is a norm"),
        };
        Ok(Some(HeadNorm { weights, eps, whole, width: None, after_rotation }))
    }
}
