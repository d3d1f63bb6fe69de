//! `larder tokenize`.

use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_os::read_regular_text;
use larder_text::ChatInput;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::cli::TokenizeArgs;
use crate::commands::text_or_stdin;
use crate::models;

/// Maximum length of a text or of a file with messages.
const TEXT_BYTES: usize = 16 << 20;

/// A chat as the body of a request to a server has it.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, expecting = "an object with messages")]
struct Chat {
    messages: Vec<Value>,
    tools: Option<Vec<Value>>,
    documents: Option<Vec<Value>>,
    #[serde(default)]
    chat_template_kwargs: Map<String, Value>,
}

/// Prints the tokens of a text or of a chat as JSON.
pub fn run(args: &TokenizeArgs) -> Result<()> {
    let model = models::open(&args.model)?;
    let mut text = model.text_codec()?;
    if let Some(path) = &args.chat_template_file {
        text.template = Some(models::template_of(&model, path)?);
    }
    let (text_in, special) = match (&args.messages, &args.text) {
        (Some(file), _) => {
            let chat = read_chat(file)?;
            let Some(template) = &text.template else {
                bail!("the model has no chat template; give a text instead of --messages")
            };
            let input = ChatInput {
                tools: chat.tools.as_deref(),
                documents: chat.documents.as_deref(),
                add_generation_prompt: !args.no_generation_prompt,
                extra: &chat.chat_template_kwargs,
                ..ChatInput::new(&chat.messages)
            };
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

fn read_chat(file: &Path) -> Result<Chat> {
    let json = match file.to_str() {
        Some("-" | "/dev/stdin") => text_or_stdin("-", TEXT_BYTES)?,
        _ => read_regular_text(file, TEXT_BYTES as u64).with_context(|| file.display().to_string())?,
    };
    let chat = serde_json::from_str(&json).and_then(|json| match json {
        Value::Array(messages) => Ok(Chat { messages, ..Chat::default() }),
        request => serde_json::from_value(request),
    });
    chat.with_context(|| format!("{}: must be a JSON array of messages, or an object that has one", file.display()))
}
