//! The flag of structured output.

use anyhow::Result;
use clap::Args;
use larder_runtime::text_format;
use larder_text::TextFormat;

use super::heading;

/// What the text has to match.
#[derive(Args)]
pub struct FormatFlag {
    /// Keep the text to a format: json, json:SCHEMA, regex:… or grammar:FILE
    ///
    /// A JSON Schema is a file or {…}. A grammar is in GBNF, the notation of llama.cpp, or in llguidance's variant of
    /// Lark. A regular expression matches the text as a whole.
    #[arg(long, value_name = "FORMAT", conflicts_with = "ignore_eos", help_heading = heading::SAMPLING)]
    format: Option<String>,
}

impl FormatFlag {
    /// What the text has to match, if anything; reads the file that it names.
    pub fn text_format(&self) -> Result<Option<TextFormat>> {
        self.format.as_deref().map(text_format).transpose()
    }
}
