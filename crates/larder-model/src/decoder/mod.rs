//! The forward pass: embedding, layers, final norm, output head, in one step over some tokens of each of several
//! sequences.

mod ahead;
mod encoder;
mod head;
mod images;
mod layer;
mod logits;
mod mtp;
mod saving;
mod step_memory;

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::thread;

use larder_core::{Blueprint, Gate, Geometry, IGNORED_KEY, LayerIdx, MTP_KEY, Rng, SequenceMemory, Tensors};
use larder_os::timeline;
use serde_json::Value;

use crate::arch;
use crate::compute::ComputeContext;
use crate::config::{Config, Refusal, TextConfig, config_error, refused, text_config, without_ignored};
use crate::decoder::layer::OtherLayers;
use crate::decoder::step_memory::step_memory;
use crate::error::{ModelError, Result};
use crate::experts::{DevicePath, ExpertPath};
use crate::kv::{KvCache, KvPool, LayerShape};
use crate::nn::{ExpertsByToken, Mixer, Rope, Running};
use crate::ops::{Activation, Ops, RopeTable, Rows};
use crate::stack::{Ffn, Layer, Stack};
use crate::step::{ForwardPass, HandedOn, LayerStates, Span, SpanPositions, is_of_image};
use crate::tap::{Phase, PhaseClock, Tap, report_hidden};
use crate::weights::{EmbeddingRows, ReadAhead, RowTraffic, WeightLoader};

pub use ahead::{AheadInput, BegunStep};
pub use logits::{BestLogits, Logits, LogitsRow, TokenLogit};

/// A model that has been built from its config, with its resident weights.
pub struct Decoder {
    pub(crate) stack: Stack,
    pub(crate) kv_pool: Arc<KvPool>,
    /// Whether steps may run ahead, runs of such steps so far, and all steps.
    pub(crate) runs_ahead: AtomicBool,
    pub(crate) runs: AtomicU64,
    pub(crate) steps: AtomicU64,
}

/// Everything about a model that follows from its config alone: geometry, tensors, memory per token.
pub fn blueprint(config: &Value) -> Result<Blueprint> {
    let mut weights = WeightLoader::list();
    let (model_type, stack) = build(config, &mut weights)?;
    let (step_memory, sequence_memory) = (step_memory(&stack), sequence_memory(&stack));
    let (kv_layers, runs_ahead) = (kv_layers(&stack), stack.runs_ahead());
    let heads = stack.all_layers().filter_map(|layer| Some(layer.mixer.as_ref()?.part.heads()));
    let attention_heads = heads.max().unwrap_or(0);
    let tables = stack.layers.iter().filter_map(|layer| layer.moe()?.by_token.as_ref());
    let by_token_bytes = tables.map(ExpertsByToken::device_bytes).sum();
    Ok(Blueprint {
        model_type: model_type.to_owned(),
        geometry: stack.geometry,
        experts: stack.experts,
        resident: weights.requested().to_vec(),
        hidden: stack.hidden,
        vocab: stack.vocab,
        context: stack.context,
        sequence_memory,
        kv_layers,
        step_memory,
        attention_heads,
        by_token_bytes,
        runs_ahead,
    })
}

/// The keys of `config` that are refused, whether it ignores them or not.
pub fn refused_keys(config: &Value) -> Result<Vec<String>> {
    let mut config = config.clone();
    config.as_object_mut().and_then(|keys| keys.remove(IGNORED_KEY));
    let (_, _, refusals) = build_gathering(&config, &mut WeightLoader::list())?;
    Ok(refusals.into_iter().map(|refusal| refusal.key).collect())
}

/// Whether sequences of the model that `config` describes can go back a few tokens; see [`Decoder::rewinds_freely`].
pub fn rewinds_freely(config: &Value) -> Result<bool> {
    Ok(build(config, &mut WeightLoader::list())?.1.rewinds_freely())
}

/// Whether sequences of the model that `config` describes may have images; see [`Decoder::takes_images`].
pub fn takes_images(config: &Value) -> Result<bool> {
    Ok(build(config, &mut WeightLoader::list())?.1.image_token.is_some())
}

/// Memory per sequence. With an encoder a token is either in the prompt, which each layer attends to, or behind it.
fn sequence_memory(stack: &Stack) -> SequenceMemory {
    let cross = stack.encoder.iter().flat_map(|encoder| &encoder.cross).map(|cross| cross.attention.memory_need());
    stack.all_layers().map(|layer| layer.shape().memory()).chain(cross).sum()
}

/// Keys and values of each layer that can have them on a device, in the order in which they get a place there.
fn kv_layers(stack: &Stack) -> Vec<SequenceMemory> {
    let layers: Vec<LayerShape> = stack.layers.iter().map(Layer::shape).collect();
    let cross = |layer: usize| stack.encoder.iter().map(move |encoder| encoder.cross[layer].attention.memory_need());
    let with_cross = |layer: usize| [layers[layer].kv_memory()].into_iter().chain(cross(layer)).sum();
    let own = stack.mtp.iter().map(|mtp| mtp.layer.shape()).filter(LayerShape::can_be_on_device);
    let order = LayerShape::device_order(&layers).into_iter().map(with_cross);
    order.chain(own.map(|layer| layer.kv_memory())).collect()
}

fn build(config: &Value, weights: &mut WeightLoader) -> Result<(&'static str, Stack)> {
    match build_gathering(config, weights)? {
        (name, stack, refusals) if refusals.is_empty() => Ok((name, stack)),
        (_, _, refusals) => Err(refused(&refusals)),
    }
}

/// Builds a model, also if keys of its config are refused; with these.
fn build_gathering(config: &Value, weights: &mut WeightLoader) -> Result<(&'static str, Stack, Vec<Refusal>)> {
    let kept = without_ignored(config);
    let TextConfig { config, mut refusals } = text_config(&kept)?;
    let config = arch::with_defaults(config);
    let mut c = Config::new(&config)?;
    let name = c.opt_text("model_type")?.ok_or_else(|| config_error("model_type is missing"))?;
    let arch = arch::find(name)?;
    c.with_mtp = c.flag_or(MTP_KEY, false)?;
    if c.with_mtp {
        arch::check_mtp(arch.model_type)?;
    }
    c.require_experts_per_token()?;
    let mut stack = (arch.build)(&mut c, weights)?;
    refusals.extend(c.judge(&arch::stated(&stack, weights.requested())));
    stack.context = stack.ropes.iter().map(|rope| rope.max_context(stack.context)).fold(stack.context, usize::max);
    Ok((arch.model_type, stack, refusals))
}

impl Decoder {
    /// Builds the model that `config` describes and loads its resident weights from `tensors`. Matmuls and attention
    /// are computed on `compute`.
    pub fn load(config: &Value, tensors: &dyn Tensors, compute: Arc<ComputeContext>) -> Result<Self> {
        let mut list = WeightLoader::list();
        build(config, &mut list)?;
        let ahead = ReadAhead::new(tensors, list.requested());
        let (_, stack) = thread::scope(|scope| {
            let _reading = ahead.begin(scope);
            build(config, &mut WeightLoader::load(tensors, &ahead, compute))
        })?;
        let kv_pool = stack.head.compute().new_kv_pool();
        Ok(Decoder {
            stack,
            kv_pool,
            runs_ahead: AtomicBool::default(),
            runs: AtomicU64::default(),
            steps: AtomicU64::default(),
        })
    }

    /// Sizes of the expert part.
    pub fn geometry(&self) -> &Geometry {
        &self.stack.geometry
    }

    /// The gate of each MoE layer, in order.
    pub fn gates(&self) -> impl Iterator<Item = &Gate> {
        self.moe_layers().map(|(_, gate, _)| gate)
    }

    /// Index, gate and activation function of each MoE layer, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = (LayerIdx, &Gate, Activation)> {
        self.stack.ffns().filter_map(|ffn| match ffn {
            Ffn::Moe(moe) => Some((moe.layer, &moe.gate, moe.act)),
            Ffn::Dense(_) => None,
        })
    }

    /// Whether a token may use no expert in a layer.
    pub fn may_skip_experts(&self) -> bool {
        self.stack.ffns().any(|ffn| matches!(ffn, Ffn::Moe(moe) if moe.router.may_skip()))
    }

    /// Whether a sequence can go back a few tokens without computing any again: there is neither an encoder nor a
    /// recurrent state.
    pub fn rewinds_freely(&self) -> bool {
        self.stack.rewinds_freely()
    }

    /// The embedding of the decoder.
    pub(crate) fn embedding(&self) -> &dyn EmbeddingRows {
        self.stack.embed.as_ref()
    }

    /// Layers of the encoder, which are counted before those of the decoder; 0 without one.
    pub fn encoder_layers(&self) -> usize {
        self.stack.encoder.as_ref().map_or(0, |encoder| encoder.layers.len())
    }

    /// Layers of the decoder.
    pub fn layers(&self) -> usize {
        self.stack.layer_count()
    }

    /// How many rows of tables of n-grams were read and found in memory so far; `None` if the model has no such table
    /// on the SSD.
    pub fn ngram_rows(&self) -> Option<RowTraffic> {
        let mixers = self.stack.layers.iter().filter_map(|layer| layer.mixer.as_ref());
        mixers.filter_map(|mixer| mixer.part.ngram_rows()).reduce(|all, own| all + own)
    }

    /// Whether sequences may have images.
    pub fn takes_images(&self) -> bool {
        self.stack.image_token.is_some()
    }

    /// Width of a hidden state.
    pub fn hidden(&self) -> usize {
        self.stack.hidden
    }

    /// Tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        self.stack.vocab
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.stack.context
    }

    /// An empty KV cache. Its memory grows with the tokens.
    pub fn new_kv_cache(&self) -> KvCache {
        let shapes = self.stack.layers.iter().map(Layer::shape);
        match self.stack.encoder {
            Some(_) => KvCache::with_encoder(shapes, &self.kv_pool),
            None => KvCache::new(shapes, &self.kv_pool),
        }
    }

    /// Appends the states of `tokens` tokens that were not computed to a KV cache: values drawn from `seed`. Attention
    /// over them takes the time that it takes over computed ones, so this measures decode after a long context.
    ///
    /// After an error the KV cache is as after an error of [`step`](Self::step).
    pub fn fill_kv_cache(&self, cache: &mut KvCache, tokens: usize, seed: u64) -> Result<()> {
        self.check_len(cache.len.saturating_add(tokens))?;
        if self.stack.encoder.is_some() {
            return Err(ModelError::Request("a model with an encoder has no made-up context".into()));
        }
        cache.begin(tokens);
        for (i, (layer, state)) in self.stack.layers.iter().zip(&mut cache.layers).enumerate() {
            if let Some(mixer) = &layer.mixer {
                mixer.part.fill(state, tokens, &mut Rng::with_stream(seed, i as u64))?;
            }
        }
        cache.len += tokens;
        Ok(())
    }

    /// The memory of the KV caches of all sequences.
    pub fn kv_pool(&self) -> &KvPool {
        &self.kv_pool
    }

    /// Whether a KV cache computed for a sequence of `before` tokens is valid when the sequence grows to `after`
    /// tokens; if not, the sequence must be computed again from its start.
    pub fn kv_valid_after_growth(&self, before: usize, after: usize) -> bool {
        self.stack.ropes.iter().filter_map(Rope::switches_at).all(|at| before > at || after <= at)
    }

    /// Whether a KV cache computed in a sequence of `before` tokens, then truncated, equals that of a sequence of
    /// `after` tokens computed from its start.
    pub fn kv_valid_after_rewind(&self, before: usize, after: usize) -> bool {
        self.stack.ropes.iter().all(|rope| rope.same_angles(before, after))
    }

    /// Computes a step: the tokens of all `spans`, visiting each layer once. Appends them to their KV caches, and
    /// returns the logits that the spans ask for, span after span: `[rows, vocab]`.
    ///
    /// The encoder of an encoder-decoder model reads a prompt as a whole, when the logits of its last token are asked
    /// for or when a token behind it is computed. No other token of a prompt has logits. A prompt that follows
    /// generated text begins at the start of the sequence.
    ///
    /// After an error the contents of the KV caches after their first `len` tokens are unspecified; truncating
    /// each to its `len` makes it valid again.
    pub fn step(&self, spans: &mut [Span], experts: &mut dyn ExpertPath, tap: &mut dyn Tap) -> Result<Vec<f32>> {
        self.step_best(spans, None, experts, tap).map(Logits::into_all)
    }

    /// As [`step`](Self::step), for a choice that reads `best` of each row alone: a device that computes the logits may
    /// find these itself, so that the others are not copied.
    pub fn step_best(
        &self,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Logits> {
        self.check(spans)?;
        spans.iter_mut().for_each(|span| span.cache.begin(span.tokens.len()));
        if let Some(encoder) = &self.stack.encoder {
            return self.step_with_encoder(encoder, spans, best, experts, tap);
        }
        let logits = self.forward(spans, best, experts, tap)?;
        spans.iter_mut().for_each(|span| span.cache.len += span.tokens.len());
        Ok(logits)
    }

    /// The operations of a step.
    pub(crate) fn ops(&self) -> &dyn Ops {
        self.stack.head.compute().ops()
    }

    /// After an error: a device ends what it was asked, so that the next step begins without it.
    pub(crate) fn settle(&self) {
        // What failed is reported already.
        let _ = self.ops().download(&[]);
    }

    /// Computes the tokens of all `spans` behind those that their KV caches have, of which it does not count the new
    /// ones.
    pub(crate) fn forward(
        &self,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Logits> {
        self.forward_all(spans, best, experts, tap).inspect_err(|_| self.settle())
    }

    fn forward_all(
        &self,
        spans: &mut [Span],
        best: Option<&BestLogits>,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Logits> {
        let (_step, _only) = (step_span(spans), self.stack.head.compute().step());
        let (mut clock, before) = (PhaseClock::start(), self.stack.head.compute().time());
        self.ops().retain(&[]);
        experts.on_device().into_iter().for_each(|device| device.step_begins(0));
        self.steps.fetch_add(1, Relaxed);
        let x = self.embed_streams(spans)?;
        let pass = self.pass(spans);
        let x = self.layers_of_step(x, spans, &pass, &mut clock, experts, tap)?;
        let logits = self.logits(x, spans, best, &pass, tap)?;
        experts.on_device().into_iter().for_each(DevicePath::count_chosen);
        clock.lap(Phase::EmbedAndHead, tap);
        tap.compute_time(self.stack.head.compute().time() - before);
        Ok(logits)
    }

    /// The embeddings `[tokens, streams · hidden]` of the tokens of all spans.
    pub(crate) fn embed_streams(&self, spans: &[Span]) -> Result<Rows> {
        let x = self.embed_spans(spans)?; // [tokens, hidden]
        self.in_all_streams(x)
    }

    /// `x [tokens, hidden]` in the place of each residual stream.
    pub(crate) fn in_all_streams(&self, x: Rows) -> Result<Rows> {
        let count = self.stack.streams.as_ref().map_or(1, |streams| streams.count);
        (1..count).try_fold(x, |all, _| self.ops().beside(all, x))
    }

    /// The output of the last layer for the embedding `x [tokens, streams · hidden]`.
    pub(crate) fn layers_of_step(
        &self,
        mut x: Rows,
        spans: &mut [Span],
        pass: &ForwardPass,
        clock: &mut PhaseClock,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Rows> {
        let (stack, ops) = (&self.stack, self.ops());
        clock.lap(Phase::EmbedAndHead, tap);
        let (mut stage, mut begun, deepstacks) = (0, false, Self::deepstacks(spans));
        for (i, layer) in stack.layers.iter().enumerate() {
            if !tap.wants_more() {
                return Err(ModelError::Cancelled);
            }
            // Where there is an encoder, it has the prompt.
            if stack.encoder.is_none() {
                tap.progress(i, stack.layers.len());
            }
            if !begun {
                report_hidden(tap, stage, x, ops)?;
                stage += 1;
            }
            begun = layer.begins_next;
            let start = clock.last();
            let others = OtherLayers {
                cross: stack.encoder.as_ref().map(|encoder| &encoder.cross[i]),
                following: &stack.layers[i + 1..],
            };
            let factor = stack.factors.residual as f32;
            let mut running = Running { pass, ops, experts, tap, clock, factor };
            x = layer.forward(x, others, &mut LayerStates::new(spans, i), &mut running)?;
            if !begun && stage <= deepstacks {
                x = self.add_deepstack(x, stage - 1, spans)?;
            }
            timeline::complete("layer", start, clock.last(), &[("layer", i as u64)]);
        }
        Ok(x)
    }

    pub(crate) fn check(&self, spans: &[Span]) -> Result<()> {
        if spans.iter().any(|span| span.tokens.is_empty()) || spans.is_empty() {
            return Err(ModelError::Request("the request has no tokens".into()));
        }
        for span in spans {
            self.check_tokens(span)?;
            self.check_len(span.cache.len + span.tokens.len())?;
        }
        Ok(())
    }

    pub(crate) fn check_len(&self, len: usize) -> Result<()> {
        match self.stack.context {
            context if len > context => Err(ModelError::Request(format!(
                "a sequence of {len} tokens does not fit into the model's context of {context} tokens"
            ))),
            _ => Ok(()),
        }
    }

    pub(crate) fn pass(&self, spans: &[Span]) -> ForwardPass {
        let (mut positions, mut origins) = (Vec::with_capacity(spans.len()), Vec::new());
        let mut ropes: Vec<_> = self.stack.ropes.iter().map(|rope| (rope, RopeTable::default())).collect();
        for Span { tokens, images, cache, horizon, origin, .. } in spans {
            let (start, tokens) = (cache.position(), tokens.len());
            positions.push(SpanPositions { start, tokens, first_row: origins.len() });
            origins.resize(origins.len() + tokens, *origin);
            for (rope, table) in &mut ropes {
                rope.extend(table, images.placed, start..start + tokens, (*horizon).max(start + tokens));
            }
        }
        let read_as = |id: &u32| self.stack.image_token.filter(|_| is_of_image(*id)).unwrap_or(*id);
        let tokens = spans.iter().flat_map(|span| span.tokens).map(read_as).collect();
        let ropes = ropes.into_iter().map(|(_, table)| table).collect();
        let (handed_on, router_state) = (HandedOn::default(), HandedOn::default());
        ForwardPass { spans: positions, origins, tokens, drawn: false, ropes, handed_on, router_state }
    }
}

/// The step in a timeline, until this is dropped.
pub(crate) fn step_span(spans: &[Span]) -> impl Drop + use<> {
    let tokens: usize = spans.iter().map(|span| span.tokens.len()).sum();
    timeline::span("step", [("tokens", tokens as u64), ("sequences", spans.len() as u64)])
}
