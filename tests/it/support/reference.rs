//! A model folder with what transformers computed on it, and the comparison with what we compute.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_core::{ExpertId, LayerIdx};
use larder_engine::{Sampler, Sampling, Session, TokenInput};
use larder_model::{AllResident, ComputeContext, Decoder, Routed, Tap};
use larder_runtime::{ModelOptions, OpenModel};
use larder_store::reader::Slot;
use safetensors::SafeTensors;
use serde_json::Value;

/// The bars that a float32 engine must pass.
pub struct Bars {
    pub logits: f32,
    pub weights: f32,
}

impl Bars {
    /// The recurrence of the delta rule adds up more rounding.
    pub fn of(model_type: &str) -> Self {
        let recurrent = ["bailing_hybrid", "glm5_next", "kimi_linear", "qwen3_5_moe", "qwen3_next", "qwen4_exp"]
            .contains(&model_type);
        Bars { logits: if recurrent { 5e-3 } else { 1e-3 }, weights: 1e-4 }
    }
}

/// What transformers computed.
pub struct Reference {
    folder: PathBuf,
    floats: BTreeMap<String, Vec<f32>>,
    ids: BTreeMap<String, Vec<i32>>,
}

impl Reference {
    pub fn read(folder: &Path) -> Self {
        let bytes = std::fs::read(folder.join("reference.safetensors")).expect("a reference");
        let file = SafeTensors::deserialize(&bytes).expect("a valid reference");
        let (mut floats, mut ids) = (BTreeMap::new(), BTreeMap::new());
        for (name, view) in file.tensors() {
            let words = view.data().as_chunks::<4>().0;
            match view.dtype() {
                safetensors::Dtype::F32 => {
                    drop(floats.insert(name, words.iter().map(|w| f32::from_le_bytes(*w)).collect()))
                }
                safetensors::Dtype::I32 => {
                    drop(ids.insert(name, words.iter().map(|w| i32::from_le_bytes(*w)).collect()))
                }
                other => panic!("{name} has dtype {other:?}"),
            }
        }
        Reference { folder: folder.to_owned(), floats, ids }
    }

    /// Token ids by name.
    pub fn tokens(&self, name: &str) -> Vec<u32> {
        self.ids[name].iter().map(|id| *id as u32).collect()
    }

    /// Whether there are token ids or other integers of this name.
    pub fn has_tokens(&self, name: &str) -> bool {
        self.ids.contains_key(name)
    }

    /// Names of the numbers.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.floats.keys().map(String::as_str)
    }

    /// Numbers by name.
    pub fn floats(&self, name: &str) -> &[f32] {
        &self.floats[name]
    }

    /// Prompt, written text, tokenizer cases and other facts about the folder.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&std::fs::read(self.folder.join("reference.json")).unwrap()).unwrap()
    }
}

/// Tokens that every sequence here fits in.
const ROOM: usize = 4096;

/// A model ready to run.
pub struct Loaded {
    pub decoder: Decoder,
    pub experts: AllResident<Slot>,
    pub model_type: String,
}

/// Loads `folder` as it is, or with another config file in place of `config.json`.
pub fn load(folder: &Path, config: &str) -> Loaded {
    let copy = with_config(folder, config);
    let model = OpenModel::open(copy.path(), &ModelOptions::default())
        .unwrap_or_else(|e| panic!("{} {config}: {e:#}", folder.display()));
    // Activations beside quantised weights are not rounded, as transformers does not round them.
    let compute = Arc::new(ComputeContext { exact: true, ..ComputeContext::new(2, false).unwrap() });
    Loaded {
        decoder: model.decoder(&compute).unwrap_or_else(|e| panic!("{} {config}: {e:#}", folder.display())),
        experts: model.all_resident(&compute).unwrap(),
        model_type: model.blueprint.model_type.clone(),
    }
}

/// A copy of a model folder in which `config` has become `config.json`.
pub fn with_config(folder: &Path, config: &str) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            std::fs::copy(&path, copy.path().join(path.file_name().unwrap())).unwrap();
        }
    }
    std::fs::copy(folder.join(config), copy.path().join("config.json")).unwrap();
    copy
}

/// Compares everything in the reference with one pass over all tokens, and greedy writing token by token.
pub fn check(folder: &Path, config: &str) {
    let reference = Reference::read(folder);
    let mut loaded = load(folder, config);
    let bars = Bars::of(&loaded.model_type);
    let name = format!("{} ({config})", folder.file_name().unwrap().to_string_lossy());
    let tokens = reference.tokens("full_ids");

    let mut tap = Compare { name: &name, reference: &reference, bars: &bars, has_classes: false };
    let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM);
    let logits = session.forward(&TokenInput::prompt(&tokens).in_chunks(usize::MAX).all_logits(), &mut tap).unwrap();
    let worst = furthest(&logits, &reference.floats["full_logits"]);
    assert!(worst <= bars.logits, "{name}: logits are {worst:e} off");

    check_writing(&name, &reference, &mut loaded, &bars);
}

fn check_writing(name: &str, reference: &Reference, loaded: &mut Loaded, bars: &Bars) {
    let want = reference.tokens("generated_ids");
    let vocab = loaded.decoder.vocab();
    let mut session = Session::new(&loaded.decoder, &mut loaded.experts, ROOM);
    let mut sampler = Sampler::new(Sampling::default(), 0).unwrap();
    let mut logits =
        session.forward(&TokenInput::prompt(&reference.tokens("input_ids")).in_chunks(usize::MAX), &mut ()).unwrap();
    let mut got = Vec::new();
    for step in 0..want.len() {
        let worst = furthest(&logits, &reference.floats["decode_logits"][step * vocab..][..vocab]);
        assert!(worst <= bars.logits, "{name}: step {step}: logits are {worst:e} off");
        got.push(sampler.sample(&mut logits, session.tokens()).unwrap());
        if step + 1 < want.len() {
            logits = session.forward(&TokenInput::decode(&got[step..]), &mut ()).unwrap();
        }
    }
    assert_eq!(got, want, "{name}: greedy ids");
}

/// The same logits whether the tokens are read at once, in pieces or one by one.
pub fn check_chunks(folder: &Path) {
    let reference = Reference::read(folder);
    let mut loaded = load(folder, "config.json");
    let tokens = reference.tokens("full_ids");
    let mut read = |chunk| {
        Session::new(&loaded.decoder, &mut loaded.experts, ROOM)
            .forward(&TokenInput::prompt(&tokens).in_chunks(chunk).all_logits(), &mut ())
            .unwrap()
    };
    let whole = read(usize::MAX);
    for chunk in [1, 2, 5, 7, 16] {
        let worst = furthest(&read(chunk), &whole);
        assert!(worst <= 1e-4, "{}: {worst:e} off in chunks of {chunk}", folder.display());
    }
}

struct Compare<'a> {
    name: &'a str,
    reference: &'a Reference,
    bars: &'a Bars,
    /// Whether routers have a class for no expert.
    has_classes: bool,
}

impl Tap for Compare<'_> {
    fn wants_hidden(&self) -> bool {
        true
    }

    fn hidden(&mut self, stage: usize, x: &[f32]) {
        let worst = furthest(x, &self.reference.floats[&format!("hidden.{stage}")]);
        assert!(worst <= self.bars.logits, "{}: hidden state {stage} is {worst:e} off", self.name);
    }

    fn router_classes(&mut self, layer: LayerIdx, logits: &[f32]) {
        self.compare_logits(layer, logits);
        self.has_classes = true;
    }

    fn wants_routing(&self) -> bool {
        true
    }

    fn routed(&mut self, layer: LayerIdx, logits: &[f32], routed: &Routed) {
        let l = layer.0;
        if !self.has_classes {
            self.compare_logits(layer, logits);
        }
        let ids = &self.reference.ids[&format!("topk_ids.{l}")];
        let weights = &self.reference.floats[&format!("topk_weights.{l}")];
        assert_eq!(ids.len(), routed.ids.len(), "{}: {layer}", self.name);
        let k = ids.len() / self.reference.ids["full_ids"].len();
        for (row, (want, got)) in ids.chunks(k).zip(routed.ids.chunks(k)).enumerate() {
            let mut want: Vec<(i32, f32)> = want.iter().copied().zip(weights[row * k..].iter().copied()).collect();
            let mut got: Vec<(i32, f32)> =
                got.iter().map(|e| self.number(*e)).zip(routed.weights[row * k..].iter().copied()).collect();
            want.sort_by_key(|(e, _)| *e);
            got.sort_by_key(|(e, _)| *e);
            for ((we, ww), (ge, gw)) in want.into_iter().zip(got) {
                assert_eq!(we, ge, "{}: experts of token {row} in {layer}", self.name);
                let off = (ww - gw).abs();
                assert!(
                    off <= self.bars.weights,
                    "{}: weight of expert {we}, token {row}, {layer}: {off:e} off",
                    self.name
                );
            }
        }
    }
}

impl Compare<'_> {
    fn compare_logits(&self, layer: LayerIdx, logits: &[f32]) {
        let worst = furthest(logits, &self.reference.floats[&format!("router_logits.{}", layer.0)]);
        assert!(worst <= self.bars.logits, "{}: router logits of {layer} are {worst:e} off", self.name);
    }

    /// As the reference has it: for a token that its router gives no expert, the first one with a weight of zero.
    fn number(&self, expert: ExpertId) -> i32 {
        if self.has_classes && expert == ExpertId::NONE { 0 } else { expert.0 as i32 }
    }
}

pub fn furthest(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, |a, b| if b.is_nan() { f32::INFINITY } else { a.max(b) })
}
