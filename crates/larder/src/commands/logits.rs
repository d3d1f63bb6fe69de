//! `larder logits`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_core::{ExpertId, Geometry, LayerIdx};
use larder_engine::{Sampler, Sampling, TokenInput};
use larder_model::{Routed, Tap};
use larder_os::{memory, read_regular_text};
use larder_runtime::InferenceEngine;
use safetensors::tensor::{Dtype, View};

use crate::cli::LogitsArgs;
use crate::{models, output, print};

/// Maximum number of tokens in a file; each takes a row of logits as wide as the vocabulary.
const TOKENS_MAX: usize = 1 << 20;
/// Maximum length of their file.
const TOKEN_FILE_BYTES: u64 = 16 << 20;

/// Writes logits, routing and hidden states to a safetensors file: those of given tokens, or of what the decoder
/// generates behind them if an encoder reads them.
pub fn run(args: &LogitsArgs) -> Result<()> {
    let tokens = read_tokens(&args.tokens)?;
    let model = models::open_ignoring(&args.model, &args.ignore_config)?;
    let vocab = model.blueprint.vocab;
    let context = tokens.len().saturating_add(args.generate);
    check_memory(context, vocab)?;
    let options = args.record.set(args.engine.settings.clone()).options(context);
    let mut engine = InferenceEngine::start(&model, &options)?;
    let mut session = engine.session();

    let encoder_layers = session.decoder().encoder_layers();
    let mut recording = Recording { encoder_layers, ..Recording::default() };
    let prompt = TokenInput::prompt(&tokens);
    let prompt = if encoder_layers > 0 { prompt } else { prompt.all_logits() };
    let mut logits = session.forward(&prompt, &mut recording)?;
    let mut last = logits[logits.len() - vocab..].to_vec();
    let mut sampler = Sampler::new(Sampling::default(), 0)?;
    let (mut ids, mut rows) = (Vec::new(), Vec::new());
    for i in 0..args.generate {
        rows.extend_from_slice(&last);
        ids.push(sampler.sample(&mut last, session.tokens())?);
        let next = TokenInput::decode(&ids[i..]);
        if encoder_layers > 0 {
            last = session.forward(&next, &mut recording)?;
            logits.extend_from_slice(&last);
        } else if i + 1 < args.generate {
            last = session.forward(&next, &mut ())?;
        }
    }
    let mut out = recording.tensors(&model.blueprint.geometry, session.decoder().hidden());
    out.insert("full_logits".into(), Out::f32(vocab, &logits));
    if args.generate > 0 {
        let written: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        out.insert("generated_ids".into(), Out { shape: vec![written.len()], ..Out::i32(1, &written) });
        out.insert("decode_logits".into(), Out::f32(vocab, &rows));
    }
    let bytes = safetensors::serialize(&out, None).context("the tensors cannot be serialized")?;
    output::write(&args.out, bytes)
}

fn read_tokens(path: &Path) -> Result<Vec<u32>> {
    let text = read_regular_text(path, TOKEN_FILE_BYTES).with_context(|| path.display().to_string())?;
    let tokens: Vec<u32> = serde_json::from_str(&text)
        .with_context(|| format!("{}: must be a JSON array of token ids", path.display()))?;
    match tokens.len() {
        0 => bail!("{}: contains no tokens", path.display()),
        n if n > TOKENS_MAX => bail!("{}: contains {n} tokens; at most {TOKENS_MAX} are allowed", path.display()),
        _ => Ok(tokens),
    }
}

/// Refuses tokens whose logits do not fit into memory three times: as numbers, as bytes and as the file.
fn check_memory(tokens: usize, vocab: usize) -> Result<()> {
    let need = (tokens as u64).saturating_mul(vocab as u64).saturating_mul(3 * size_of::<f32>() as u64);
    match memory::available() {
        Some(there) if there < need => {
            let (need, there) = (print::bytes(need), print::bytes(there));
            bail!("the logits of {tokens} tokens need {need} of memory, and {there} are available; use fewer tokens")
        }
        _ => Ok(()),
    }
}

/// Records hidden states and routing, in token order.
#[derive(Default)]
struct Recording {
    encoder_layers: usize,
    encoder_hidden: BTreeMap<usize, Vec<f32>>,
    hidden: BTreeMap<usize, Vec<f32>>,
    layers: BTreeMap<LayerIdx, Layer>,
}

#[derive(Default)]
struct Layer {
    logits: Vec<f32>,
    /// Of all classes, where a router has one for no expert.
    classes: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Tap for Recording {
    fn wants_hidden(&self) -> bool {
        true
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        self.hidden.entry(stage).or_default().extend_from_slice(x);
    }

    fn encoder_hidden(&mut self, stage: usize, x: &[f32]) {
        self.encoder_hidden.entry(stage).or_default().extend_from_slice(x);
    }

    fn router_classes(&mut self, layer: LayerIdx, logits: &[f32]) {
        self.layers.entry(layer).or_default().classes.extend_from_slice(logits);
    }

    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        let seen = self.layers.entry(layer).or_default();
        seen.logits.extend_from_slice(logits);
        // Such a router's choice of no expert is the first one with a weight of 0, as transformers has it.
        let has_classes = !seen.classes.is_empty();
        let number = |e: &ExpertId| if has_classes && *e == ExpertId::NONE { 0 } else { e.0 as i32 };
        seen.ids.extend(routed.ids.iter().map(number));
        seen.weights.extend_from_slice(&routed.weights);
    }
}

impl Recording {
    /// `hidden` is the width of hidden states.
    fn tensors(&self, geometry: &Geometry, hidden: usize) -> BTreeMap<String, Out> {
        let mut out = BTreeMap::new();
        for (name, stages) in [("encoder_hidden", &self.encoder_hidden), ("hidden", &self.hidden)] {
            for (stage, x) in stages {
                out.insert(format!("{name}.{stage}"), Out::f32(hidden, x));
            }
        }
        for (layer, seen) in &self.layers {
            let (layer, Layer { ids, weights, .. }) = (self.name(*layer), seen);
            let (classes, logits) = if seen.classes.is_empty() {
                (geometry.experts, &seen.logits)
            } else {
                (geometry.experts + 1, &seen.classes)
            };
            out.insert(format!("router_logits.{layer}"), Out::f32(classes, logits));
            out.insert(format!("topk_weights.{layer}"), Out::f32(geometry.top_k, weights));
            out.insert(format!("topk_ids.{layer}"), Out::i32(geometry.top_k, ids));
        }
        out
    }

    /// The layer's number; with an encoder within it or the decoder.
    fn name(&self, layer: LayerIdx) -> String {
        match (self.encoder_layers, layer.index()) {
            (0, at) => at.to_string(),
            (encoder, at) if at < encoder => format!("enc.{at}"),
            (encoder, at) => format!("dec.{}", at - encoder),
        }
    }
}

/// A tensor to write.
struct Out {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Out {
    /// `[rows, width]`
    fn f32(width: usize, values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Out { dtype: Dtype::F32, shape: vec![values.len() / width, width], bytes }
    }

    /// `[rows, width]`
    fn i32(width: usize, values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Out { dtype: Dtype::I32, shape: vec![values.len() / width, width], bytes }
    }
}

impl View for &Out {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}
