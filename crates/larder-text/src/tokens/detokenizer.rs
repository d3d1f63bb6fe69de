//! Token ids to text, one at a time.

use crate::tokens::{detokenizer_steps::DetokenizerStep, tokenizer::Tokenizer};

impl Tokenizer {
    /// The text of `ids`. Ids outside the vocabulary add nothing.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut detokenizer = self.detokenizer(skip_special);
        let mut text: String = ids.iter().map(|id| detokenizer.push(*id)).collect();
        text.push_str(&detokenizer.finish());
        text
    }

    /// A detokenizer, which decodes one id at a time.
    pub fn detokenizer(&self, skip_special: bool) -> Detokenizer<'_> {
        Detokenizer { tokenizer: self, steps: self.steps.clone(), skip_special, shown: &[] }
    }
}

/// Turns token ids into text one at a time.
///
/// The concatenated pieces equal the text of decoding all ids at once. A piece never ends within a character: an
/// incomplete one is held back until the next id or the end. The work per id does not grow with the text.
#[derive(Clone, Debug)]
pub struct Detokenizer<'a> {
    tokenizer: &'a Tokenizer,
    steps: Vec<DetokenizerStep>,
    skip_special: bool,
    /// Special tokens that are not skipped.
    shown: &'a [u32],
}

impl<'a> Detokenizer<'a> {
    /// Leaves these special tokens in the text.
    pub fn showing(self, shown: &'a [u32]) -> Self {
        Detokenizer { shown, ..self }
    }

    /// The text that `id` completes, often empty. Ids outside the vocabulary add nothing.
    pub fn push(&mut self, id: u32) -> String {
        let skip_special = self.skip_special && !self.shown.contains(&id);
        let Some(token) = self.tokenizer.token_text(id, skip_special) else {
            return String::new();
        };
        let mut tokens = vec![token];
        for step in &mut self.steps {
            tokens = through(step, tokens);
        }
        tokens.concat()
    }

    /// Ends the text and returns the part that was held back. An incomplete character becomes U+FFFD.
    pub fn finish(mut self) -> String {
        let mut tokens = Vec::new();
        for step in &mut self.steps {
            tokens = through(step, tokens);
            step.finish(&mut tokens);
        }
        tokens.concat()
    }
}

fn through(step: &mut DetokenizerStep, tokens: Vec<String>) -> Vec<String> {
    let mut out = Vec::with_capacity(tokens.len());
    tokens.into_iter().for_each(|token| step.push(token, &mut out));
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::tokens::tokenizer::{Tokenizer, tests::sentence_piece};

    fn pieces(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> Vec<String> {
        let mut stream = tokenizer.detokenizer(skip_special);
        let mut pieces: Vec<String> = ids.iter().map(|id| stream.push(*id)).collect();
        pieces.push(stream.finish());
        pieces
    }

    #[test]
    fn incomplete_characters_are_held_back_and_the_first_space_is_stripped() {
        let tokenizer = sentence_piece();
        let id = |token: &str| tokenizer.id(token).unwrap();
        let ids = [id("<s>"), id("▁a"), id("<0xC3>"), id("<0xA9>"), id("▁a"), id("<0xC3>")];
        assert_eq!(pieces(&tokenizer, &ids, true), ["", "a", "", "", "é a", "", "\u{fffd}"]);
        assert_eq!(pieces(&tokenizer, &ids[..2], false), ["<s>", " a", ""]);
        assert_eq!(pieces(&tokenizer, &[9999, id("a")], true), ["", "a", ""]);
    }

    proptest! {
        #[test]
        fn pieces_equal_the_text_that_the_crate_decodes(ids in prop::collection::vec(0u32..14, 0..20), skip in any::<bool>()) {
            let tokenizer = sentence_piece();
            prop_assert_eq!(pieces(&tokenizer, &ids, skip).concat(), tokenizer.inner().decode(&ids, skip).unwrap());
        }
    }
}
