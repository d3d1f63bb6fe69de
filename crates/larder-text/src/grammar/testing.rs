//! What tests of grammars share: a tokenizer of bytes, and texts drawn by a grammar.

use serde_json::{Value, json};

use super::{Grammar, GrammarCompiler};
use crate::tokens::{Tokenizer, TokenizerConfig};
use larder_core::Xoshiro256;

/// The token that ends a text.
pub const EOS: u32 = 0;

/// A tokenizer of all bytes, some longer tokens and `words`, a token that ends a text, and further `special` tokens.
pub fn byte_tokenizer(words: &[&str], special: &[&str]) -> Tokenizer {
    let mut vocab: Vec<String> = vec!["<end>".into()];
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    let mut next = 0x100;
    for byte in 0..=255u8 {
        let code = if printable(byte) { u32::from(byte) } else { next };
        next += u32::from(!printable(byte));
        vocab.push(char::from_u32(code).unwrap().into());
    }
    vocab.extend(["{\"", "\":", "true", "fal", "null", "},", "name", "abc", "Ġ\"", "[]"].map(String::from));
    vocab.extend(words.iter().map(|word| word.replace(' ', "Ġ").replace('\n', "Ċ")));
    let first_special = vocab.len();
    vocab.extend(special.iter().map(|name| name.to_string()));
    let ids: serde_json::Map<String, Value> = vocab.iter().enumerate().map(|(i, w)| (w.clone(), json!(i))).collect();
    let token = |(id, content): (usize, &String)| {
        json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
               "normalized": false, "special": true})
    };
    let all = vocab.iter().enumerate();
    let added: Vec<Value> = all.filter(|(id, _)| *id == EOS as usize || *id >= first_special).map(token).collect();
    let json = json!({
        "version": "1.0", "normalizer": null, "post_processor": null, "padding": null, "truncation": null,
        "added_tokens": added,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": ids, "merges": []}
    });
    Tokenizer::from_bytes(json.to_string().as_bytes(), &TokenizerConfig::default()).unwrap()
}

/// A compiler whose model has more logits than tokens.
pub fn compiler(tokenizer: &Tokenizer) -> GrammarCompiler {
    GrammarCompiler::new(tokenizer, tokenizer.vocab_size() + 3, &[EOS]).unwrap()
}

/// A text of random tokens that the grammar allows, special ones included; `None` if it has not ended after `most`
/// tokens.
pub fn random_text(tokenizer: &Tokenizer, mut grammar: Grammar, rng: &mut Xoshiro256, most: usize) -> Option<String> {
    let (mut ids, known) = (Vec::new(), tokenizer.vocab_size());
    for _ in 0..most {
        if grammar.is_complete() {
            return Some(tokenizer.decode(&ids, false));
        }
        let mut logits = vec![0.0; known + 3];
        let id = match grammar.mask(&mut logits).unwrap() {
            Some(forced) => forced,
            None => {
                let allowed: Vec<u32> = (0..logits.len() as u32).filter(|id| logits[*id as usize] == 0.0).collect();
                assert!(allowed.len() > 1 && allowed.iter().all(|id| (*id as usize) < known));
                // Ends early where it can, and prefers long tokens, so that most texts end.
                let is_long = |id: &&u32| tokenizer.decode(&[**id], false).len() > 2;
                let long: Vec<u32> = allowed.iter().filter(is_long).copied().collect();
                let allowed = if !long.is_empty() && rng.unit() < 0.5 { long } else { allowed };
                let end = allowed.contains(&EOS) && rng.unit() < 0.3;
                if end { EOS } else { allowed[(rng.unit() * allowed.len() as f64) as usize] }
            }
        };
        if id == EOS {
            return Some(tokenizer.decode(&ids, false));
        }
        grammar.accept(id).unwrap();
        ids.push(id);
    }
    None
}
