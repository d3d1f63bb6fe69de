//! Models that see, with what transformers computed of prompts with pictures; see `scripts/make/make_vision.py`. What
//! the tower makes of the pictures is taken from there.

use std::path::{Path, PathBuf};

use larder_core::{EncodedImage, ImageGrid};
use larder_engine::{Images, Picture};
use serde_json::Value;

use super::reference::Reference;
use super::{fixture, folders};

/// Patches of a picture along each side of a token.
const MERGED: usize = 2;

/// The small models that the repository has.
pub fn vision_models() -> Vec<PathBuf> {
    folders(&fixture("vision")).into_iter().filter(|folder| folder.join("model.safetensors").exists()).collect()
}

/// A prompt with pictures, and what follows from it.
pub struct VisionPrompt {
    /// Name of the model and of the prompt.
    pub name: String,
    /// The tokens, those of images by the numbers of their pictures.
    pub tokens: Vec<u32>,
    /// One for each image.
    pub pictures: Vec<Picture>,
    /// The rows of these tokens: `[rows, vocab]`.
    pub logit_rows: Vec<usize>,
    pub logits: Vec<f32>,
    /// The tokens that are written behind it, and their logits: `[tokens, vocab]`.
    pub generated: Vec<u32>,
    pub decode_logits: Vec<f32>,
}

/// The prompts of the model in a folder, whose pictures have numbers from `images`.
pub fn prompts(folder: &Path, images: &Images) -> Vec<VisionPrompt> {
    let reference = Reference::read(folder);
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let thinker = config.get("thinker_config").unwrap_or(&config);
    let image_token = thinker["image_token_id"].as_u64().unwrap() as u32;
    let json = reference.json();
    let prompts = json["prompts"].as_object().unwrap();
    let prompt = |(name, prompt): (&String, &Value)| {
        let names = prompt["images"].as_array().unwrap().iter().map(|name| name.as_str().unwrap());
        let pictures: Vec<Picture> = names.map(|name| picture(&reference, images, name)).collect();
        let mut tokens = reference.tokens(&format!("{name}.input_ids"));
        let mut rest = &mut tokens[..];
        for picture in &pictures {
            let first = rest.iter().position(|id| *id == image_token).unwrap();
            let (own, others) = rest[first..].split_at_mut(picture.grid.tokens());
            assert!(own.iter().all(|id| *id == image_token));
            own.fill(picture.id());
            rest = others;
        }
        assert!(!rest.contains(&image_token));
        let decode_logits = reference.floats(&format!("{name}.decode_logits")).to_vec();
        let rows = format!("{name}.logit_rows");
        let some = reference.has_tokens(&rows);
        let logit_rows = if some { indices(&reference, &rows) } else { (0..tokens.len()).collect() };
        VisionPrompt {
            name: format!("{}, {name}", folder.file_name().unwrap().to_string_lossy()),
            logits: reference.floats(&format!("{name}.logits")).to_vec(),
            generated: reference.tokens(&format!("{name}.generated_ids")),
            tokens,
            pictures,
            logit_rows,
            decode_logits,
        }
    };
    prompts.iter().map(prompt).collect()
}

fn indices(reference: &Reference, name: &str) -> Vec<usize> {
    reference.tokens(name).into_iter().map(|index| index as usize).collect()
}

/// A picture, as the tower of the reference encodes it.
fn picture(reference: &Reference, images: &Images, name: &str) -> Picture {
    let [_, height, width] = indices(reference, &format!("grid.{name}"))[..] else { panic!("three sides") };
    let grid = ImageGrid { rows: height / MERGED, columns: width / MERGED };
    let rows = reference.floats(&format!("tower.{name}")).to_vec();
    let names: Vec<&str> = reference.names().collect();
    let features = (0..).map(|k| format!("deepstack.{name}.{k}")).take_while(|name| names.contains(&name.as_str()));
    let deepstack = features.map(|name| reference.floats(&name).to_vec()).collect();
    let mut hash = [0; 32];
    hash[..name.len()].copy_from_slice(name.as_bytes());
    images.encoded(hash, EncodedImage { grid, width: rows.len() / grid.tokens(), rows, deepstack }).unwrap()
}
