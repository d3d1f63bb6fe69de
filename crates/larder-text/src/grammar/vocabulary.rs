//! The bytes of a model's tokens, as the matcher of grammars needs them.

use std::sync::Arc;

use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use super::GrammarError;
use crate::tokens::{TokenBytes, Tokenizer};

/// Tokens with more bytes are never part of a text that has to match a grammar.
const TOKEN_BYTES_MAX: usize = 255;
/// Limits of the matcher's tree of tokens, which counts nodes and ids in 24 bits.
const TREE_NODES_MAX: usize = 1 << 23;
const TOKENS_MAX: usize = 1 << 23;

/// The first `rows` tokens of a tokenizer; a text ends with any of `eos`.
pub(super) fn vocabulary(tokenizer: &Tokenizer, rows: usize, eos: &[u32]) -> Result<TokEnv, GrammarError> {
    let count = tokenizer.vocab_size().min(rows);
    let eos: Vec<u32> = eos.iter().copied().filter(|id| (*id as usize) < count).collect();
    let Some(first) = eos.first() else {
        return Err(GrammarError::of("the model has no token that ends a text, which structured output needs"));
    };
    let words: Vec<Vec<u8>> = (0..count as u32).map(|id| word(tokenizer.token_bytes(id))).collect();
    if count > TOKENS_MAX || words.iter().map(Vec::len).sum::<usize>() > TREE_NODES_MAX {
        return Err(GrammarError::of("the model's vocabulary is too large for structured output"));
    }
    let trie = TokTrie::from(&TokRxInfo::new(count as u32, *first), &words).with_eos_tokens(&eos);
    Ok(Arc::new(ApproximateTokEnv::new(trie)))
}

/// Special tokens begin with a byte that no text has.
fn word(token: TokenBytes) -> Vec<u8> {
    let word = match token {
        TokenBytes::Text(bytes) => bytes,
        TokenBytes::Special(name) => [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat(),
        TokenBytes::Unknown => Vec::new(),
    };
    if word.len() > TOKEN_BYTES_MAX { Vec::new() } else { word }
}
