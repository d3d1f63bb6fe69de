//! Saves a conversation to a file, atomically, and loads it.

use std::path::Path;

use anyhow::{Context, Result, bail};
use larder_store::read_small;
use serde_json::{Value, json};

use super::conversation::Conversation;
use super::settings::Settings;
use crate::output;

/// Name and version of the format.
const FORMAT: &str = "larder-chat-1";
/// Maximum size of a file.
const FILE_BYTES: u64 = 64 << 20;

/// Whether there is a saved chat at `path`; any other file is refused.
pub fn is_there(path: &Path, settings: &Settings) -> Result<bool> {
    let exists = path.exists();
    if exists && load(path, settings).is_err() {
        bail!("{} exists and is not a saved chat; name another file", path.display());
    }
    Ok(exists)
}

/// Saves to `path`, where nothing is or a saved chat, which is replaced once the new one is complete.
pub fn save(path: &Path, conversation: &Conversation, settings: &Settings) -> Result<()> {
    let json = json!({"format": FORMAT, "messages": conversation.saved_json(), "settings": settings.json()});
    output::write(path, format!("{json:#}\n"))
}

/// Reads what [`save`] wrote.
pub fn load(path: &Path, settings: &Settings) -> Result<(Conversation, Settings)> {
    let shown = || path.display().to_string();
    let Some(bytes) = read_small(path, FILE_BYTES)? else { bail!("{}: not found", shown()) };
    let json: Value = serde_json::from_slice(&bytes).with_context(|| format!("{}: is not JSON", shown()))?;
    if json["format"] != FORMAT {
        bail!("{}: is not a saved chat of larder: `format` must be {FORMAT:?}", shown());
    }
    let conversation = Conversation::from_json(&json["messages"]).with_context(shown)?;
    let settings = settings.with_json(&json["settings"]).with_context(shown)?;
    Ok((conversation, settings))
}
