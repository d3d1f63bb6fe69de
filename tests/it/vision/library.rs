//! `larder_runtime::Model` with images in prompts and chats: texts of transformers, and sentences where it sees none.

use std::path::Path;

use anyhow::Result;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use larder_runtime::{
    ChatMessages, GenerateOptions, GeneratedText, LoadOptions, Model, PictureFile, TextPiece, sentence,
};
use serde_json::{Value, json};

use super::{generated, mmproj_references, picture, prompts, references, store};
use crate::support::fixture;
use crate::support::mmproj::write_mmproj;

/// Tokens of the texts of transformers.
const WRITTEN: usize = 12;

fn load(path: &Path, options: &Value) -> Model {
    let mut all = json!({"context": 512, "threads": 2});
    all.as_object_mut().unwrap().extend(options.as_object().unwrap().clone());
    Model::load_with(path, &LoadOptions::from_json(&all.to_string()).unwrap()).unwrap()
}

fn read(name: &str) -> PictureFile {
    PictureFile::read(&picture(name)).unwrap()
}

/// Greedy, with these pictures.
fn greedy(names: &[&str]) -> GenerateOptions {
    let images = names.iter().map(|name| read(name)).collect();
    GenerateOptions { images, max_tokens: WRITTEN, temperature: Some(0.0), ignore_eos: true, ..Default::default() }
}

fn generate(model: &mut Model, prompt: &str, images: &[&str]) -> Result<GeneratedText> {
    model.generate_with(prompt, &greedy(images), &mut |_: TextPiece| true)
}

fn chat(model: &mut Model, messages: &Value, images: &[&str]) -> Result<GeneratedText> {
    let chat = ChatMessages { messages: messages.as_array().unwrap().clone(), ..Default::default() };
    model.chat(&chat, &greedy(images), &mut |_: TextPiece| true)
}

/// The names of the pictures of a prompt.
fn pictures(prompt: &Value) -> Vec<&str> {
    prompt["images"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect()
}

/// The messages of a prompt, of which each image has its own picture.
fn with_own_pictures(prompt: &Value) -> Value {
    let (mut messages, names) = (prompt["messages"].clone(), pictures(prompt));
    let parts = messages.as_array_mut().unwrap().iter_mut().flat_map(|message| message["content"].as_array_mut());
    let images = parts.flatten().filter(|part| part["type"] == "image");
    for (part, name) in images.zip(names) {
        let url = format!("data:image/png;base64,{}", STANDARD.encode(&*read(name)));
        *part = json!({"type": "image_url", "image_url": {"url": url}});
    }
    messages
}

#[test]
fn images_before_a_text_give_the_text_of_transformers() {
    let dir = tempfile::tempdir().unwrap();
    for (at, folder) in mmproj_references().iter().enumerate() {
        let store = store(folder, &dir.path().join(at.to_string()), true);
        let mmproj = dir.path().join(format!("mmproj-{at}.gguf"));
        write_mmproj(folder, &mmproj);
        let (text, want) = (one(folder), generated(folder, "one"));
        for (path, options) in [
            (folder, json!({})),
            (folder, json!({"mmproj": mmproj})),
            (&store, json!({"cache": "3x", "vision": "preload", "image-tokens": 1024})),
        ] {
            let mut model = load(path, &options);
            assert_eq!(model.info()["sees"], true);
            let by_text = generate(&mut model, "What is this?", &["odd"]).unwrap();
            assert_eq!(by_text.tokens, want, "{} with {options}", path.display());
            // A token of the prompt stands for the image.
            let tokens = model.text_codec().tokenizer.encode(&text, false).unwrap();
            let by_tokens = model.generate_from(&tokens, &greedy(&["odd"]), &mut |_: TextPiece| true).unwrap();
            assert_eq!((by_tokens.tokens, by_tokens.prompt_tokens), (by_text.tokens, tokens.len() + 7));
        }
    }
}

/// The prompt `one` as the chat template makes it.
fn one(folder: &Path) -> String {
    let (_, prompt) = prompts(folder).into_iter().find(|(name, _)| name == "one").unwrap();
    prompt["text"].as_str().unwrap().to_owned()
}

#[test]
fn images_of_messages_give_the_texts_of_transformers() {
    for folder in references() {
        let mut model = load(&folder, &json!({}));
        for (name, prompt) in prompts(&folder) {
            let want = generated(&folder, &name);
            let given = chat(&mut model, &prompt["messages"], &pictures(&prompt)).unwrap();
            assert_eq!(given.tokens, want, "{} as {name}", folder.display());
            let own = chat(&mut model, &with_own_pictures(&prompt), &[]).unwrap();
            assert_eq!((&own.tokens, own.prompt_tokens), (&want, given.prompt_tokens), "{}", folder.display());
        }
        let text = json!([{"role": "user", "content": "What is this?"}]);
        assert_eq!(chat(&mut model, &text, &["odd"]).unwrap().tokens, generated(&folder, "one"));
    }
}

#[test]
fn a_chat_that_goes_on_keeps_the_tokens_of_its_images() {
    let mut model = load(&fixture("vision/qwen3_vl_moe"), &json!({}));
    let image = json!({"type": "image"});
    let first = json!([{"role": "user", "content": [image, {"type": "text", "text": "What is this?"}]}]);
    let before = chat(&mut model, &first, &["odd"]).unwrap();
    let again = chat(&mut model, &first, &["odd"]).unwrap();
    assert_eq!((again.tokens, again.reused_tokens), (before.tokens, Some(before.prompt_tokens - 1)));
    let mut longer = first.clone();
    let turns =
        [json!({"role": "assistant", "content": "A shape."}), json!({"role": "user", "content": [image, image]})];
    longer.as_array_mut().unwrap().extend(turns);
    let warm = chat(&mut model, &longer, &["odd", "dot", "odd"]).unwrap();
    assert!(warm.reused_tokens.unwrap() + 8 > before.prompt_tokens, "{:?}", warm.reused_tokens);
    let other = chat(&mut model, &first, &["wide"]).unwrap();
    assert!(other.reused_tokens.unwrap() < 8, "the tokens before the image");
    let cold = chat(&mut load(&fixture("vision/qwen3_vl_moe"), &json!({})), &longer, &["odd", "dot", "odd"]).unwrap();
    assert_eq!(warm.tokens, cold.tokens);
}

#[test]
fn what_cannot_be_seen_is_refused_in_a_sentence() {
    let folder = fixture("vision/qwen3_vl_moe");
    let mut seeing = load(&folder, &json!({}));
    let said = |result: Result<GeneratedText>| sentence(&result.unwrap_err());
    let message = |content: Value| json!([{"role": "user", "content": content}]);
    let mut blind = load(&fixture("golden/olmoe"), &json!({"context": 64}));
    let takes_none = "this model takes no images; models that see are those of type qwen3_vl_moe, ";
    assert!(said(generate(&mut blind, "x", &["dot"])).starts_with(takes_none));
    assert!(said(chat(&mut blind, &message("x".into()), &["dot"])).starts_with(takes_none));
    assert_eq!(blind.info()["sees"], false);
    let off = said(generate(&mut load(&folder, &json!({"vision": "off"})), "x", &["dot"]));
    assert!(off.contains("images are refused with --vision off"), "{off}");
    let long = said(generate(&mut load(&folder, &json!({"context": 33})), "What is this?", &["odd"]));
    assert_eq!(long, "the prompt has 37 tokens; it must have from 1 to 32");
    for marked in [
        said(generate(&mut seeing, "look: <|image_pad|>", &["dot"])),
        said(chat(&mut seeing, &message("look: <|image_pad|>".into()), &["dot"])),
    ] {
        assert!(marked.starts_with("the text contains <|image_pad|>, the token that stands for an image"), "{marked}");
    }
    let no_picture = PictureFile::from(b"{}".to_vec());
    let options = GenerateOptions { images: vec![read("dot"), no_picture], ..greedy(&[]) };
    let damaged = said(seeing.generate_with("x", &options, &mut |_: TextPiece| true));
    assert!(damaged.starts_with("image 2: ") && damaged.contains("is not a PNG, JPEG, WebP or GIF file"), "{damaged}");
    let tokens = said(seeing.generate_from(&[1, 2], &greedy(&["dot"]), &mut |_: TextPiece| true));
    assert!(tokens.starts_with("the prompt has tokens for 0 of 1 images; give one image for each token "), "{tokens}");
    let image = json!({"type": "image"});
    let fewer = said(chat(&mut seeing, &message(json!([image, image])), &["dot"]));
    assert!(fewer.starts_with("the messages have parts of the type image for 2 of 1 images"), "{fewer}");
    let url = json!({"type": "image_url", "image_url": {"url": "https://a.b/c.png"}});
    let address = said(chat(&mut seeing, &message(json!([url])), &[]));
    assert!(address.starts_with("image 1: pictures are not fetched from addresses"), "{address}");
    assert_eq!(generate(&mut seeing, "What is this?", &["odd"]).unwrap().tokens, generated(&folder, "one"));
}
