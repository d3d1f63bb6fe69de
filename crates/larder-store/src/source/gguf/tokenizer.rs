//! Builds the tokenizer files of the hub from the vocabulary in a GGUF file's metadata.

use std::collections::{HashMap, HashSet};

use serde_json::{Map, Value, json};

use super::{metadata::Metadata, pretokenizer::PreTokenizer};
use crate::error::{Result, StoreError, StoreErrorKind};

/// GGUF's numbers of token types.
mod kind {
    pub const NORMAL: i64 = 1;
    pub const UNKNOWN: i64 = 2;
    pub const CONTROL: i64 = 3;
    pub const USER_DEFINED: i64 = 4;
}

/// The key of the tokenizer model.
const MODEL: &str = "tokenizer.ggml.model";

/// The tokenizer model of Gemma 4.
const GEMMA4: &str = "gemma4";

/// Tokens that end a turn, by tokenizer model or pre-tokenizer; files name at most one of them as an end.
const TURN_ENDS: [(&str, [&str; 2]); 3] = [
    (GEMMA4, ["<turn|>", "<|tool_response>"]),
    ("kimi-k2", ["<|im_end|>", "[EOT]"]),
    ("solar-open", ["<|flush|>", "<|calls|>"]),
];

/// The character by which SentencePiece replaces a space.
const SPACE: &str = "\u{2581}";

/// A vocabulary whose tokens are unique and whose types were checked for their number.
struct Vocabulary<'a> {
    metadata: &'a Metadata,
    tokens: &'a [String],
    ids: HashMap<&'a str, usize>,
    kinds: Option<&'a [i64]>,
}

/// `tokenizer.json`.
pub(super) fn tokenizer(metadata: &Metadata) -> Result<Value> {
    let vocabulary = Vocabulary::of(metadata)?;
    let model = model(metadata)?;
    let bos_eos = vocabulary.bos_eos(&model)?.json();
    match model {
        TokenizerModel::Bytes(pre_tokenizer) => vocabulary.byte_level(pre_tokenizer, bos_eos),
        TokenizerModel::Pieces => vocabulary.pieces(bos_eos),
    }
}

/// `tokenizer_config.json`.
pub(super) fn tokenizer_config(metadata: &Metadata) -> Result<Value> {
    let vocabulary = Vocabulary::of(metadata)?;
    let bos_eos = vocabulary.bos_eos(&model(metadata)?)?;
    let named = |what: &str| Ok::<_, StoreError>(vocabulary.named(what)?.map(|(_, token)| token));
    let mut config = json!({
        "add_bos_token": bos_eos.bos.is_some(),
        "add_eos_token": bos_eos.eos.is_some(),
        "bos_token": named("bos")?,
        "eos_token": named("eos")?,
        "pad_token": named("padding")?,
        "unk_token": named("unknown")?,
        "clean_up_tokenization_spaces": false,
        "tokenizer_class": "PreTrainedTokenizerFast",
    });
    if let Some(template) = metadata.text("tokenizer.chat_template")? {
        config["chat_template"] = template.into();
    }
    Ok(config)
}

/// `generation_config.json`.
pub(super) fn generation_config(metadata: &Metadata) -> Result<Value> {
    let id = |what: &str| metadata.uint(&format!("tokenizer.ggml.{what}_token_id"));
    // Ends of a turn (eot) and of a message (eom) end a generation, like the end of text.
    let mut ends: Vec<u64> = [id("eos")?, id("eot")?, id("eom")?].into_iter().flatten().collect();
    ends.extend(Vocabulary::of(metadata)?.turn_ends()?.into_iter().map(|id| id as u64));
    let mut seen = HashSet::new();
    ends.retain(|id| seen.insert(*id));
    let mut config = Map::new();
    config.extend(id("bos")?.map(|id| ("bos_token_id".to_owned(), id.into())));
    match ends.as_slice() {
        [] => {}
        [one] => drop(config.insert("eos_token_id".into(), (*one).into())),
        more => drop(config.insert("eos_token_id".into(), more.into())),
    }
    config.extend(id("padding")?.map(|id| ("pad_token_id".to_owned(), id.into())));
    for (name, key) in [("temperature", "temp"), ("top_p", "top_p"), ("min_p", "min_p")] {
        config.extend(metadata.float(&format!("general.sampling.{key}"))?.map(|v| (name.to_owned(), v.into())));
    }
    config.extend(metadata.uint("general.sampling.top_k")?.map(|k| ("top_k".to_owned(), k.into())));
    Ok(Value::Object(config))
}

enum TokenizerModel {
    /// Byte-level BPE within words.
    Bytes(&'static PreTokenizer),
    /// SentencePiece: pairs of pieces are merged by score, over the whole text.
    Pieces,
}

fn model(metadata: &Metadata) -> Result<TokenizerModel> {
    let unsupported = |what: String| Err(StoreError::new(StoreErrorKind::Unsupported, metadata.path(), what));
    let model = metadata.need(MODEL, metadata.text(MODEL)?)?;
    match model {
        // Gemma 4 says by which merges pieces join; like the others it merges over the whole text.
        "llama" | GEMMA4 => Ok(TokenizerModel::Pieces),
        "gpt2" => {
            let pre = metadata.text("tokenizer.ggml.pre")?.unwrap_or("default");
            match PreTokenizer::named(pre) {
                Some(pre_tokenizer) => Ok(TokenizerModel::Bytes(pre_tokenizer)),
                None => {
                    unsupported(format!("uses the pre-tokenizer '{pre}' (tokenizer.ggml.pre), which is not supported"))
                }
            }
        }
        other => {
            unsupported(format!("has the tokenizer model '{other}'; 'gpt2', 'llama' and '{GEMMA4}' are supported"))
        }
    }
}

impl<'a> Vocabulary<'a> {
    fn of(metadata: &'a Metadata) -> Result<Self> {
        let tokens = metadata.need("tokenizer.ggml.tokens", metadata.texts("tokenizer.ggml.tokens")?)?;
        let kinds = metadata.ints("tokenizer.ggml.token_type")?;
        if let Some(kinds) = kinds.filter(|kinds| kinds.len() != tokens.len()) {
            let what = format!("has {} tokens, but {} token types", tokens.len(), kinds.len());
            return Err(StoreError::new(StoreErrorKind::Mismatch, metadata.path(), what));
        }
        let mut ids = HashMap::with_capacity(tokens.len());
        for (id, token) in tokens.iter().enumerate() {
            if let Some(first) = ids.insert(token.as_str(), id) {
                let what = format!("has the token {token:?} twice, with ids {first} and {id}");
                return Err(StoreError::malformed(metadata.path(), what));
            }
        }
        Ok(Vocabulary { metadata, tokens, ids, kinds })
    }

    /// The special token of a role, such as `bos`, with its id.
    fn named(&self, what: &str) -> Result<Option<(usize, &'a str)>> {
        let key = format!("tokenizer.ggml.{what}_token_id");
        let Some(id) = self.metadata.uint(&key)? else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| Some((id, self.tokens.get(id)?.as_str())));
        token.map(Some).ok_or_else(|| {
            let what = format!("names token {id} as '{key}', but has only {} tokens", self.tokens.len());
            StoreError::new(StoreErrorKind::Mismatch, self.metadata.path(), what)
        })
    }

    /// The tokens that are added before and after every text.
    fn bos_eos(&self, model: &TokenizerModel) -> Result<BosEos<'a>> {
        let usual = match model {
            TokenizerModel::Bytes(pre_tokenizer) => pre_tokenizer.adds_bos,
            TokenizerModel::Pieces => true,
        };
        let begin = self.metadata.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(usual);
        let end = self.metadata.flag("tokenizer.ggml.add_eos_token")?.unwrap_or(false);
        let named = |wanted: bool, part| if wanted { self.named(part) } else { Ok(None) };
        Ok(BosEos { bos: named(begin, "bos")?, eos: named(end, "eos")? })
    }

    fn kind(&self, id: usize) -> i64 {
        self.kinds.map_or(kind::NORMAL, |kinds| kinds[id])
    }

    /// The tokens of [`TURN_ENDS`] for this tokenizer. Files may have them as plain tokens.
    fn turn_ends(&self) -> Result<Vec<usize>> {
        let kinds = [self.metadata.text(MODEL)?, self.metadata.text("tokenizer.ggml.pre")?];
        let known = TURN_ENDS.iter().filter(|(kind, _)| kinds.contains(&Some(kind)));
        Ok(known.flat_map(|(_, ends)| ends).filter_map(|token| self.ids.get(token).copied()).collect())
    }

    /// Tokens that are recognised in a text before it is split into words.
    fn added_tokens(&self) -> Result<Vec<Value>> {
        let parts = ["bos", "eos", "padding"].map(|part| self.named(part));
        let mut special = self.turn_ends()?;
        for part in parts {
            special.extend(part?.map(|(id, _)| id));
        }
        let added = |id: usize, special: bool| {
            json!({
                "id": id, "content": self.tokens[id], "single_word": false, "lstrip": false, "rstrip": false,
                "normalized": false, "special": special,
            })
        };
        Ok((0..self.tokens.len())
            .filter_map(|id| match self.kind(id) {
                kind::CONTROL | kind::UNKNOWN => Some(added(id, true)),
                _ if special.contains(&id) => Some(added(id, true)),
                kind::USER_DEFINED => Some(added(id, false)),
                _ => None,
            })
            .collect())
    }

    /// Every token with its id, including added tokens, so that they keep their ids.
    fn vocab(&self) -> Map<String, Value> {
        self.tokens.iter().enumerate().map(|(id, token)| (token.clone(), id.into())).collect()
    }

    fn byte_level(&self, pre_tokenizer: &PreTokenizer, bos_eos: Option<Value>) -> Result<Value> {
        let merges = self.metadata.need("tokenizer.ggml.merges", self.written_merges()?)?;
        let plain = json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": false, "use_regex": true });
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens()?,
            "normalizer": if pre_tokenizer.nfc { json!({ "type": "NFC" }) } else { Value::Null },
            "pre_tokenizer": pre_tokenizer.json(),
            "post_processor": bos_eos.unwrap_or(plain),
            "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
                "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
                "ignore_merges": pre_tokenizer.ignore_merges, "vocab": self.vocab(), "merges": merges,
            },
        }))
    }

    fn pieces(&self, bos_eos: Option<Value>) -> Result<Value> {
        if self.metadata.flag("tokenizer.ggml.remove_extra_whitespaces")?.unwrap_or(false) {
            let what = "has a tokenizer that removes extra spaces, which is not supported";
            return Err(StoreError::new(StoreErrorKind::Unsupported, self.metadata.path(), what));
        }
        let merges = match self.written_merges()? {
            Some(written) => written,
            None => self.merges_by_score()?,
        };
        let usual = self.metadata.text(MODEL)? != Some(GEMMA4);
        let prefix = self.metadata.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(usual);
        let mut normalizers = vec![json!({ "type": "Replace", "pattern": { "String": " " }, "content": SPACE })];
        let mut decoders = vec![
            json!({ "type": "Replace", "pattern": { "String": SPACE }, "content": " " }),
            json!({ "type": "ByteFallback" }),
            json!({ "type": "Fuse" }),
        ];
        if prefix {
            normalizers.insert(0, json!({ "type": "Prepend", "prepend": SPACE }));
            decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": self.added_tokens()?,
            "normalizer": { "type": "Sequence", "normalizers": normalizers },
            "pre_tokenizer": null,
            "post_processor": bos_eos,
            "decoder": { "type": "Sequence", "decoders": decoders },
            "model": {
                "type": "BPE", "dropout": null, "unk_token": self.named("unknown")?.map(|(_, token)| token),
                "continuing_subword_prefix": null, "end_of_word_suffix": null, "fuse_unk": true,
                "byte_fallback": true, "ignore_merges": false, "vocab": self.vocab(), "merges": merges,
            },
        }))
    }

    /// The merges that the file lists, best first; each is two tokens with a space between.
    fn written_merges(&self) -> Result<Option<Vec<Value>>> {
        let key = "tokenizer.ggml.merges";
        let Some(written) = self.metadata.texts(key)? else { return Ok(None) };
        let pair = |merge: &String| {
            let (left, right) = merge
                .split_once(' ')
                .filter(|(left, right)| self.ids.contains_key(left) && self.ids.contains_key(right))?;
            Some(json!([left, right]))
        };
        let pairs = written.iter().map(|merge| {
            pair(merge).ok_or_else(|| {
                let what = format!("has the merge {merge:?} in '{key}', which is not a pair of its tokens");
                StoreError::new(StoreErrorKind::Mismatch, self.metadata.path(), what)
            })
        });
        pairs.collect::<Result<_>>().map(Some)
    }

    /// All pairs of tokens that join to a token, ordered by the score of that token, as SentencePiece merges them.
    fn merges_by_score(&self) -> Result<Vec<Value>> {
        let key = "tokenizer.ggml.scores";
        let scores = self.metadata.need(key, self.metadata.floats(key)?)?;
        if scores.len() != self.tokens.len() {
            let what = format!("has {} tokens, but {} scores", self.tokens.len(), scores.len());
            return Err(StoreError::new(StoreErrorKind::Mismatch, self.metadata.path(), what));
        }
        let mut order: Vec<usize> = (0..self.tokens.len()).filter(|id| self.kind(*id) == kind::NORMAL).collect();
        order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
        let known = |part: &str| self.ids.get(part).copied().filter(|id| self.kind(*id) == kind::NORMAL);
        let mut merges = Vec::new();
        for id in order {
            let token = self.tokens[id].as_str();
            let splits = token.char_indices().skip(1).map(|(at, _)| token.split_at(at));
            let mut pairs: Vec<_> = splits.filter_map(|(l, r)| Some(((known(l)?, known(r)?), (l, r)))).collect();
            pairs.sort_unstable();
            merges.extend(pairs.into_iter().map(|(_, (left, right))| json!([left, right])));
        }
        Ok(merges)
    }
}

/// The tokens added to every text, with their ids.
struct BosEos<'a> {
    bos: Option<(usize, &'a str)>,
    eos: Option<(usize, &'a str)>,
}

impl BosEos<'_> {
    /// The `post_processor` of a `tokenizer.json`; `None` if no token is added.
    fn json(&self) -> Option<Value> {
        let special = |mark: Option<(usize, &str)>, of: u8| {
            mark.map(|(_, token)| json!({ "SpecialToken": { "id": token, "type_id": of } }))
        };
        let around = |name: &str, of: u8| {
            let text = json!({ "Sequence": { "id": name, "type_id": of } });
            special(self.bos, of).into_iter().chain([text]).chain(special(self.eos, of))
        };
        let tokens: Map<String, Value> = [self.bos, self.eos]
            .into_iter()
            .flatten()
            .map(|(id, token)| (token.to_owned(), json!({ "id": token, "ids": [id], "tokens": [token] })))
            .collect();
        (!tokens.is_empty()).then(|| {
            json!({
                "type": "TemplateProcessing",
                "single": around("A", 0).collect::<Vec<_>>(),
                "pair": around("A", 0).chain(around("B", 1)).collect::<Vec<_>>(),
                "special_tokens": tokens,
            })
        })
    }
}
