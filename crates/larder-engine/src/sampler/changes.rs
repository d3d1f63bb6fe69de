//! Tokens whose logits are changed: those with a bias, and those that occurred in a text.

use larder_core::FIRST_IMAGE_ID;
use larder_model::{ChangedLogit, LogitChanges};

/// Collects the tokens whose logits change behind a text.
#[derive(Clone, Default, Debug)]
pub struct ChangedTokens {
    /// By id of a token of the text: one more than its place among those that were collected; 0 if it has none.
    places: Vec<u32>,
}

impl ChangedTokens {
    /// The tokens with a `bias`, which are in the order of ids, and behind them those of a text, in the order in which
    /// they first occur in it. The text has these parts; its first `prompt` tokens are not part of the answer.
    pub fn collect(
        &mut self,
        changes: &LogitChanges,
        text: &[&[u32]],
        prompt: usize,
        bias: &[(u32, f32)],
    ) -> Vec<ChangedLogit> {
        let biased = |(id, bias): &(u32, f32)| ChangedLogit { id: *id, bias: *bias, ..ChangedLogit::default() };
        let mut tokens: Vec<ChangedLogit> = bias.iter().map(biased).collect();
        // Tokens of the prompt count for the repetition penalty alone.
        let first = if changes.of_text() { 0 } else { prompt };
        let text = text.iter().copied().flatten().copied().enumerate().skip(first);
        let [of_text, of_answer] = [changes.of_text(), changes.of_answer()];
        // Tokens of images are none that can be drawn.
        for (at, id) in text.filter(|(_, id)| (of_text || of_answer) && *id < FIRST_IMAGE_ID) {
            self.places.resize(self.places.len().max(id as usize + 1), 0);
            let place = &mut self.places[id as usize];
            if *place == 0 {
                let biased = tokens[..bias.len()].binary_search_by_key(&id, |token| token.id);
                *place = 1 + biased.unwrap_or(tokens.len()) as u32;
                if biased.is_err() {
                    tokens.push(ChangedLogit { id, ..ChangedLogit::default() });
                }
            }
            let token = &mut tokens[*place as usize - 1];
            token.in_text = u32::from(of_text);
            token.in_answer += u32::from(of_answer && at >= prompt);
        }
        let known = tokens.iter().map(|token| token.id as usize);
        known.for_each(|id| self.places.get_mut(id).into_iter().for_each(|place| *place = 0));
        tokens
    }
}
