//! Saves a conversation to a file, atomically, and loads it.

use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use larder_store::read_small;
use serde_json::{Value, json};

use super::conversation::Conversation;
use super::settings::Settings;

/// Name and version of the format.
const FORMAT: &str = "larder-chat-1";
/// Maximum size of a file.
const FILE_BYTES: u64 = 64 << 20;

/// Saves to `path`; an existing file is replaced only after the new one is complete.
pub fn save(path: &Path, conversation: &Conversation, settings: &Settings) -> Result<()> {
    let json = json!({"format": FORMAT, "messages": conversation.json(), "settings": settings.json()});
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}.part", std::process::id()));
    let beside = PathBuf::from(beside);
    let written = write(&beside, &format!("{json:#}\n")).and_then(|()| std::fs::rename(&beside, path));
    if written.is_err() {
        // The error is reported; a temporary file that cannot be removed matters less.
        let _ = std::fs::remove_file(&beside);
    }
    written.with_context(|| path.display().to_string())
}

fn write(path: &Path, text: &str) -> std::io::Result<()> {
    let mut file = std::fs::File::options().write(true).create_new(true).open(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()
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
