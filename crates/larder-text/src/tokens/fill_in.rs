//! Fill-in tokens: the marks by which models for code complete a gap in a text (fill in the middle, FIM).

use super::tokenizer::{EncodeError, Tokenizer};

/// The marks of families of models: before the text that precedes the gap, before the text that follows it, and before
/// what is generated.
const MARKS: &[[&str; 3]] = &[
    // Qwen, CodeGemma
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    // StarCoder, Granite
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    // DeepSeek
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    // GLM
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
    // Code Llama
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ["<PRE>", "<SUF>", "<MID>"],
];

/// The fill-in tokens of a model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FillInTokens {
    before: u32,
    after: u32,
    gap: u32,
}

impl FillInTokens {
    /// Those that the tokenizer has, if it has all three of a family.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        MARKS.iter().find_map(|[before, after, gap]| {
            let [before, after, gap] = [tokenizer.id(before)?, tokenizer.id(after)?, tokenizer.id(gap)?];
            Some(FillInTokens { before, after, gap })
        })
    }

    /// The prompt for what belongs between two texts.
    pub fn prompt(&self, tokenizer: &Tokenizer, before: &str, after: &str) -> Result<Vec<u32>, EncodeError> {
        // What the tokenizer puts before any text.
        let mut tokens = tokenizer.encode("", true)?;
        for (mark, text) in [(self.before, before), (self.after, after)] {
            tokens.push(mark);
            tokens.extend(tokenizer.encode(text, false)?);
        }
        tokens.push(self.gap);
        Ok(tokens)
    }
}
