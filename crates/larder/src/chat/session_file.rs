//! The file of `--session`: a conversation with its sequence, saved at the end of a chat and continued by the next one.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use larder_engine::{Images, SavedHead, SavedSequenceError, Sequence};
use larder_model::Decoder;
use larder_os::{open_regular, output_file, write_privately};
use larder_policy::routing::RoutingSpec;
use larder_runtime::{InferenceEngine, OpenModel, Options};
use serde_json::{Value, json};

use super::conversation::Conversation;
use super::reply::Transcript;
use crate::origin::SequenceOrigins;

/// The file, and what its sequence must have been made with.
pub struct SessionFile {
    path: PathBuf,
    origins: SequenceOrigins,
    /// Gives numbers to the pictures of its sequence.
    images: Images,
}

/// What a session file holds.
pub struct SavedChat {
    /// The conversation.
    pub conversation: Conversation,
    /// The tokens of its last prompt and answer with their text.
    pub transcript: Option<Transcript>,
    /// The sequence.
    pub sequence: Sequence,
}

impl SavedChat {
    /// An empty chat.
    pub fn new(decoder: &Decoder, context: usize) -> Self {
        SavedChat { conversation: Conversation::default(), transcript: None, sequence: Sequence::new(decoder, context) }
    }
}

impl SessionFile {
    /// Checks that a file may be there: its folder exists, and no folder, device or pipe has its name.
    pub fn check(path: &Path) -> Result<()> {
        let shown = || path.display().to_string();
        let (target, _) = output_file(path).with_context(shown)?;
        match target.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) if !folder.is_dir() => {
                bail!("{}: the folder {} does not exist; create it first", shown(), folder.display())
            }
            _ => Ok(()),
        }
    }

    /// The file at `path`, for sequences of a model that can be saved.
    pub fn open(path: PathBuf, model: &OpenModel, options: &Options, engine: &InferenceEngine) -> Result<Self> {
        let origins = SequenceOrigins::new(model, options, engine, true).context("--session cannot be used")?;
        Ok(SessionFile { path, origins, images: engine.images().clone() })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What the file holds; `None` if there is no file.
    pub fn load(&self, decoder: &Decoder, context: usize, routing: &RoutingSpec) -> Result<Option<SavedChat>> {
        let Some((file, bytes)) = self.read()? else { return Ok(None) };
        let origin = self.origins.with(routing);
        let restored = Sequence::restore(decoder, context, &origin, &self.images, bytes, &mut BufReader::new(file));
        let (sequence, note) = restored.map_err(|error| self.refusal(&error))?;
        let (conversation, transcript) =
            from_note(&note).with_context(|| format!("{}: is not a saved chat", self.path.display()))?;
        Ok(Some(SavedChat { conversation, transcript, sequence }))
    }

    /// Saves a chat. A file that is not a saved sequence of this model is not replaced.
    pub fn save(
        &self,
        sequence: &Sequence,
        conversation: &Conversation,
        transcript: Option<&Transcript>,
        routing: &RoutingSpec,
    ) -> Result<()> {
        let origin = self.origins.with(routing);
        if let Some((mut file, bytes)) = self.read()? {
            let head =
                SavedHead::read(bytes, usize::MAX, &self.images, &mut file).map_err(|error| self.refusal(&error))?;
            if !head.origin.same_model(&origin) {
                return Err(self.refusal(&SavedSequenceError::OtherModel));
            }
        }
        // Tokens of images are numbers of this process.
        let transcript = transcript.filter(|transcript| transcript.images.is_empty());
        let transcript = transcript.map(|Transcript { tokens, text, .. }| json!({"tokens": tokens, "text": text}));
        let note = json!({"messages": conversation.saved_json(), "transcript": transcript}).to_string();
        // It holds what was said. A link is the user's own.
        let written = output_file(&self.path)
            .and_then(|(path, _)| write_privately(&path, |out| sequence.save(&origin, note.as_bytes(), out)));
        written.with_context(|| self.path.display().to_string())
    }

    /// The file and its length, if it is there.
    fn read(&self) -> Result<Option<(File, u64)>> {
        let opened = open_regular(&self.path).and_then(|file| Ok((file.metadata()?.len(), file)));
        match opened {
            Ok((bytes, file)) => Ok(Some((file, bytes))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).with_context(|| self.path.display().to_string()),
        }
    }

    fn refusal(&self, error: &SavedSequenceError) -> anyhow::Error {
        let todo = match error {
            SavedSequenceError::TooLong { .. } => "start with a larger --context",
            SavedSequenceError::OtherSettings => "start with the same, or name another file with --session",
            _ => "name another file with --session",
        };
        anyhow::anyhow!("{} {error}; {todo}", self.path.display())
    }
}

/// The conversation and the transcript that a note holds.
fn from_note(note: &[u8]) -> Result<(Conversation, Option<Transcript>)> {
    let json: Value = serde_json::from_slice(note).context("it has no conversation")?;
    let transcript = match &json["transcript"] {
        Value::Null => None,
        Value::Object(both) => Some(Transcript {
            tokens: serde_json::from_value(both.get("tokens").cloned().unwrap_or_default())
                .context("the tokens of its transcript must be numbers")?,
            text: both.get("text").and_then(Value::as_str).context("its transcript must have a text")?.to_owned(),
            images: vec![],
        }),
        _ => bail!("its transcript must be an object"),
    };
    Ok((Conversation::from_json(&json["messages"])?, transcript))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_read_or_refused() {
        let good =
            r#"{"messages": [{"role": "user", "content": "x"}], "transcript": {"tokens": [1, 2], "text": "xy"}}"#;
        let (conversation, transcript) = from_note(good.as_bytes()).unwrap();
        let transcript = transcript.unwrap();
        assert_eq!(
            (conversation.messages.len(), &transcript.tokens[..], transcript.text.as_str()),
            (1, &[1, 2][..], "xy")
        );
        assert!(from_note(br#"{"messages": [], "transcript": null}"#).unwrap().1.is_none());
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"messages": 7}"#,
            r#"{"messages": [], "transcript": 7}"#,
            r#"{"messages": [], "transcript": {}}"#,
            r#"{"messages": [], "transcript": {"tokens": [-1], "text": ""}}"#,
            r#"{"messages": [], "transcript": {"tokens": [1]}}"#,
        ] {
            assert!(from_note(wrong.as_bytes()).is_err(), "{wrong}");
        }
    }
}
