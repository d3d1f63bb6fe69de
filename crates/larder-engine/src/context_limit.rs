//! The limit of a context, and the sentence for a prompt beyond it.

use larder_core::{format_bytes, format_count};

/// The context of each sequence, and what larger ones would take.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct ContextLimit {
    /// Tokens of a sequence, prompt and answer together.
    pub tokens: usize,
    /// Larger contexts, ascending up to the model's own, with the bytes of memory that each takes more than this one.
    pub larger: Vec<(usize, u64)>,
}

impl ContextLimit {
    /// Says of a prompt with `tokens` tokens that it is too long, and what to do. `subject` is how the sentence begins.
    pub fn too_long(&self, subject: &str, tokens: usize) -> String {
        format!("{subject} has {} tokens, {}", format_count(tokens), self.remedy(tokens))
    }

    /// The same of a text that was not tokenised, because it has more bytes than the context holds. No token has more
    /// than `token_bytes`.
    pub fn text_too_long(&self, subject: &str, bytes: usize, token_bytes: usize) -> String {
        let least = bytes.div_ceil(token_bytes.max(1));
        let (bytes, tokens) = (format_count(bytes), format_count(least));
        format!("{subject} has {bytes} bytes, at least {tokens} tokens, {}", self.remedy(least))
    }

    fn remedy(&self, tokens: usize) -> String {
        let context = format_count(self.tokens);
        match (self.enough_for(tokens), self.larger.last()) {
            (Some((larger, bytes)), _) => format!(
                "the context is {context}: restart with --context {larger} (takes {} more)",
                format_bytes(*bytes)
            ),
            (None, Some((most, _))) => {
                format!("the context is {context}, and the model's own {}: shorten it", format_count(*most))
            }
            (None, None) => format!("the model's own context is {context}: shorten it"),
        }
    }

    /// The smallest context with room for twice as many tokens, so that a conversation can go on, or else the model's
    /// own.
    fn enough_for(&self, tokens: usize) -> Option<&(usize, u64)> {
        let roomy = self.larger.iter().find(|(context, _)| *context / 2 >= tokens);
        roomy.or(self.larger.last().filter(|(most, _)| *most > tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_names_a_context_with_room_or_says_that_there_is_none() {
        let larger = vec![(8192, 1 << 20), (16_384, 3 << 20), (32_768, 7 << 20), (40_000, 9 << 20)];
        let limit = ContextLimit { tokens: 4096, larger };
        let said = |tokens| limit.too_long("The prompt", tokens);
        assert_eq!(
            said(4096),
            "The prompt has 4,096 tokens, the context is 4,096: restart with --context 8192 (takes 1.05 MB more)"
        );
        assert!(said(4097).contains("--context 16384 (takes 3.15 MB more)"), "{}", said(4097));
        assert!(said(39_999).contains("--context 40000 (takes 9.44 MB more)"), "{}", said(39_999));
        assert!(said(40_000).ends_with("the context is 4,096, and the model's own 40,000: shorten it"));
        let own = ContextLimit { tokens: 512, larger: vec![] };
        assert_eq!(own.too_long("It", 512), "It has 512 tokens, the model's own context is 512: shorten it");
        let text = limit.text_too_long("The prompt", 1_000_000, 32);
        assert!(text.starts_with("The prompt has 1,000,000 bytes, at least 31,250 tokens, the context is"), "{text}");
    }
}
