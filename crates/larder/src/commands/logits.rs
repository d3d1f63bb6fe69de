//! `larder logits`.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_core::{LayerIdx, read_regular_text};
use larder_engine::{Sampler, Sampling, TokenInput};
use larder_model::{Routed, Tap};
use larder_runtime::machine::memory;
use larder_runtime::{InferenceEngine, Options};
use safetensors::tensor::{Dtype, View};

use crate::cli::LogitsArgs;
use crate::{models, output, print};

/// Maximum number of tokens in a file; each takes a row of logits as wide as the vocabulary.
const TOKENS_MAX: usize = 1 << 20;
/// Maximum length of their file.
const TOKEN_FILE_BYTES: u64 = 16 << 20;

/// Writes logits, routing and hidden states of given tokens to a safetensors file.
pub fn run(args: &LogitsArgs) -> Result<()> {
    let tokens = read_tokens(&args.tokens)?;
    let model = models::open(&args.model)?;
    let (vocab, top_k) = (model.blueprint.vocab, model.blueprint.geometry.top_k);
    let context = tokens.len().saturating_add(args.generate);
    check_memory(context, vocab)?;
    let options = args.engine.options(context);
    let options = Options { prefill_tokens: args.chunk.or(options.prefill_tokens), ..options };
    let mut engine = InferenceEngine::start(&model, &options)?;
    let mut session = engine.session();

    let mut recording = Recording::default();
    let logits = session.forward(&TokenInput::prompt(&tokens).all_logits(), &mut recording)?;
    let mut last = logits[logits.len() - vocab..].to_vec();
    let mut out = recording.tensors(tokens.len(), top_k);
    out.insert("full_logits".into(), Out::f32(&[tokens.len(), vocab], &logits));

    if args.generate > 0 {
        let mut sampler = Sampler::new(Sampling::default(), 0)?;
        let (mut ids, mut rows) = (Vec::new(), Vec::new());
        for i in 0..args.generate {
            if i > 0 {
                last = session.forward(&TokenInput::decode(&ids[i - 1..]), &mut ())?;
            }
            rows.extend_from_slice(&last);
            ids.push(sampler.sample(&mut last, session.tokens())?);
        }
        let written: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        out.insert("generated_ids".into(), Out::i32(&[written.len()], &written));
        out.insert("decode_logits".into(), Out::f32(&[written.len(), vocab], &rows));
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
    hidden: BTreeMap<usize, Vec<f32>>,
    layers: BTreeMap<LayerIdx, Layer>,
}

#[derive(Default)]
struct Layer {
    logits: Vec<f32>,
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

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        let seen = self.layers.entry(layer).or_default();
        seen.logits.extend_from_slice(logits);
        seen.ids.extend(routed.ids.iter().map(|e| e.0 as i32));
        seen.weights.extend_from_slice(&routed.weights);
    }
}

impl Recording {
    fn tensors(&self, tokens: usize, top_k: usize) -> BTreeMap<String, Out> {
        let mut out = BTreeMap::new();
        for (stage, x) in &self.hidden {
            out.insert(format!("hidden.{stage}"), Out::f32(&[tokens, x.len() / tokens], x));
        }
        for (LayerIdx(l), layer) in &self.layers {
            let experts = layer.logits.len() / tokens;
            out.insert(format!("router_logits.{l}"), Out::f32(&[tokens, experts], &layer.logits));
            out.insert(format!("topk_weights.{l}"), Out::f32(&[tokens, top_k], &layer.weights));
            out.insert(format!("topk_ids.{l}"), Out::i32(&[tokens, top_k], &layer.ids));
        }
        out
    }
}

/// A tensor to write.
struct Out {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

impl Out {
    fn f32(shape: &[usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Out { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    fn i32(shape: &[usize], values: &[i32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Out { dtype: Dtype::I32, shape: shape.to_vec(), bytes }
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
