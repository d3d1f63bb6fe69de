//! Whether the tokens of two tokenizers stand for the same text.

use super::{TokenBytes, Tokenizer};

impl Tokenizer {
    /// The first id that stands for other text in `other`, with both texts. Ids that only one of them has are no
    /// difference, nor are names of special tokens, because unused ones are renamed from one model of a family to the
    /// next.
    pub fn difference(&self, other: &Tokenizer) -> Option<(u32, String, String)> {
        let ids = 0..self.vocab_size().min(other.vocab_size()) as u32;
        ids.map(|id| (id, self.token_bytes(id), other.token_bytes(id))).find_map(|(id, ours, theirs)| {
            let is_same = match (&ours, &theirs) {
                (TokenBytes::Unknown, _) | (_, TokenBytes::Unknown) => true,
                (TokenBytes::Special(_), TokenBytes::Special(_)) => true,
                _ => bytes(&ours) == bytes(&theirs),
            };
            let text = |token| String::from_utf8_lossy(bytes(token)).into_owned();
            (!is_same).then(|| (id, text(&ours), text(&theirs)))
        })
    }
}

fn bytes(token: &TokenBytes) -> &[u8] {
    match token {
        TokenBytes::Text(bytes) => bytes,
        TokenBytes::Special(name) => name.as_bytes(),
        TokenBytes::Unknown => &[],
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::tokens::TokenizerConfig;

    /// A tokenizer with these tokens, of which the last is special.
    fn with(tokens: &[&str]) -> Tokenizer {
        let last = tokens.len() - 1;
        let vocab: serde_json::Map<String, Value> =
            tokens.iter().enumerate().map(|(id, token)| (token.to_string(), json!(id))).collect();
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null, "pre_tokenizer": null,
            "post_processor": null, "decoder": null,
            "added_tokens": [{"id": last, "content": tokens[last], "single_word": false, "lstrip": false, "rstrip": false,
                              "normalized": false, "special": true}],
            "model": {"type": "BPE", "vocab": vocab, "merges": []}
        });
        Tokenizer::from_bytes(&serde_json::to_vec(&json).unwrap(), &TokenizerConfig::default()).unwrap()
    }

    #[test]
    fn tokens_of_other_text_are_a_difference() {
        let one = with(&["a", "b", "c", "<end>"]);
        assert_eq!(one.difference(&one.clone()), None);
        assert_eq!(one.difference(&with(&["a", "b", "c", "<stop>"])), None, "a special token has another name");
        assert_eq!(one.difference(&with(&["a", "b", "<stop>"])), Some((2, "c".into(), "<stop>".into())));
        assert_eq!(one.difference(&with(&["a", "x", "c", "<end>"])), Some((1, "b".into(), "x".into())));
        assert_eq!(one.difference(&with(&["a", "b", "c", "<end>", "d", "<more>"])), None, "it is text in one");
        assert_eq!(
            with(&["a", "b", "<more>"]).difference(&with(&["a", "<stop>"])),
            Some((1, "b".into(), "<stop>".into()))
        );
    }
}
