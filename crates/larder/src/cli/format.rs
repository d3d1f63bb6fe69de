//! Flags of structured output.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use larder_store::read_small;
use larder_text::TextFormat;

use super::heading;

/// Largest file with a schema or a grammar.
const FILE_BYTES: u64 = 1 << 20;

/// What the text has to match.
#[derive(Args)]
pub struct FormatFlags {
    /// Write JSON that is valid by the JSON Schema in FILE
    #[arg(long, value_name = "FILE", group = "format", conflicts_with = "ignore_eos", help_heading = heading::SAMPLING)]
    pub json_schema: Option<PathBuf>,
    /// Write a text that the regular expression matches as a whole
    #[arg(long, value_name = "REGEX", group = "format", conflicts_with = "ignore_eos", help_heading = heading::SAMPLING)]
    pub regex: Option<String>,
    /// Write a text of the grammar in FILE, in GBNF or in llguidance's variant of Lark
    #[arg(long, value_name = "FILE", group = "format", conflicts_with = "ignore_eos", help_heading = heading::SAMPLING)]
    pub grammar: Option<PathBuf>,
}

impl FormatFlags {
    /// What the text has to match, if anything; reads the file.
    pub fn format(&self) -> Result<Option<TextFormat>> {
        match self {
            FormatFlags { json_schema: Some(path), .. } => {
                let schema = serde_json::from_slice(&read(path)?);
                Ok(Some(TextFormat::JsonSchema(schema.with_context(|| format!("{}: is not JSON", path.display()))?)))
            }
            FormatFlags { regex: Some(regex), .. } => Ok(Some(TextFormat::Regex(regex.clone()))),
            FormatFlags { grammar: Some(path), .. } => {
                let text = String::from_utf8(read(path)?);
                let text = text.with_context(|| format!("{}: is not UTF-8", path.display()))?;
                Ok(Some(TextFormat::of_grammar(&text)))
            }
            _ => Ok(None),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    match read_small(path, FILE_BYTES)? {
        Some(bytes) => Ok(bytes),
        None => bail!("{}: not found", path.display()),
    }
}
