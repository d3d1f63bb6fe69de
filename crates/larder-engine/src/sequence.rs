//! A sequence in progress: what has been read, what is remembered of it, and the logits that follow.

use larder_model::{Decoder, ExpertPath, ModelError, Rows, State, Tap};

use crate::times::{Timed, Times};

/// Tokens and what a decoder remembers of them. It holds on to neither the decoder nor the experts, so many sequences
/// can take turns on one of each; the caller guarantees that it is always the same decoder.
pub struct Sequence {
    state: State,
    tokens: Vec<u32>,
    context: usize,
    horizon: usize,
    planned: usize,
    rewound: bool,
    times: Times,
}

impl Sequence {
    /// An empty sequence that may grow to `context` tokens, or to what the model allows if that is less.
    pub fn new(decoder: &Decoder, context: usize) -> Self {
        let context = context.min(decoder.context());
        let (tokens, times) = Default::default();
        Sequence { state: decoder.new_state(context), tokens, context, horizon: 0, planned: 0, rewound: false, times }
    }

    /// The sequence will have `len` tokens in the end: where positions depend on that, they do from the start, however
    /// few are read at once.
    pub fn plan(&mut self, len: usize) {
        self.planned = len;
    }

    /// All tokens so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many tokens at the beginning need not be read again for `prompt`: those that both begin with, but never the
    /// last one of the prompt, which is read for its logits.
    pub fn shared_with(&self, prompt: &[u32]) -> usize {
        common(&self.tokens, prompt)
    }

    /// Tokens that still fit.
    pub fn room(&self) -> usize {
        self.context - self.tokens.len()
    }

    /// Where time went so far.
    pub fn times(&self) -> Times {
        self.times
    }

    /// Bytes that the sequence's memory holds.
    pub fn state_bytes(&self) -> usize {
        self.state.bytes()
    }

    /// Goes back to the first `len` tokens, or stays if there are no more. What is remembered of them is kept where a
    /// memory can be cut there; else they are read again with the next ones. Returns how many are still remembered.
    pub fn rewind(&mut self, decoder: &Decoder, len: usize) -> usize {
        if len >= self.tokens.len() {
            return self.state.len;
        }
        self.tokens.truncate(len);
        (self.planned, self.rewound) = (0, true);
        if !self.state.cut(len) {
            self.state = decoder.new_state(self.context);
        }
        self.state.len
    }

    /// Reads `tokens`, at most `chunk` at once, and returns the logits of every one or of the last one.
    ///
    /// However they are cut, the logits are those of one call. On an error nothing has been read.
    pub fn read(
        &mut self,
        decoder: &Decoder,
        experts: &mut dyn ExpertPath,
        tokens: &[u32],
        chunk: usize,
        rows: Rows,
        tap: &mut dyn Tap,
    ) -> Result<Vec<f32>, ModelError> {
        self.check_room(tokens.len())?;
        let before = self.tokens.len();
        let end = before + tokens.len();
        let horizon = end.max(self.planned);
        self.tokens.extend_from_slice(tokens);
        if self.state.len > 0 && !self.still_holds(decoder, horizon) {
            self.state = decoder.new_state(self.context);
        }
        (self.horizon, self.rewound) = (horizon, false);
        let mut logits = Vec::new();
        let mut pass = Pass { decoder, experts, chunk };
        // Usually nothing lies between the two; all tokens do once a longer sequence turns its positions differently.
        let result = self
            .advance(&mut pass, before, Rows::Last, &mut (), &mut Vec::new())
            .and_then(|()| self.advance(&mut pass, end, rows, tap, &mut logits));
        if let Err(error) = result {
            self.forget(decoder, before);
            return Err(error);
        }
        Ok(logits)
    }

    /// Whether what is remembered is that of a sequence of `horizon` tokens.
    fn still_holds(&self, decoder: &Decoder, horizon: usize) -> bool {
        match self.rewound {
            true => decoder.remembers_alike(self.horizon, horizon),
            false => decoder.keeps_memory(self.horizon, horizon),
        }
    }

    /// Reads on until `end`, appending logits.
    fn advance(
        &mut self,
        pass: &mut Pass,
        end: usize,
        rows: Rows,
        tap: &mut dyn Tap,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        while self.state.len < end {
            let part = &self.tokens[self.state.len..end.min(self.state.len.saturating_add(pass.chunk.max(1)))];
            let mut tap = Timed { times: &mut self.times, tap };
            let new = pass.decoder.forward(part, self.horizon, rows, &mut self.state, pass.experts, &mut tap)?;
            if rows == Rows::Last {
                logits.clear();
            }
            logits.extend_from_slice(&new);
        }
        Ok(())
    }

    /// Goes back to the first `len` tokens. Their memory is made again at the next read.
    fn forget(&mut self, decoder: &Decoder, len: usize) {
        self.tokens.truncate(len);
        self.state = decoder.new_state(self.context);
        self.horizon = len;
    }

    fn check_room(&self, more: usize) -> Result<(), ModelError> {
        if more <= self.room() {
            return Ok(());
        }
        let (len, context) = (self.tokens.len() + more, self.context);
        Err(ModelError::Request(format!("{len} tokens do not fit the context of {context}")))
    }
}

/// What a pass runs on.
struct Pass<'a> {
    decoder: &'a Decoder,
    experts: &'a mut dyn ExpertPath,
    chunk: usize,
}

fn common(held: &[u32], prompt: &[u32]) -> usize {
    let most = prompt.len().saturating_sub(1);
    held.iter().zip(&prompt[..most]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_token_of_a_prompt_is_always_read() {
        assert_eq!(common(&[], &[1]), 0);
        assert_eq!(common(&[1, 2], &[1, 2, 3]), 2);
        assert_eq!(common(&[1, 2, 3, 4], &[1, 2, 3]), 2);
        assert_eq!(common(&[1, 2], &[1, 2]), 1);
        assert_eq!(common(&[1, 2], &[1, 3, 4]), 1);
        assert_eq!(common(&[1, 2, 3], &[1, 2]), 1);
        assert_eq!(common(&[1, 2, 3], &[1, 9, 3]), 1);
        assert_eq!((common(&[1], &[]), common(&[1], &[1])), (0, 0));
    }
}
