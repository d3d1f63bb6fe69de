//! The tokens by which a model shows an image.

use larder_engine::ImageMarks;
use larder_text::Tokenizer;
use serde_json::Value;

/// The names that the tokens have in most vocabularies: before an image, for it, behind it.
const USUAL: [&str; 3] = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"];
/// Their ids in a config.
const KEYS: [&str; 3] = ["vision_start_token_id", "image_token_id", "vision_end_token_id"];

/// The marks of a model with this config; `None` if no token of the tokenizer stands for an image.
pub fn image_marks(config: &Value, tokenizer: &Tokenizer) -> Option<ImageMarks> {
    let [start, image, end] = [0, 1, 2].map(|at| token(config, tokenizer, KEYS[at], USUAL[at]));
    let (image, text) = image?;
    let text_of = |token: Option<(u32, String)>| token.map_or(String::new(), |(_, text)| text);
    Some(ImageMarks { image, text: [text_of(start), text, text_of(end)].concat() })
}

/// A token by its id in the config, or by its usual name, with its text.
fn token(config: &Value, tokenizer: &Tokenizer, key: &str, usual: &str) -> Option<(u32, String)> {
    let ids = [&config["thinker_config"][key], &config[key]];
    let id = ids.into_iter().find_map(Value::as_u64).and_then(|id| u32::try_from(id).ok());
    let id = id.or_else(|| tokenizer.id(usual))?;
    let text = tokenizer.decode(&[id], false);
    // A token that cannot be written would never be found in a prompt.
    (tokenizer.id(&text) == Some(id)).then_some((id, text))
}
