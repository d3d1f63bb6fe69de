//! Greedy texts behind prompts with images, of all forms of a model, are those of transformers.

use std::path::{Path, PathBuf};

use larder_engine::{Listener, Request, Sampler, Sampling, generate};
use larder_runtime::{
    CacheOptions, CacheSize, ContextSize, EngineExperts, InferenceEngine, ModelOptions, OpenModel, Options,
    VisionOptions, VisionUse, expand_images,
};
use larder_text::{ChatInput, StopMatcher};
use serde_json::Value;

use super::{generated, mmproj_references, picture, prompts, references, store};
use crate::support::mmproj::write_mmproj;
use crate::support::qwen3_vl_gguf::write_qwen3_vl;
use crate::support::{fixture, larder_ok};

struct Silent;

impl Listener<EngineExperts> for Silent {
    fn text(&mut self, _: &str) -> bool {
        true
    }
}

/// A model that sees.
struct Seeing {
    model: OpenModel,
    engine: InferenceEngine,
    /// The checkpoint, whose tokenizer and template are used.
    folder: PathBuf,
}

impl Seeing {
    /// The model at `path` of the reference in `folder`, with this image tower if one is named.
    fn start(folder: &Path, path: &Path, mmproj: Option<&Path>, size: CacheSize) -> Self {
        let options = ModelOptions { mmproj: mmproj.map(Path::to_owned), ..ModelOptions::default() };
        let model = OpenModel::open(path, &options).unwrap();
        let vision = VisionOptions { tower: VisionUse::OnDemand, ..VisionOptions::default() };
        let cache = CacheOptions { size, ..CacheOptions::default() };
        let options = Options { vision, cache, context: ContextSize::Tokens(512), ..Options::default() };
        let engine = InferenceEngine::start(&model, &options).unwrap();
        Seeing { model, engine, folder: folder.to_owned() }
    }

    /// The greedy text behind each prompt.
    fn texts(&mut self) -> Vec<(String, Vec<u32>)> {
        prompts(&self.folder).iter().map(|(name, prompt)| (name.clone(), self.text(name, prompt))).collect()
    }

    fn text(&mut self, name: &str, prompt: &Value) -> Vec<u32> {
        let codec = OpenModel::open(&self.folder, &ModelOptions::default()).unwrap().text_codec().unwrap();
        let sight = self.engine.sight(&self.model, &codec.tokenizer).unwrap().expect("the model sees");
        let messages = prompt["messages"].as_array().unwrap();
        let rendered = codec.template.unwrap().render(&ChatInput::new(messages)).unwrap();
        assert_eq!(rendered, prompt["text"].as_str().unwrap(), "{name}");
        let tokens = codec.tokenizer.encode(&rendered, false).unwrap();
        let files = prompt["images"]
            .as_array()
            .unwrap()
            .iter()
            .map(|name| std::fs::read(picture(name.as_str().unwrap())).unwrap());
        let pictures: Vec<_> = files.map(|file| sight.encode(&file).unwrap()).collect();
        let prompt = expand_images(&tokens, sight.marks().image, &pictures).unwrap();
        let mut session = self.engine.session();
        session.show(&pictures);
        let sampler = Sampler::new(Sampling::default(), 0).unwrap();
        let request = Request {
            prompt: &prompt,
            sampler,
            grammar: None,
            shown: &[],
            eos: &[],
            stop: StopMatcher::new(vec![]).unwrap(),
            max_tokens: generated(&self.folder, name).len(),
            drafting: Default::default(),
        };
        generate(&mut session, &codec.tokenizer, request, &mut Silent).unwrap().ids
    }

    fn check(&mut self, form: &str) {
        for (name, ids) in self.texts() {
            assert_eq!(ids, generated(&self.folder, &name), "{} as {form}: {name}", self.folder.display());
        }
    }
}

#[test]
fn checkpoints_and_mmproj_files_give_the_texts_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for folder in references() {
        Seeing::start(&folder, &folder, None, CacheSize::Available).check("a checkpoint");
    }
    for (at, folder) in mmproj_references().iter().enumerate() {
        let mmproj = dir.path().join(format!("mmproj-{at}.gguf"));
        write_mmproj(folder, &mmproj);
        Seeing::start(folder, folder, Some(&mmproj), CacheSize::Available).check("a checkpoint with an mmproj file");
    }
}

#[test]
fn stores_give_the_texts_of_transformers_streamed_and_resident() {
    let dir = tempfile::tempdir().unwrap();
    for (at, folder) in references().iter().enumerate() {
        let whole = store(folder, &dir.path().join(format!("whole-{at}")), true);
        for size in [CacheSize::All, CacheSize::ExpertsPerLayer(3)] {
            Seeing::start(folder, &whole, None, size).check("a store");
        }
        let later = store(folder, &dir.path().join(format!("later-{at}")), false);
        let added = ["store", "add-vision", folder.to_str().unwrap(), later.to_str().unwrap()];
        assert!(larder_ok(&added).contains("has the image tower of 3 layers now"));
        for name in ["vision.json", "vision.json.seal", "vision.safetensors", "larder.json"] {
            let [one, other] = [&whole, &later].map(|store| std::fs::read(store.join(name)).unwrap());
            assert!(one == other, "{name} of {}", folder.display());
        }
        Seeing::start(folder, &later, None, CacheSize::ExpertsPerLayer(3)).check("a store that was completed");
    }
}

#[test]
fn gguf_files_with_a_tower_beside_them_give_the_texts_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    let folder = fixture("vision/qwen3_vl_moe");
    let gguf = dir.path().join("tiny-vl.gguf");
    write_qwen3_vl(&folder, &gguf);
    write_mmproj(&folder, &dir.path().join("mmproj-tiny-vl-f32.gguf"));
    Seeing::start(&folder, &gguf, None, CacheSize::Available).check("a GGUF file");
    let store = store(&gguf, &dir.path().join("store"), true);
    Seeing::start(&folder, &store, None, CacheSize::ExpertsPerLayer(3)).check("a store of a GGUF file");
}

#[test]
fn a_picture_that_comes_again_is_not_encoded_again() {
    let folder = &references()[0];
    let seeing = Seeing::start(folder, folder, None, CacheSize::Available);
    let codec = seeing.model.text_codec().unwrap();
    let sight = seeing.engine.sight(&seeing.model, &codec.tokenizer).unwrap().unwrap();
    let file = |name: &str| std::fs::read(picture(name)).unwrap();
    let first = sight.encode(&file("odd")).unwrap();
    let again = sight.look(&file("odd")).unwrap();
    assert_eq!((again.number, again.grid), (first.number, first.grid));
    assert!(std::sync::Arc::ptr_eq(&again.encoded.unwrap(), &first.encoded.unwrap()));
    let other = sight.look(&file("plain")).unwrap();
    assert!(other.number != first.number && other.encoded.is_none());
}
