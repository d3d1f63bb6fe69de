//! The forward pass: embedding, layers, final norm, output head. Prefill computes many tokens at once, decode one.

use std::sync::Arc;

use candle_core::{Device, Tensor};
use larder_core::{Blueprint, ExpertNames, Gate, Geometry, LayerIdx, Tensors};
use serde_json::Value;

use crate::arch;
use crate::compute::ComputeContext;
use crate::config::{Config, config_error};
use crate::error::{ModelError, Result};
use crate::experts::ExpertPath;
use crate::matrix::{Linear, Matrix, with_f32};
use crate::nn::{Activation, ForwardPass, KvCache, Mixer, Mlp, Moe, Norm, Rope};
use crate::tap::{Phase, PhaseClock, Tap};
use crate::weights::WeightLoader;

/// A model that has been built from its config, with its resident weights.
pub struct Decoder {
    stack: Stack,
}

/// The parts of a decoder, as an architecture in [`arch`] builds them.
pub struct Stack {
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Sizes of the expert part.
    pub geometry: Geometry,
    /// Names of the experts' tensors in a checkpoint.
    pub experts: ExpertNames,
    /// `[vocab, hidden]`
    pub embed: Matrix,
    /// Decoder layers, first to last.
    pub layers: Vec<Layer>,
    /// Final norm, before the output head.
    pub norm: Norm,
    /// `[vocab, hidden]`
    pub head: Linear,
    /// Rotary positions, if any layer uses them.
    pub rope: Option<Rope>,
    /// Constant factors; 1 in most models.
    pub factors: Factors,
}

/// Constant factors of the forward pass; Granite has them.
pub struct Factors {
    /// On the embedding.
    pub embedding: f64,
    /// On the output of the mixer and of the feed-forward part, before the residual addition.
    pub residual: f64,
    /// On the logits.
    pub logits: f64,
}

impl Default for Factors {
    fn default() -> Self {
        Factors { embedding: 1.0, residual: 1.0, logits: 1.0 }
    }
}

/// One decoder layer.
pub struct Layer {
    /// Norm before the mixer.
    pub mixer_norm: Norm,
    /// Token mixing: attention, convolution or recurrence.
    pub mixer: Box<dyn Mixer>,
    /// Norm before the feed-forward part.
    pub ffn_norm: Norm,
    /// Feed-forward part: dense MLP or experts.
    pub ffn: Ffn,
}

/// The feed-forward part of a layer.
pub enum Ffn {
    /// One MLP, the same for every token.
    Dense(Mlp),
    /// Router and experts.
    Moe(Box<Moe>),
}

impl Ffn {
    /// A feed-forward part with experts.
    pub fn moe(moe: Moe) -> Self {
        Ffn::Moe(Box::new(moe))
    }
}

/// The positions for which logits are computed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum LogitsFor {
    /// Every token of the pass.
    All,
    /// The last token only.
    Last,
}

/// Everything about a model that follows from its config alone: geometry, tensors, memory per token.
pub fn blueprint(config: &Value) -> Result<Blueprint> {
    let mut weights = WeightLoader::list();
    let (model_type, stack) = build(config, &mut weights)?;
    Ok(Blueprint {
        model_type: model_type.to_owned(),
        geometry: stack.geometry,
        experts: stack.experts,
        resident: weights.requested(),
        vocab: stack.vocab,
        context: stack.context,
        sequence_memory: stack.layers.iter().map(|l| l.mixer.memory_need()).sum(),
    })
}

fn build(config: &Value, weights: &mut WeightLoader) -> Result<(&'static str, Stack)> {
    let mut c = Config::new(config)?;
    let name = c.opt_text("model_type")?.ok_or_else(|| config_error("model_type is missing"))?;
    let arch = arch::find(name)?;
    let mut stack = (arch.build)(&mut c, weights)?;
    c.finish()?;
    if let Some(rope) = &stack.rope {
        stack.context = rope.max_context(stack.context);
    }
    Ok((arch.model_type, stack))
}

impl Decoder {
    /// Builds the model that `config` describes and loads its resident weights from `tensors`. Products and attention
    /// are computed on `compute`.
    pub fn load(config: &Value, tensors: &dyn Tensors, compute: Arc<ComputeContext>) -> Result<Self> {
        let (_, stack) = build(config, &mut WeightLoader::load(tensors, compute))?;
        Ok(Decoder { stack })
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
        self.stack.layers.iter().filter_map(|layer| match &layer.ffn {
            Ffn::Moe(moe) => Some((moe.layer, &moe.gate, moe.act)),
            Ffn::Dense(_) => None,
        })
    }

    /// Tokens in the vocabulary.
    pub fn vocab(&self) -> usize {
        self.stack.vocab
    }

    /// Longest sequence, in tokens.
    pub fn context(&self) -> usize {
        self.stack.context
    }

    /// An empty KV cache. Its memory is allocated for `tokens` tokens at the first append, and grows if there are more.
    pub fn new_kv_cache(&self, tokens: usize) -> KvCache {
        let compute = self.stack.head.compute();
        KvCache::new(self.stack.layers.len(), tokens, compute.kv_format, compute.device_attention.as_ref())
    }

    /// Whether a KV cache computed for a sequence of `before` tokens is valid when the sequence grows to `after`
    /// tokens; if not, the sequence must be computed again from its start.
    pub fn kv_valid_after_growth(&self, before: usize, after: usize) -> bool {
        match self.stack.rope.as_ref().and_then(Rope::switches_at) {
            Some(at) => before > at || after <= at,
            None => true,
        }
    }

    /// Whether a KV cache computed in a sequence of `before` tokens, then truncated, equals that of a sequence of
    /// `after` tokens computed from its start.
    pub fn kv_valid_after_rewind(&self, before: usize, after: usize) -> bool {
        self.stack.rope.as_ref().is_none_or(|rope| rope.same_angles(before, after))
    }

    /// Computes `tokens`, which follow the tokens in `cache`, appends them to `cache`, and returns logits:
    /// `[tokens, vocab]`, or `[1, vocab]`.
    ///
    /// `horizon` is the length of the whole sequence, on which the rotary positions of some models depend: for a prompt
    /// that is prefilled in chunks, the length of the whole prompt. After an error the contents of `cache` are
    /// unspecified.
    pub fn forward(
        &self,
        tokens: &[u32],
        horizon: usize,
        logits_for: LogitsFor,
        cache: &mut KvCache,
        experts: &mut dyn ExpertPath,
        tap: &mut dyn Tap,
    ) -> Result<Vec<f32>> {
        self.check(tokens, cache)?;
        let stack = &self.stack;
        let (mut clock, before) = (PhaseClock::start(), stack.head.compute().time());
        let pass = self.pass(cache.len, tokens.len(), horizon);
        let mut x = self.embed(tokens)?; // [tokens, hidden]
        clock.lap(Phase::EmbedAndHead, tap);
        for (i, (layer, layer_kv)) in stack.layers.iter().zip(&mut cache.layers).enumerate() {
            report_hidden(tap, i, &x)?;
            let mixed = layer.mixer.forward(&layer.mixer_norm.forward(&x)?, layer_kv, &pass)?;
            x = self.add(x, mixed)?;
            clock.lap(Phase::Mixing, tap);
            if tokens.len() == 1 && experts.wants_hints() {
                self.hint_next_layer(i, &x, experts)?;
            }
            let normed = layer.ffn_norm.forward(&x)?;
            let y = match &layer.ffn {
                Ffn::Dense(mlp) => mlp.forward(&normed)?,
                Ffn::Moe(moe) => moe.forward(&normed, experts, tap, &mut clock)?,
            };
            x = self.add(x, y)?;
            clock.lap(Phase::Experts, tap);
        }
        cache.len += tokens.len();
        let x = stack.norm.forward(&x)?;
        report_hidden(tap, stack.layers.len(), &x)?;
        let x = match logits_for {
            LogitsFor::All => x,
            LogitsFor::Last => x.narrow(0, tokens.len() - 1, 1)?,
        };
        let logits = (stack.head.forward(&x)? * stack.factors.logits)?; // [rows, vocab]
        let logits = logits.flatten_all()?.to_vec1()?;
        clock.lap(Phase::EmbedAndHead, tap);
        tap.compute_time(stack.head.compute().time() - before);
        Ok(logits)
    }

    /// Computes the next MoE layer's router logits from the current `x [1, hidden]`, as a prefetch hint.
    fn hint_next_layer(&self, layer: usize, x: &Tensor, experts: &mut dyn ExpertPath) -> Result<()> {
        let next = self.stack.layers[layer + 1..].iter().find_map(|l| match &l.ffn {
            Ffn::Moe(moe) => Some((&l.ffn_norm, moe)),
            Ffn::Dense(_) => None,
        });
        let Some((norm, moe)) = next else { return Ok(()) };
        with_f32(&moe.router.forward(&norm.forward(x)?)?, |logits| experts.hint_next(moe.layer, &moe.gate, logits))
    }

    fn check(&self, tokens: &[u32], cache: &KvCache) -> Result<()> {
        let (vocab, context) = (self.stack.vocab, self.stack.context);
        if tokens.is_empty() {
            return Err(ModelError::Request("the request has no tokens".into()));
        }
        if let Some(id) = tokens.iter().find(|id| **id as usize >= vocab) {
            return Err(ModelError::Request(format!(
                "token id {id} is out of range: the vocabulary has {vocab} tokens"
            )));
        }
        let len = cache.len + tokens.len();
        if len > context {
            return Err(ModelError::Request(format!(
                "a sequence of {len} tokens does not fit into the model's context of {context} tokens"
            )));
        }
        Ok(())
    }

    fn pass(&self, start: usize, tokens: usize, horizon: usize) -> ForwardPass {
        let horizon = horizon.max(start + tokens);
        let rope = self.stack.rope.as_ref().map(|r| r.table(start, tokens, horizon));
        ForwardPass { start, tokens, rope }
    }

    fn embed(&self, tokens: &[u32]) -> Result<Tensor> {
        let hidden = self.stack.geometry.hidden;
        let mut x = vec![0.0; tokens.len() * hidden];
        for (id, row) in tokens.iter().zip(x.chunks_exact_mut(hidden)) {
            self.stack.embed.row(*id as usize, row);
        }
        let x = Tensor::from_vec(x, (tokens.len(), hidden), &Device::Cpu)?;
        scaled(x, self.stack.factors.embedding)
    }

    fn add(&self, x: Tensor, y: Tensor) -> Result<Tensor> {
        Ok((x + scaled(y, self.stack.factors.residual)?)?)
    }
}

fn scaled(x: Tensor, by: f64) -> Result<Tensor> {
    if by == 1.0 { Ok(x) } else { Ok((x * by)?) }
}

fn report_hidden(tap: &mut dyn Tap, stage: usize, x: &Tensor) -> Result<()> {
    if tap.wants_hidden() {
        with_f32(x, |x| tap.hidden(stage, x))?;
    }
    Ok(())
}
