//! `larder tokenize`.

use anyhow::{Context, Result, bail};
use larder_core::read_regular_text;
use larder_engine::ChatInput;
use serde_json::{Value, json};

use crate::cli::TokenizeArgs;
use crate::commands::text_or_stdin;
use crate::models;

/// Maximum length of a text or of a file with messages.
const TEXT_BYTES: usize = 16 << 20;

/// Prints the tokens of a text or of chat messages as JSON.
pub fn run(args: &TokenizeArgs) -> Result<()> {
    let text = models::open(&args.model)?.text_codec()?;
    let (text_in, special) = match (&args.messages, &args.text) {
        (Some(file), _) => {
            let json = match file.to_str() {
                Some("-" | "/dev/stdin") => text_or_stdin("-", TEXT_BYTES)?,
                _ => read_regular_text(file, TEXT_BYTES as u64).with_context(|| file.display().to_string())?,
            };
            let messages: Vec<Value> = serde_json::from_str(&json)
                .with_context(|| format!("{}: must be a JSON array of messages", file.display()))?;
            let Some(template) = &text.template else {
                bail!("the model has no chat template; give a text instead of --messages")
            };
            let mut input = ChatInput::new(&messages);
            input.add_generation_prompt = !args.no_generation_prompt;
            (template.render(&input)?, false)
        }
        (None, Some(text)) => (text_or_stdin(text, TEXT_BYTES)?, !args.no_special),
        (None, None) => bail!("there is no text to tokenize"),
    };
    let ids = text.tokenizer.encode(&text_in, special)?;
    let decoded = text.tokenizer.decode(&ids, true);
    println!("{}", json!({"text": text_in, "ids": ids, "decoded": decoded}));
    Ok(())
}
