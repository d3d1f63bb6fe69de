//! Softmax attention with grouped queries, QK norm, sinks, masks, output gate.

use candle_core::{Device, Tensor};
use larder_core::{KV_PAGE_TOKENS, Rng, SequenceMemory};
use larder_kernels::{AttentionArgs, AttentionTask};

use super::norm::rms;
use super::{AttentionMask, ForwardPass, LayerKv, Mixer, Norm, Rotary, TokenScratch, made_up};
use crate::error::Result;
use crate::matrix::{Linear, with_f32};
use crate::step::LayerStates;

/// Heads and widths of attention.
#[derive(Clone, Copy)]
pub struct AttentionShape {
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; each serves `heads / kv_heads` query heads.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
}

/// Normalisation of queries and keys (QK norm).
pub enum QkNorm {
    /// None.
    None,
    /// Over the whole projection, before it is split into heads.
    Whole(Norm, Norm),
    /// Over each head.
    PerHead(Norm, Norm),
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
        let factor = |at| (((at + self.first) as f64 / self.floor).floor().ln_1p() * self.scale + 1.0) as f32;
        let scales: Vec<f32> = pass.positions().map(factor).collect();
        Ok(q.broadcast_mul(&Tensor::from_vec(scales, (pass.tokens(), 1, 1), &Device::Cpu)?)?)
    }
}

/// Softmax attention with all options that an architecture uses.
pub struct Attention {
    /// Heads and widths.
    pub shape: AttentionShape,
    /// `[heads · head_dim, hidden]`, twice that if `output_gate`.
    pub q: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub k: Linear,
    /// `[kv_heads · head_dim, hidden]`; without it values are what the product of the keys yields.
    pub v: Option<Linear>,
    /// `[hidden, heads · head_dim]`
    pub o: Linear,
    /// Normalisation of queries and keys.
    pub norm: QkNorm,
    /// Values are normalised over each head, without a weight; this is added under the root.
    pub value_norm: Option<f64>,
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
    /// The query product also yields an output gate per head.
    pub output_gate: bool,
}

impl Mixer for Attention {
    fn forward(&self, x: &Tensor, states: &mut LayerStates, pass: &ForwardPass) -> Result<Tensor> {
        let AttentionShape { heads, kv_heads, head_dim } = self.shape;
        let n = pass.tokens();
        let (q, k, v) = match &self.v {
            Some(v) => Linear::forward_all([&self.q, &self.k, v], x)?.into(),
            None => {
                let [q, k] = Linear::forward_all([&self.q, &self.k], x)?;
                (q, k.clone(), k)
            }
        };
        let (q, gate) = self.part(q, n)?; // [n, heads · head_dim]
        let (q, k) = self.norm_whole(q, k)?;
        let [q, k, v] = [q, k, v].map(|t| self.clip(t));

        let q = self.position(self.heads(q?, heads, true)?, pass)?; // [n, heads, head_dim]
        let q = self.temperature.map_or(Ok(q.clone()), |temperature| temperature.apply(&q, pass))?;
        let k = self.position(self.heads(k?, kv_heads, false)?, pass)?; // [n, kv, head_dim]
        let v = self.norm_values(v?)?;
        let mut mixed = vec![0.0; n * heads * head_dim]; // [n, heads, head_dim]
        let (k_width, q_width) = (kv_heads * head_dim, heads * head_dim);
        for (i, span) in pass.spans.iter().enumerate() {
            let layer_kv = states.of_mut(i);
            with_f32(&k, |k| layer_kv.keys.append(span.rows(k, k_width), kv_heads, head_dim))??;
            with_f32(&v, |v| layer_kv.values.append(span.rows(v, k_width), kv_heads, head_dim))??;
        }
        let seen = pass.visible_ranges(self.mask);
        with_f32(&q, |q| {
            let tasks = pass.split(&mut mixed, q_width).enumerate().map(|(i, (span, out))| {
                let args = AttentionArgs {
                    queries: span.rows(q, q_width),
                    heads,
                    keys: states.of(i).keys.view(head_dim),
                    values: states.of(i).values.view(head_dim),
                    kv_heads,
                    seen: span.rows(&seen, 1),
                    scale: self.scale as f32,
                    sinks: self.sinks.as_deref(),
                };
                AttentionTask { args, out }
            });
            self.o.compute().attend(&mut tasks.collect::<Vec<_>>())
        })??;
        (0..pass.spans.len()).for_each(|i| states.of_mut(i).release_unseen(self.mask));
        let mixed = Tensor::from_vec(mixed, (n, heads * head_dim), &Device::Cpu)?;
        self.o.forward(&match gate {
            Some(gate) => (mixed * candle_nn::ops::sigmoid(&gate)?)?,
            None => mixed,
        })
    }

    fn memory_need(&self) -> SequenceMemory {
        let AttentionShape { kv_heads, head_dim, .. } = self.shape;
        let rows = SequenceMemory::rows(kv_heads, head_dim);
        rows + rows
    }

    fn fill(&self, state: &mut LayerKv, tokens: usize, rng: &mut Rng) -> Result<()> {
        let AttentionShape { kv_heads, head_dim, .. } = self.shape;
        for start in (0..tokens).step_by(KV_PAGE_TOKENS) {
            let values = KV_PAGE_TOKENS.min(tokens - start) * kv_heads * head_dim;
            state.keys.append(&made_up(values, rng), kv_heads, head_dim)?;
            state.values.append(&made_up(values, rng), kv_heads, head_dim)?;
            state.release_unseen(self.mask);
        }
        Ok(())
    }

    fn scratch(&self, hidden: usize) -> TokenScratch {
        let AttentionShape { heads, kv_heads, head_dim } = self.shape;
        let (q, kv) = (heads * head_dim, kv_heads * head_dim);
        // Queries and what attention makes of them; with an output gate also that, its sigmoid and their product.
        // Values that are normalised exist twice for a while.
        let normed = if self.value_norm.is_some() { kv } else { 0 };
        let queries = if self.output_gate { 5 * q } else { 2 * q };
        TokenScratch { floats: 2 * hidden + queries + 3 * kv + normed, input: hidden.max(q) }
    }
}

impl Attention {
    /// Queries `[n, heads · head_dim]`, and the output gate of the same shape if there is one.
    fn part(&self, q: Tensor, n: usize) -> Result<(Tensor, Option<Tensor>)> {
        let AttentionShape { heads, head_dim, .. } = self.shape;
        if !self.output_gate {
            return Ok((q, None));
        }
        let both = q.reshape((n, heads, 2 * head_dim))?;
        let part = |at| both.narrow(2, at, head_dim)?.contiguous()?.reshape((n, heads * head_dim));
        Ok((part(0)?, Some(part(head_dim)?)))
    }

    fn norm_whole(&self, q: Tensor, k: Tensor) -> Result<(Tensor, Tensor)> {
        match &self.norm {
            QkNorm::Whole(q_norm, k_norm) => Ok((q_norm.forward(&q)?, k_norm.forward(&k)?)),
            _ => Ok((q, k)),
        }
    }

    /// `[n, kv_heads · head_dim]`
    fn norm_values(&self, v: Tensor) -> Result<Tensor> {
        match self.value_norm {
            Some(eps) => rms(&v.reshape(((), self.shape.head_dim))?, eps),
            None => Ok(v),
        }
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

    fn position(&self, x: Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let Some(rotary) = self.rotary else { return Ok(x) };
        let x = rotary.apply(&x, pass)?;
        match self.norm {
            QkNorm::AfterRope { eps } => rms(&x, eps),
            _ => Ok(x),
        }
    }
}
