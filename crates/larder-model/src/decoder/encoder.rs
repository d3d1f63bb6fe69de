//! The forward pass of an encoder-decoder model: the encoder over a whole prompt, then the decoder behind it.

use std::slice;

use crate::decoder::{BestLogits, Decoder, Logits};
use crate::error::{ModelError, Result};
use crate::experts::ExpertPath;
use crate::kv::EncoderInput;
use crate::nn::{MoeInput, Running};
use crate::ops::Rows;
use crate::stack::{Encoder, EncoderLayer, Ffn};
use crate::step::{ForwardPass, HandedOn, LogitsFor, Span, SpanImages, TokenOrigin, TokenPhase};
use crate::tap::{Phase, PhaseClock, Tap};

impl Decoder {
    /// [`step`](Self::step) of a model with an encoder.
    pub(crate) fn step_with_encoder(
        &self,
        encoder: &Encoder,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Logits> {
        for span in spans.iter_mut() {
            self.prepare(encoder, span, experts, tap)?;
        }
        let mut decoded: Vec<Span> = spans.iter_mut().filter_map(|span| decoder_span(encoder, span)).collect();
        let logits =
            if decoded.is_empty() { Logits::default() } else { self.forward(&mut decoded, best, experts, tap)? };
        spans.iter_mut().for_each(count_tokens);
        Ok(logits)
    }

    /// Appends the tokens of a span to the input of the encoder or the decoder, and computes what comes before those of
    /// the decoder.
    fn prepare(
        &self,
        encoder: &Encoder,
        span: &mut Span,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<()> {
        let (generated, input) = (span.origin.phase == TokenPhase::Decode, input(span));
        if generated && !input.computed {
            self.catch_up(encoder, span, experts, tap)?;
        } else if !generated && span.logits_for == LogitsFor::All && span.tokens.len() > 1 {
            return Err(ModelError::Request(
                "a model with an encoder has logits for the last token of a prompt only, not for all of it".into(),
            ));
        }
        let tokens = span.tokens;
        let input = self::input(span);
        input.tokens.extend_from_slice(tokens);
        if !generated {
            input.computed = false;
        }
        if !generated && span.logits_for != LogitsFor::None {
            self.encode(encoder, usize::MAX, span, experts, tap)
        } else {
            Ok(())
        }
    }

    /// Computes the prompt, the start token and all tokens behind them that a sequence has.
    fn catch_up(
        &self,
        encoder: &Encoder,
        span: &mut Span,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<()> {
        let EncoderInput { tokens, prompt, .. } = input(span).clone();
        self.encode(encoder, prompt, span, experts, tap)?;
        let tokens = [slice::from_ref(&encoder.start), &tokens[prompt..]].concat();
        let Span { horizon, origin, .. } = *span;
        let again = Span { horizon, logits_for: LogitsFor::None, origin, ..Span::new(&tokens, span.cache) };
        self.forward(&mut [again], None, experts, tap)?;
        input(span).computed = true;
        Ok(())
    }

    /// Runs the encoder over the first `prompt` tokens of a sequence, and keeps what the decoder needs of its output.
    fn encode(
        &self,
        encoder: &Encoder,
        prompt: usize,
        span: &mut Span,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<()> {
        let tokens = input(span).tokens.clone();
        let tokens = &tokens[..prompt.min(tokens.len())];
        if tokens.is_empty() {
            return Err(ModelError::Request("a model with an encoder needs a prompt before it generates text".into()));
        }
        let origins = vec![TokenOrigin { phase: TokenPhase::Prefill, ..span.origin }; tokens.len()];
        let (handed_on, router_state) = (HandedOn::default(), HandedOn::default());
        let (spans, ropes) = (Vec::new(), Vec::new());
        let pass =
            ForwardPass { spans, origins, tokens: tokens.to_vec(), drawn: false, ropes, handed_on, router_state };
        span.cache.layers.iter_mut().for_each(|layer| layer.clear());
        let (_only, ops) = (self.stack.head.compute().step(), self.ops());
        ops.retain(&[]);
        let mut clock = PhaseClock::start();
        let own = encoder.embed.as_deref().unwrap_or(self.embedding());
        let mut x = self.embed(own, [(tokens, SpanImages::default())].into_iter())?; // [tokens, hidden]
        clock.lap(Phase::EmbedAndHead, tap);
        for (i, layer) in encoder.layers.iter().enumerate() {
            if !tap.wants_more() {
                return Err(ModelError::Cancelled);
            }
            tap.progress(i, encoder.layers.len());
            self.report(tap, i, x)?;
            let mut running = Running { pass: &pass, ops, experts, tap: &mut *tap, clock: &mut clock, factor: 1.0 };
            x = self.encode_layer(layer, x, &mut running)?;
        }
        let encoded = encoder.norm.forward(x, ops)?;
        self.report(tap, encoder.layers.len(), encoded)?;
        for (cross, state) in encoder.cross.iter().zip(&mut span.cache.layers) {
            cross.attention.remember(encoded, state, ops)?;
        }
        clock.lap(Phase::Mixing, tap);
        Ok(())
    }

    /// `x [tokens, hidden]` → same shape
    fn encode_layer(&self, layer: &EncoderLayer, x: Rows, running: &mut Running) -> Result<Rows> {
        let ops = running.ops;
        ops.begin_layer();
        ops.retain(&[x]);
        let y = layer.attention.over_all(layer.attention_norm.forward(x, ops)?, &self.kv_pool, ops)?;
        let [x, input] = layer.ffn_norm.add_forward(x, y, 1.0, ops)?;
        running.clock.lap(Phase::Mixing, running.tap);
        let y = match &layer.ffn {
            Ffn::Dense(mlp) => mlp.forward(input, ops)?,
            Ffn::Moe(moe) => {
                let router = moe.route([x, input], None, ops)?;
                let of_experts = moe.expert_input(input, ops)?;
                let input = MoeInput { stream: x, x: input, of_experts, router, onto: None };
                moe.forward(&input, None, None, running)?.rows
            }
        };
        running.clock.lap(Phase::Experts, running.tap);
        ops.add(x, y, 1.0)
    }

    fn report(&self, tap: &mut dyn Tap, stage: usize, x: Rows) -> Result<()> {
        if tap.wants_hidden() {
            tap.encoder_hidden(stage, &self.ops().download(&[x])?[0]);
        }
        Ok(())
    }
}

/// The tokens of the span's sequence.
fn input<'s>(span: &'s mut Span) -> &'s mut EncoderInput {
    span.cache.encoder.as_mut().expect("the caches of a model with an encoder have its input")
}

/// What the decoder computes for a span: generated tokens, or the start token after a prompt whose logits are asked
/// for.
fn decoder_span<'s>(encoder: &'s Encoder, span: &'s mut Span) -> Option<Span<'s>> {
    let Span { tokens, horizon, logits_for, origin, .. } = *span;
    match origin.phase {
        TokenPhase::Decode => Some(Span { horizon, logits_for, origin, ..Span::new(tokens, span.cache) }),
        TokenPhase::Prefill if logits_for == LogitsFor::None => None,
        TokenPhase::Prefill => {
            let tokens = slice::from_ref(&encoder.start);
            Some(Span { horizon, logits_for, origin, ..Span::new(tokens, span.cache) })
        }
    }
}

/// Counts the tokens of a span that is done.
fn count_tokens(span: &mut Span) {
    span.cache.len += span.tokens.len();
    let (len, asked) = (span.cache.len, span.logits_for != LogitsFor::None);
    if span.origin.phase == TokenPhase::Prefill {
        let input = input(span);
        (input.prompt, input.computed) = (len, asked);
    }
}
