//! The tokenizer: text to token ids and back.

use std::collections::HashSet;

use larder_os::give_back_freed_memory;
use tokenizers::{AddedToken, Model, ModelWrapper};

use super::{
    detokenizer_steps::{self, DetokenizerStep},
    precheck::TokenizerPrecheck,
    tokenizer_config::{ConfigError, TokenizerConfig},
};

const FILE: &str = "tokenizer.json";
/// Maximum length of the file; those of published models have up to 35 MB.
const MAX_FILE_BYTES: usize = 64 << 20;
/// Maximum length of a token: a lattice of pieces looks them up at each position of a text.
const MAX_TOKEN_BYTES: usize = 4096;
/// Bytes of a token that count for the longest text of a context.
const TOKEN_BYTES: usize = 32;
/// Bytes of memory that tokenising takes for each byte of a text; 122 were measured, for 8 MiB of English and the demo
/// model's tokenizer.
pub const TOKENISING_BYTES: usize = 128;

/// Length of texts after which freed memory is given back: tokenising them took 32 MiB or more.
const LARGE_TEXT_BYTES: usize = 256 << 10;

/// Encodes and decodes text as transformers does with the same files.
#[derive(Clone, Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// Length of the longest token in bytes, as the vocabulary spells it.
    longest_token: usize,
    pub(super) steps: Vec<DetokenizerStep>,
}

/// What a token stands for in a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum TokenBytes {
    /// These bytes, which may be a part of a character.
    Text(Vec<u8>),
    /// Nothing: a special token of this name.
    Special(String),
    /// The id is not in the vocabulary.
    Unknown,
}

/// A text that could not be encoded.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("cannot tokenise a text of {bytes} bytes: {what}")]
pub struct EncodeError {
    /// Length of the text in bytes.
    pub bytes: usize,
    /// The tokenizer's message.
    pub what: String,
}

impl Tokenizer {
    /// A tokenizer from the bytes of a `tokenizer.json`, with the tokens and options of the `tokenizer_config.json`.
    pub fn from_bytes(json: &[u8], config: &TokenizerConfig) -> Result<Self, ConfigError> {
        let wrong = |what: String| ConfigError::new(FILE, what);
        if json.len() > MAX_FILE_BYTES {
            return Err(wrong(format!("is {} bytes long; at most {MAX_FILE_BYTES} are supported", json.len())));
        }
        let precheck = TokenizerPrecheck::read(json).map_err(wrong)?;
        let mut inner = tokenizers::Tokenizer::from_bytes(json)
            .map_err(|error| wrong(format!("is not a valid tokenizer file: {error}")))?;
        register(&mut inner, config)
            .map_err(|error| wrong(format!("cannot add the tokens of tokenizer_config.json: {error}")))?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| wrong(error.to_string()))?;
        inner.set_encode_special_tokens(config.split_special);
        let mut steps = detokenizer_steps::steps(precheck.decoder.as_ref()).map_err(wrong)?;
        let is_bpe = matches!(inner.get_model(), ModelWrapper::BPE(_));
        if config.clean_up && (!is_bpe || config.clean_up_bpe_too) {
            steps.extend(detokenizer_steps::clean_up());
        }
        let longest_token = inner.get_vocab(true).keys().map(String::len).max().unwrap_or_default();
        if longest_token > MAX_TOKEN_BYTES {
            return Err(wrong(format!(
                "has a token of {longest_token} bytes; at most {MAX_TOKEN_BYTES} are supported"
            )));
        }
        Ok(Tokenizer { inner, longest_token, steps })
    }

    /// The token ids of `text`; with `add_special`, special tokens such as BOS are added.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, EncodeError> {
        let ids = match self.inner.encode_fast(text, add_special) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(error) => Err(EncodeError { bytes: text.len(), what: error.to_string() }),
        };
        if text.len() >= LARGE_TEXT_BYTES {
            give_back_freed_memory();
        }
        ids
    }

    /// As [`encode`](Self::encode), for a context of that many tokens: a text that is too long for it is an error
    /// before it takes memory, see [`longest_text`](Self::longest_text).
    pub fn encode_for(&self, context: usize, text: &str, add_special: bool) -> Result<Vec<u32>, EncodeError> {
        let most = self.longest_text(context);
        if text.len() > most {
            let what = format!("the context of {context} tokens holds at most {most} bytes");
            return Err(EncodeError { bytes: text.len(), what });
        }
        self.encode(text, add_special)
    }

    /// Bytes of the longest text that is tokenised for a context of that many tokens: as many of the longest token of
    /// the vocabulary, of which 32 count. Longer tokens are runs of one character, and texts of only such
    /// are not worth the memory.
    pub fn longest_text(&self, context: usize) -> usize {
        context.saturating_mul(self.longest_token.clamp(1, TOKEN_BYTES))
    }

    /// The id of a token, by its spelling in the vocabulary.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The highest id plus one.
    pub fn vocab_size(&self) -> usize {
        let ids = self.inner.get_vocab(true);
        ids.values().max().map_or(0, |id| *id as usize + 1)
    }

    /// What `id` stands for within a text; at its beginning a decoder may strip a space.
    pub fn token_bytes(&self, id: u32) -> TokenBytes {
        match (self.token_text(id, true), self.token_text(id, false)) {
            (Some(token), _) => TokenBytes::Text(detokenizer_steps::bytes_within(&self.steps, token)),
            (None, Some(name)) => TokenBytes::Special(name),
            (None, None) => TokenBytes::Unknown,
        }
    }

    /// Bytes of the text that tokens stand for, the names of special ones included.
    pub fn text_bytes(&self, tokens: &[u32]) -> usize {
        let bytes = |id: &u32| match self.token_bytes(*id) {
            TokenBytes::Text(bytes) => bytes.len(),
            TokenBytes::Special(name) => name.len(),
            TokenBytes::Unknown => 0,
        };
        tokens.iter().map(bytes).sum()
    }

    /// The special tokens: names and ids.
    pub fn special_tokens(&self) -> impl Iterator<Item = (String, u32)> {
        let added = self.inner.get_added_tokens_decoder().into_iter();
        added.filter(|(_, token)| token.special).map(|(id, token)| (token.content, id))
    }

    /// The vocabulary's spelling of `id`; `None` for unknown ids, and for special tokens if they are skipped.
    pub(crate) fn token_text(&self, id: u32, skip_special: bool) -> Option<String> {
        let added = self.inner.get_added_vocabulary();
        let token = added.simple_id_to_token(id).or_else(|| self.inner.get_model().id_to_token(id))?;
        if skip_special && added.is_special_token(&token) { None } else { Some(token) }
    }

    #[cfg(test)]
    pub(crate) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }
}

/// Adds the config's tokens that `tokenizer.json` lacks or defines differently, in the order of transformers, because a
/// new token gets the next free id.
fn register(inner: &mut tokenizers::Tokenizer, config: &TokenizerConfig) -> tokenizers::Result<()> {
    let known = inner.get_added_tokens_decoder();
    let mut tokens: Vec<AddedToken> = config.added.iter().map(|(_, token)| token.clone()).collect();
    let mut seen: HashSet<&str> = known.values().map(|token| token.content.as_str()).collect();
    seen.extend(config.added.iter().map(|(_, token)| token.content.as_str()));
    let named = config.special.iter().map(|(_, text)| text).chain(&config.extra_special);
    for text in named {
        if seen.insert(text) {
            tokens.push(AddedToken::from(text.clone(), true));
        }
    }
    inner.add_tokens(tokens)?;
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A SentencePiece-like tokenizer with byte tokens and one special token.
    pub(crate) fn sentence_piece() -> Tokenizer {
        Tokenizer::from_bytes(&sentence_piece_json(), &TokenizerConfig::default()).unwrap()
    }

    fn sentence_piece_json() -> Vec<u8> {
        let vocab = ["<unk>", "<s>", "a", "b", "▁", "▁a", "é", "<0xC3>", "<0xA9>", "<0x61>", "ab", ".", "▁."];
        let vocab: serde_json::Map<String, Value> =
            vocab.iter().enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
        let json = json!({
            "version": "1.0", "truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0},
            "padding": null,
            "added_tokens": [{"id": 1, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": null,
            "post_processor": {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"},
                {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "BPE", "unk_token": "<unk>", "fuse_unk": true, "byte_fallback": true,
                      "vocab": vocab, "merges": ["▁ a", "▁ ."]}
        });
        serde_json::to_vec(&json).unwrap()
    }

    fn with_config(config: &str) -> Tokenizer {
        let config = TokenizerConfig::from_bytes(config.as_bytes()).unwrap();
        Tokenizer::from_bytes(&sentence_piece_json(), &config).unwrap()
    }

    #[test]
    fn special_tokens_are_added_on_request_and_nothing_is_truncated() {
        let tokenizer = sentence_piece();
        assert_eq!(tokenizer.encode("a a b", true).unwrap(), [1, 5, 5, 4, 3]);
        assert_eq!(tokenizer.encode("a a b", false).unwrap(), [5, 5, 4, 3]);
        assert_eq!(tokenizer.encode("", true).unwrap(), [1]);
        assert!(tokenizer.encode("", false).unwrap().is_empty());
        assert_eq!(tokenizer.decode(&[1, 5, 5, 4, 3], true), "a a b");
        assert_eq!(tokenizer.decode(&[], true), "");
        assert_eq!(tokenizer.vocab_size(), 13);
    }

    #[test]
    fn tokens_stand_for_bytes_or_nothing() {
        let tokenizer = sentence_piece();
        let bytes = |token: &str| tokenizer.token_bytes(tokenizer.id(token).unwrap());
        let text = |bytes: &[u8]| TokenBytes::Text(bytes.to_vec());
        assert_eq!([bytes("▁a"), bytes("<0xC3>"), bytes("é")], [text(b" a"), text(&[0xc3]), text("é".as_bytes())]);
        assert_eq!((bytes("<s>"), tokenizer.token_bytes(99)), (TokenBytes::Special("<s>".into()), TokenBytes::Unknown));
    }

    #[test]
    fn a_text_that_no_context_holds_is_not_tokenised() {
        let tokenizer = sentence_piece();
        // The longest tokens, such as <0xC3>, have six bytes.
        assert_eq!(tokenizer.longest_text(10), 60);
        assert_eq!(tokenizer.encode_for(10, &"a".repeat(60), false).unwrap().len(), 60);
        let error = tokenizer.encode_for(10, &"a".repeat(61), false).unwrap_err();
        assert!(error.to_string().contains("at most 60 bytes"), "{error}");
    }

    #[test]
    fn long_tokens_and_files_are_refused() {
        let refused = |json: &[u8]| Tokenizer::from_bytes(json, &TokenizerConfig::default()).unwrap_err().to_string();
        let mut json: Value = serde_json::from_slice(&sentence_piece_json()).unwrap();
        json["model"]["vocab"]["x".repeat(MAX_TOKEN_BYTES + 1)] = json!(13);
        assert!(refused(json.to_string().as_bytes()).contains("has a token of 4097 bytes"));
        assert!(refused(&vec![b' '; MAX_FILE_BYTES + 1]).contains("bytes long"));
    }

    #[test]
    fn the_configs_tokens_become_special() {
        let tokenizer = with_config(r#"{"eos_token": "ab", "pad_token": "<pad>", "extra_special_tokens": ["<x>"]}"#);
        assert_eq!((tokenizer.id("ab"), tokenizer.id("<pad>"), tokenizer.id("<x>")), (Some(10), Some(13), Some(14)));
        assert_eq!(tokenizer.decode(&[5, 10, 13, 14], true), "a");
        assert_eq!(sentence_piece().decode(&[5, 10], true), "aab");
    }

    #[test]
    fn the_configs_matching_rules_win() {
        let rules = r#"{"added_tokens_decoder": {"1": {"content": "<s>", "rstrip": true, "special": true}}}"#;
        assert_eq!(with_config(rules).encode("<s> a", false).unwrap(), [1, 5]);
        assert_eq!(sentence_piece().encode("<s> a", false).unwrap(), [1, 4, 5]);
    }

    #[test]
    fn bos_and_eos_switches_have_no_effect_beside_a_post_processor() {
        assert_eq!(
            with_config(r#"{"add_bos_token": false, "add_eos_token": true}"#).encode("a", true).unwrap(),
            [1, 5]
        );
    }

    #[test]
    fn special_tokens_can_be_read_as_text() {
        let split = with_config(r#"{"split_special_tokens": true}"#);
        assert!(!split.encode("<s>", false).unwrap().contains(&1));
    }

    #[test]
    fn cleaning_up_is_for_other_models_than_bpe_unless_forced() {
        assert_eq!(with_config(r#"{"clean_up_tokenization_spaces": true}"#).decode(&[5, 12], true), "a .");
        let forced = r#"{"clean_up_tokenization_spaces": true,
                         "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": true}"#;
        assert_eq!(with_config(forced).decode(&[5, 12], true), "a.");
    }

    #[test]
    fn broken_files_are_errors() {
        let whole = sentence_piece_json();
        let none = TokenizerConfig::default();
        for length in (0..whole.len()).step_by(7) {
            let error = Tokenizer::from_bytes(&whole[..length], &none).unwrap_err().to_string();
            assert!(error.starts_with("tokenizer.json: is not a valid tokenizer file: "), "{error}");
        }
        let error = Tokenizer::from_bytes(br#"{"version": "1.0", "model": {"type": "BPE", "merges": []}}"#, &none);
        assert!(error.unwrap_err().to_string().contains("missing field `vocab`"));
    }
}
