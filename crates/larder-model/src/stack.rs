//! The parts of a decoder: what an architecture builds, and what the forward pass runs through.

use larder_core::{ExpertNames, Geometry};

use crate::error::Result;
use crate::kv::LayerShape;
use crate::nn::{MergeStreams, Mixer, Mlp, Moe, Norm, RelativeAttention, ResidualConnection, Rope};
use crate::ops::{Constant, Ops, Rows};
use crate::weights::{EmbeddingRows, Linear};

/// The parts of a decoder, as an architecture in [`arch`](crate::arch) builds them.
pub struct Stack {
    /// Tokens in the vocabulary.
    pub vocab: usize,
    /// Longest sequence, in tokens.
    pub context: usize,
    /// Width of a residual stream.
    pub hidden: usize,
    /// Sizes of the expert part.
    pub geometry: Geometry,
    /// Names of the experts' tensors in a checkpoint.
    pub experts: ExpertNames,
    /// `[vocab, hidden]`
    pub embed: Box<dyn EmbeddingRows>,
    /// Decoder layers, first to last.
    pub layers: Vec<Layer>,
    /// Final norm, before the output head.
    pub norm: Norm,
    /// `[vocab, hidden]`
    pub head: Linear,
    /// Rotary positions; one for each way in which layers rotate.
    pub ropes: Vec<Rope>,
    /// Constant factors; 1 in most models.
    pub factors: Factors,
    /// The encoder of an encoder-decoder model, which reads the prompt.
    pub encoder: Option<Encoder>,
    /// The layer for multi-token prediction, if it is used.
    pub mtp: Option<MtpLayer>,
    /// The residual streams of a model that has several.
    pub streams: Option<Streams>,
    /// The token as which layers that read tokens read those of images; `None` for a model that takes no images.
    pub image_token: Option<u32>,
}

/// Several residual streams, side by side in the place of one: `[tokens, count · hidden]`. All begin with the
/// embedding.
pub struct Streams {
    /// Number of streams.
    pub count: usize,
    /// Merges the streams after the last layer.
    pub merge: Box<dyn MergeStreams>,
}

impl Stack {
    /// The feed-forward parts of all layers, those of the encoder first, that for multi-token prediction last.
    pub fn ffns(&self) -> impl Iterator<Item = &Ffn> {
        let encoder = self.encoder.iter().flat_map(|encoder| &encoder.layers).map(|layer| &layer.ffn);
        encoder.chain(self.all_layers().filter_map(|layer| Some(&layer.ffn.as_ref()?.part)))
    }

    /// The decoder layers, that for multi-token prediction last.
    pub fn all_layers(&self) -> impl Iterator<Item = &Layer> {
        self.layers.iter().chain(self.mtp.as_ref().map(|mtp| &mtp.layer))
    }

    /// Number of decoder layers.
    pub fn layer_count(&self) -> usize {
        self.layers.iter().filter(|layer| !layer.begins_next).count()
    }

    /// Width of all residual streams together.
    pub fn residual_width(&self) -> usize {
        self.streams.as_ref().map_or(1, |streams| streams.count) * self.hidden
    }

    /// Whether a device can begin a step of a token that only it knows: no layer reads the tokens otherwise than to
    /// decide on experts, and none predicts several of them.
    pub fn runs_ahead(&self) -> bool {
        let reads_tokens = |layer: &Layer| layer.mixer.as_ref().is_some_and(|mixer| mixer.part.reads_tokens());
        self.encoder.is_none() && self.mtp.is_none() && !self.layers.iter().any(reads_tokens)
    }

    /// Whether a sequence can go back a few tokens without computing any again.
    pub fn rewinds_freely(&self) -> bool {
        let recurrent = |layer: &Layer| layer.shape().recurrent.is_some();
        self.encoder.is_none() && !self.layers.iter().any(recurrent)
    }
}

/// An encoder, and the attention of the decoder over its output. Its layers are counted before those of the decoder.
pub struct Encoder {
    /// `[vocab, hidden]`; `None` if it is that of the decoder.
    pub embed: Option<Box<dyn EmbeddingRows>>,
    /// First to last.
    pub layers: Vec<EncoderLayer>,
    /// Final norm.
    pub norm: Norm,
    /// One per decoder layer, between its mixer and its feed-forward part.
    pub cross: Vec<CrossAttention>,
    /// The first token that the decoder reads.
    pub start: u32,
}

/// One layer of an encoder.
pub struct EncoderLayer {
    /// Norm before the attention.
    pub attention_norm: Norm,
    /// Attention of each token to all.
    pub attention: RelativeAttention,
    /// Norm before the feed-forward part.
    pub ffn_norm: Norm,
    /// Feed-forward part: dense MLP or experts.
    pub ffn: Ffn,
}

/// Attention of a decoder layer over the output of the encoder.
pub struct CrossAttention {
    /// Norm before it.
    pub norm: Norm,
    /// The attention.
    pub attention: RelativeAttention,
}

/// A layer for multi-token prediction (MTP): from the hidden state of a token and the token after it, it predicts the
/// one after that. Embedding and output head are those of the model.
pub struct MtpLayer {
    /// Norm of the embedding of the token after.
    pub embedding_norm: Norm,
    /// Norm of the hidden state, which is the output of the final norm, or of [`norm`](Self::norm) where the layer
    /// reads its own.
    pub hidden_norm: Norm,
    /// `[hidden, 2 · hidden]`, of both side by side, the embedding first.
    pub projection: Linear,
    /// The layer itself.
    pub layer: Layer,
    /// Norm before the output head.
    pub norm: Norm,
}

/// Constant factors of the forward pass; Granite has them.
pub struct Factors {
    /// On the embedding.
    pub embedding: f64,
    /// On the output of the mixer and of the feed-forward part, before the residual addition.
    pub residual: f64,
    /// On each column of the output head, `[hidden]`.
    pub columns: Option<ColumnFactors>,
    /// On the logits.
    pub logits: f64,
    /// The logits are capped to stay within ± this: `cap · tanh(logit / cap)`.
    pub softcap: Option<f64>,
}

/// A factor on each value of a row, and the copy of them on a device.
pub struct ColumnFactors {
    values: Vec<f32>,
    copy: Constant,
}

impl ColumnFactors {
    /// These factors.
    pub fn new(values: Vec<f32>) -> Self {
        ColumnFactors { values, copy: Constant::default() }
    }

    /// `x [rows, width]` → same shape
    pub(crate) fn apply(&self, x: Rows, ops: &dyn Ops) -> Result<Rows> {
        ops.scale_columns(x, self.copy.of(&self.values, ops)?)
    }
}

impl Default for Factors {
    fn default() -> Self {
        Factors { embedding: 1.0, residual: 1.0, columns: None, logits: 1.0, softcap: None }
    }
}

/// One decoder layer: token mixing, then a feed-forward part. In some models a layer has only one of both.
pub struct Layer {
    /// Token mixing: attention, convolution or recurrence.
    pub mixer: Option<Branch<Box<dyn Mixer>>>,
    /// Feed-forward part: dense MLP or experts.
    pub ffn: Option<Branch<Ffn>>,
    /// Factor on the output of the whole layer.
    pub scale: f64,
    /// Whether this is the first part of the layer behind it, and not counted as a layer of its own.
    pub begins_next: bool,
}

impl Layer {
    /// A layer with both parts, whose outputs are added to the residual stream.
    pub fn new(mixer: Branch<Box<dyn Mixer>>, ffn: Branch<Ffn>) -> Self {
        Layer { mixer: Some(mixer), ffn: Some(ffn), scale: 1.0, begins_next: false }
    }

    /// A mixer that is counted with the layer behind it: it reads all residual streams, and its output is added to
    /// them.
    pub fn beginning_next(mixer: impl Mixer + 'static) -> Self {
        let mixer: Box<dyn Mixer> = Box::new(mixer);
        Layer { mixer: Some(Branch::new(Norm::None, mixer)), ffn: None, scale: 1.0, begins_next: true }
    }

    /// Router and experts, if the layer has them.
    pub(crate) fn moe(&self) -> Option<&Moe> {
        match &self.ffn.as_ref()?.part {
            Ffn::Moe(moe) => Some(moe),
            Ffn::Dense(_) => None,
        }
    }

    /// What the layer keeps of a sequence.
    pub fn shape(&self) -> LayerShape {
        let of =
            |mixer: &dyn Mixer| LayerShape { chosen: mixer.choice().map(|choice| choice.rows), ..mixer.layer_shape() };
        self.mixer.as_ref().map_or(LayerShape::NOTHING, |mixer| of(mixer.part.as_ref()))
    }
}

/// A part of a layer, which reads the residual stream and adds its output to it.
pub struct Branch<Part> {
    /// Norm of the part's input.
    pub norm: Norm,
    /// The part itself.
    pub part: Part,
    /// Norm of the part's output, before it is added.
    pub after: Option<Norm>,
    /// How the part is connected with the residual stream, where it is not by a plain addition.
    pub connection: Option<Box<dyn ResidualConnection>>,
}

impl<Part> Branch<Part> {
    /// A part whose normalised input is the residual stream, to which its output is added.
    pub fn new(norm: Norm, part: Part) -> Self {
        Branch { norm, part, after: None, connection: None }
    }

    /// The same part, connected with the residual streams in this way.
    pub fn connected(self, connection: impl ResidualConnection + 'static) -> Self {
        Branch { connection: Some(Box::new(connection)), ..self }
    }
}

/// The feed-forward part of a layer.
pub enum Ffn {
    /// One MLP, the same for every token.
    Dense(Box<Mlp>),
    /// Router and experts.
    Moe(Box<Moe>),
}

impl Ffn {
    /// One MLP, the same for every token.
    pub fn dense(mlp: Mlp) -> Self {
        Ffn::Dense(Box::new(mlp))
    }
}

impl Ffn {
    /// A feed-forward part with experts.
    pub fn moe(moe: Moe) -> Self {
        Ffn::Moe(Box::new(moe))
    }
}
