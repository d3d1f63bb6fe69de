//! Log-probabilities of generated tokens, and of those of a prompt that is echoed.

use larder_text::Tokenizer;

use crate::queue::job::{SampledToken, TextDelta, TokenLogprob};

/// Prompt tokens of a step whose logits are all needed: 20 MB of them with a vocabulary of 150,000.
pub const ECHOED_TOKENS: usize = 32;

/// A token with its log-probability, and those of the `top` likeliest, by the logits that it was chosen from.
pub fn sampled_token(tokenizer: &Tokenizer, id: u32, logits: &[f32], top: usize) -> SampledToken {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - most).exp()).sum();
    let token_logprob = |id: u32| TokenLogprob {
        text: tokenizer.decode(&[id], false),
        // JSON has no infinity.
        logprob: (f64::from(logits[id as usize] - most) - sum.ln()).max(-9999.0),
    };
    let mut ids: Vec<u32> = (0..logits.len() as u32).collect();
    let order = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
    let top = top.min(ids.len());
    if top > 0 && top < ids.len() {
        ids.select_nth_unstable_by(top - 1, order);
    }
    ids.truncate(top);
    ids.sort_unstable_by(order);
    SampledToken { sampled: token_logprob(id), top: ids.into_iter().map(token_logprob).collect() }
}

/// A prompt that is part of its answer.
pub struct PromptEcho {
    text: String,
    prompt: Vec<u32>,
    /// Number of likeliest tokens to report with each token; `None` for no log-probabilities.
    top: Option<usize>,
    /// Tokens of the prompt so far; the first has no log-probability.
    tokens: Vec<SampledToken>,
}

impl PromptEcho {
    /// An echo of `prompt`, whose text is `text`.
    pub fn new(text: String, prompt: Vec<u32>, top: Option<usize>) -> Self {
        PromptEcho { text, prompt, top, tokens: Vec::new() }
    }

    /// Whether it needs the logits of all tokens of the prompt.
    pub fn needs_logits(&self) -> bool {
        self.top.is_some()
    }

    /// Takes the logits of the tokens from `first` on, a row for each.
    pub fn computed(&mut self, tokenizer: &Tokenizer, first: usize, rows: &[f32], vocab: usize) {
        let Some(top) = self.top else { return };
        if first == 0 {
            // No token precedes the first one.
            let text = self.prompt.first().map(|id| tokenizer.decode(&[*id], false)).unwrap_or_default();
            self.tokens = vec![SampledToken { sampled: TokenLogprob { text, logprob: f64::NAN }, top: vec![] }];
        }
        // Tokens are computed again after a failed step.
        self.tokens.truncate(first + 1);
        let next = self.prompt.iter().skip(first + 1);
        self.tokens.extend(next.zip(rows.chunks(vocab)).map(|(id, row)| sampled_token(tokenizer, *id, row, top)));
    }

    /// The prompt as the beginning of the answer.
    pub fn delta(self) -> TextDelta {
        TextDelta { text: self.text, tokens: self.tokens, context_tokens: self.prompt.len() }
    }
}
