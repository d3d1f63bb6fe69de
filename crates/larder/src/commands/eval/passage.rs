//! The text of an evaluation.

use anyhow::{Result, bail};
use larder_lab::eval::{chunks, read_text, read_token_ids, text_prefix};
use larder_runtime::{OpenModel, TextCodec};
use serde_json::{Value, json};

use crate::cli::eval::TextFlags;

/// The tokens of a text, in chunks.
pub struct Passage {
    /// Name of the file, without folders.
    pub name: String,
    /// Tokens per chunk.
    pub chunk: usize,
    ids: Vec<u32>,
    text: Option<TextCodec>,
}

impl Passage {
    /// Reads the file of the flags and tokenizes it for the model.
    pub fn open(model: &OpenModel, flags: &TextFlags) -> Result<Self> {
        let (path, context) = (&flags.file, model.blueprint.context);
        if flags.chunk > context {
            bail!("--chunk {} is longer than the model's context of {context}; use at most {context}", flags.chunk);
        }
        let most = flags.tokens.unwrap_or(usize::MAX);
        let is_ids = path.extension().is_some_and(|e| e.eq_ignore_ascii_case("json"));
        let (mut ids, text) = if is_ids {
            (read_token_ids(path)?, None)
        } else {
            let (all, text) = (read_text(path)?, model.text_codec()?);
            (text.tokenizer.encode(text_prefix(&all, most), true)?, Some(text))
        };
        ids.truncate(most);
        if ids.len() < 2 {
            bail!("{}: contains {} tokens, and at least 2 are needed to predict one", path.display(), ids.len());
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Passage { name, chunk: flags.chunk, ids, text })
    }

    /// The chunks, in order.
    pub fn chunks(&self) -> impl Iterator<Item = &[u32]> {
        chunks(&self.ids, self.chunk)
    }

    /// Number of tokens to process: all of each chunk but its last.
    pub fn tokens_read(&self) -> usize {
        self.chunks().map(|chunk| chunk.len() - 1).sum()
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.chunks().map(<[u32]>::len).sum()
    }

    /// Bytes of the predicted tokens' text; `None` if the file has token ids.
    pub fn bytes(&self) -> Option<usize> {
        let tokenizer = &self.text.as_ref()?.tokenizer;
        Some(self.chunks().map(|chunk| tokenizer.decode(&chunk[1..], false).len()).sum())
    }

    /// File name, number of tokens and chunk size, as text.
    pub fn describe(&self) -> String {
        format!("{}: {} tokens in chunks of {}", self.name, self.ids.len(), self.chunk.min(self.ids.len()))
    }

    /// File name, number of tokens and chunk size, as JSON.
    pub fn json(&self) -> Value {
        json!({"file": self.name, "tokens": self.ids.len(), "chunk": self.chunk, "bytes": self.bytes()})
    }
}
