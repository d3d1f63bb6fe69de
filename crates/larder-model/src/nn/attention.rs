use candle_core::{D, Device, Tensor};

use super::norm::rms;
use super::{LayerState, Mixer, Norm, Pass, Rotary, Visible};
use crate::error::Result;
use crate::matrix::Linear;

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

/// Normalisation of queries and keys.
pub enum HeadNorm {
    /// None.
    No,
    /// Over each whole projection, before it is cut into heads.
    Whole(Norm, Norm),
    /// Over each head.
    PerHead(Norm, Norm),
    /// Over each head, without a weight, after the rotation.
    AfterRope {
        /// Added under the root.
        eps: f64,
    },
}

/// Queries scaled up as the sequence grows: `1 + scale · ln(1 + floor((position + 1) / floor))`.
#[derive(Clone, Copy)]
pub struct Temperature {
    /// Positions per step.
    pub floor: f64,
    /// Height of the logarithm.
    pub scale: f64,
}

/// Softmax attention with all its variations.
pub struct Attention {
    /// Heads and widths.
    pub shape: AttentionShape,
    /// `[heads · head_dim, hidden]`, twice that if `output_gate`.
    pub q: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub k: Linear,
    /// `[kv_heads · head_dim, hidden]`
    pub v: Linear,
    /// `[hidden, heads · head_dim]`
    pub o: Linear,
    /// Normalisation of queries and keys.
    pub norm: HeadNorm,
    /// Queries, keys and values are clamped to ± this.
    pub clip: Option<f64>,
    /// Rotation of queries and keys, or none.
    pub rotary: Option<Rotary>,
    /// Which earlier positions are looked at.
    pub visible: Visible,
    /// Factor on the scores.
    pub scale: f64,
    /// `[heads]`: a score per head that takes part in the softmax and leads nowhere.
    pub sinks: Option<Tensor>,
    /// Scaling of queries with the position.
    pub temperature: Option<Temperature>,
    /// The query product also yields, per head, a gate for the output.
    pub output_gate: bool,
}

impl Mixer for Attention {
    fn forward(&self, x: &Tensor, state: &mut LayerState, pass: &Pass) -> Result<Tensor> {
        let AttentionShape { heads, kv_heads, head_dim } = self.shape;
        let n = pass.tokens;
        let (q, gate) = self.query(x, n)?; // [n, heads · head_dim]
        let (q, k) = self.norm_whole(q, self.k.forward(x)?)?;
        let [q, k, v] = [q, k, self.v.forward(x)?].map(|t| self.clip(t));

        let q = self.position(self.heads(q?, heads, true)?, pass)?; // [heads, n, head_dim]
        let k = self.position(self.heads(k?, kv_heads, false)?, pass)?; // [kv, n, head_dim]
        let v = v?.reshape((n, kv_heads, head_dim))?.transpose(0, 1)?; // [kv, n, head_dim]
        let q = self.warm(q, pass)?;

        let span = pass.span(self.visible);
        let k = state.keys.append(&k, span.from)?; // [kv, t, head_dim]
        let v = state.values.append(&v, span.from)?; // [kv, t, head_dim]
        let q = q.reshape((kv_heads, heads / kv_heads * n, head_dim))?;
        let scores = (q.contiguous()?.matmul(&k.transpose(1, 2)?)? * self.scale)?; // [kv, group · n, t]
        let weights = self.softmax(scores, span.mask.as_ref(), n)?; // [kv, group · n, t]
        let mixed = weights.matmul(&v.contiguous()?)?; // [kv, group · n, head_dim]

        let mixed = mixed.reshape((heads, n, head_dim))?.transpose(0, 1)?.reshape((n, heads * head_dim))?;
        self.o.forward(&match gate {
            Some(gate) => (mixed * candle_nn::ops::sigmoid(&gate)?)?,
            None => mixed,
        })
    }

    fn visible(&self) -> Option<Visible> {
        Some(self.visible)
    }
}

impl Attention {
    /// Queries `[n, heads · head_dim]`, and the output gate of the same shape if there is one.
    fn query(&self, x: &Tensor, n: usize) -> Result<(Tensor, Option<Tensor>)> {
        let AttentionShape { heads, head_dim, .. } = self.shape;
        let q = self.q.forward(x)?;
        if !self.output_gate {
            return Ok((q, None));
        }
        let both = q.reshape((n, heads, 2 * head_dim))?;
        let part = |at| both.narrow(2, at, head_dim)?.contiguous()?.reshape((n, heads * head_dim));
        Ok((part(0)?, Some(part(head_dim)?)))
    }

    fn norm_whole(&self, q: Tensor, k: Tensor) -> Result<(Tensor, Tensor)> {
        match &self.norm {
            HeadNorm::Whole(q_norm, k_norm) => Ok((q_norm.forward(&q)?, k_norm.forward(&k)?)),
            _ => Ok((q, k)),
        }
    }

    fn clip(&self, x: Tensor) -> Result<Tensor> {
        match self.clip {
            Some(limit) => Ok(x.clamp(-limit, limit)?),
            None => Ok(x),
        }
    }

    /// `[n, heads · head_dim]` → `[heads, n, head_dim]`
    fn heads(&self, x: Tensor, heads: usize, query: bool) -> Result<Tensor> {
        let x = x.reshape(((), heads, self.shape.head_dim))?;
        let x = match &self.norm {
            HeadNorm::PerHead(q_norm, k_norm) => if query { q_norm } else { k_norm }.forward(&x)?,
            _ => x,
        };
        Ok(x.transpose(0, 1)?.contiguous()?)
    }

    fn position(&self, x: Tensor, pass: &Pass) -> Result<Tensor> {
        let Some(rotary) = self.rotary else { return Ok(x) };
        let x = rotary.apply(&x, pass)?;
        match self.norm {
            HeadNorm::AfterRope { eps } => rms(&x, eps),
            _ => Ok(x),
        }
    }

    fn warm(&self, q: Tensor, pass: &Pass) -> Result<Tensor> {
        let Some(Temperature { floor, scale }) = self.temperature else { return Ok(q) };
        let at = |i| (((pass.start + i + 1) as f64 / floor).floor().ln_1p() * scale + 1.0) as f32;
        let scales: Vec<f32> = (0..pass.tokens).map(at).collect();
        Ok(q.broadcast_mul(&Tensor::from_vec(scales, (1, pass.tokens, 1), &Device::Cpu)?)?)
    }

    /// `scores [kv, group · n, t]` → weights of the same shape
    fn softmax(&self, scores: Tensor, mask: Option<&Tensor>, n: usize) -> Result<Tensor> {
        let (kv, rows, t) = scores.dims3()?;
        let scores = scores.reshape((kv, rows / n, n, t))?;
        let scores = match mask {
            Some(mask) => scores.broadcast_add(mask)?,
            None => scores,
        };
        let weights = match &self.sinks {
            Some(sinks) => {
                let sinks = sinks.reshape((kv, rows / n, 1, 1))?.broadcast_as((kv, rows / n, n, 1))?;
                let all = Tensor::cat(&[&scores, &sinks.contiguous()?], D::Minus1)?;
                candle_nn::ops::softmax_last_dim(&all)?.narrow(D::Minus1, 0, t)?.contiguous()?
            }
            None => candle_nn::ops::softmax_last_dim(&scores)?,
        };
        Ok(weights.reshape((kv, rows, t))?)
    }
}
