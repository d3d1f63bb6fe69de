//! The forward pass of the layer for multi-token prediction.

use super::head::Ending;
use super::layer::OtherLayers;
use crate::decoder::{Decoder, Logits};
use crate::error::{ModelError, Result};
use crate::experts::{DevicePath, ExpertPath};
use crate::kv::KvCache;
use crate::nn::Running;
use crate::ops::Rows;
use crate::stack::MtpLayer;
use crate::step::{LayerStates, Span};
use crate::tap::{Phase, PhaseClock, Tap};

impl Decoder {
    /// Whether the model is used with its layer for multi-token prediction.
    pub fn predicts(&self) -> bool {
        self.stack.mtp.is_some()
    }

    /// An empty KV cache of the layer for multi-token prediction, from the memory of all KV caches.
    pub fn new_mtp_cache(&self) -> KvCache {
        let before = self.stack.layers.iter().filter(|layer| layer.shape().can_be_on_device()).count();
        KvCache::behind(before, self.stack.mtp.iter().map(|mtp| mtp.layer.shape()), &self.kv_pool)
    }

    /// Computes the layer for multi-token prediction. The tokens of a span are those behind the positions that `hidden`
    /// has the hidden states of, `[tokens of all spans, hidden]`; its KV cache is of the layer alone. As
    /// [`step`](Self::step), it appends to the KV caches and returns the logits that the spans ask for, which are of
    /// the tokens behind those given. The hidden states that a span asks for can take the place of the model's, for the
    /// next token.
    ///
    /// After an error the KV caches are as after an error of [`step`](Self::step).
    pub fn predict(
        &self,
        spans: &mut [Span],
        hidden: &[f32],
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Vec<f32>> {
        self.check(spans)?;
        let Some(mtp) = &self.stack.mtp else {
            return Err(ModelError::Request("the model has no layer for multi-token prediction".into()));
        };
        if !tap.wants_more() {
            return Err(ModelError::Cancelled);
        }
        let _only = self.stack.head.compute().step();
        let (mut clock, before) = (PhaseClock::start(), self.stack.head.compute().time());
        self.ops().retain(&[]);
        let pass = self.pass(spans);
        experts.on_device().into_iter().for_each(|device| device.step_begins(0));
        let (ops, factor) = (self.ops(), self.stack.factors.residual as f32);
        let mut running = Running { pass: &pass, ops, experts, tap: &mut *tap, clock: &mut clock, factor };
        let logits = self.mtp_logits(mtp, spans, hidden, &mut running).inspect_err(|_| self.settle())?;
        experts.on_device().into_iter().for_each(DevicePath::count_chosen);
        clock.lap(Phase::EmbedAndHead, tap);
        tap.compute_time(self.stack.head.compute().time() - before);
        spans.iter_mut().for_each(|span| span.cache.len += span.tokens.len());
        Ok(logits)
    }

    /// The logits and hidden states that the spans ask for; on a device they are one chain.
    fn mtp_logits(
        &self,
        mtp: &MtpLayer,
        spans: &mut [Span],
        hidden: &[f32],
        running: &mut Running,
    ) -> Result<Vec<f32>> {
        let x = self.mtp_input(mtp, spans, hidden)?;
        running.clock.lap(Phase::EmbedAndHead, running.tap);
        let x = mtp.layer.forward(x, OtherLayers::default(), &mut LayerStates::new(spans, 0), running)?;
        let ending = Ending { streams: None, norm: &mtp.norm };
        self.logits_of(ending, x, spans, None, running.pass).map(Logits::into_all)
    }

    /// The input of the layer: `[tokens, hidden]`.
    fn mtp_input(&self, mtp: &MtpLayer, spans: &[Span], hidden: &[f32]) -> Result<Rows> {
        let ops = self.ops();
        let embedded = self.embed_spans(spans)?;
        let hidden = ops.send(hidden, embedded.width)?;
        let both = ops.beside(mtp.embedding_norm.forward(embedded, ops)?, mtp.hidden_norm.forward(hidden, ops)?)?;
        mtp.projection.forward(both, ops)
    }
}
