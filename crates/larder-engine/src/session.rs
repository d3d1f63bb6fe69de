//! A sequence in progress: what has been read, what is remembered of it, and the logits that follow.

use larder_model::{Decoder, ExpertPath, ModelError, Rows, State, Tap};

use crate::times::{Timed, Times};

/// How many tokens of a prompt are read at once unless said otherwise.
pub const CHUNK: usize = 256;

/// A sequence being read and written.
pub struct Session<'m, P> {
    decoder: &'m Decoder,
    experts: &'m mut P,
    state: State,
    tokens: Vec<u32>,
    context: usize,
    horizon: usize,
    planned: usize,
    times: Times,
}

impl<'m, P: ExpertPath> Session<'m, P> {
    /// An empty sequence that may grow to `context` tokens, or to what the model allows if that is less.
    pub fn new(decoder: &'m Decoder, experts: &'m mut P, context: usize) -> Self {
        let context = context.min(decoder.context());
        let state = decoder.new_state(context);
        Session {
            decoder,
            experts,
            state,
            tokens: Vec::new(),
            context,
            horizon: 0,
            planned: 0,
            times: Times::default(),
        }
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

    /// Where the experts come from.
    pub fn experts(&self) -> &P {
        self.experts
    }

    /// The same, to be changed.
    pub fn experts_mut(&mut self) -> &mut P {
        self.experts
    }

    /// The model's resident part.
    pub fn decoder(&self) -> &'m Decoder {
        self.decoder
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

    /// Goes back to the first `len` tokens, or stays if there are no more. Returns of how many the memory is kept; that
    /// of the others is made again at the next read.
    pub fn rewind(&mut self, len: usize) -> usize {
        if len < self.tokens.len() {
            self.forget(len);
        }
        self.state.len
    }

    /// Reads `tokens`, at most `chunk` at once, and returns the logits of every one or of the last one.
    ///
    /// However they are cut, the logits are those of one call. On an error nothing has been read.
    pub fn read(
        &mut self,
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
        let mut logits = Vec::new();
        if before > 0 && !self.decoder.keeps_memory(self.horizon, horizon) {
            self.state = self.decoder.new_state(self.context);
        }
        self.horizon = horizon;
        // Usually nothing lies between the two; all tokens do once a longer sequence turns its positions differently.
        let result = self
            .advance(before, chunk, Rows::Last, &mut (), &mut Vec::new())
            .and_then(|()| self.advance(end, chunk, rows, tap, &mut logits));
        if let Err(error) = result {
            self.forget(before);
            return Err(error);
        }
        Ok(logits)
    }

    /// Reads on until `end`, appending logits.
    fn advance(
        &mut self,
        end: usize,
        chunk: usize,
        rows: Rows,
        tap: &mut dyn Tap,
        logits: &mut Vec<f32>,
    ) -> Result<(), ModelError> {
        while self.state.len < end {
            let part = &self.tokens[self.state.len..end.min(self.state.len + chunk.max(1))];
            let mut tap = Timed { times: &mut self.times, tap };
            let new = self.decoder.forward(part, self.horizon, rows, &mut self.state, self.experts, &mut tap)?;
            if rows == Rows::Last {
                logits.clear();
            }
            logits.extend_from_slice(&new);
        }
        Ok(())
    }

    /// Goes back to the first `len` tokens. Their memory is made again at the next read.
    fn forget(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.state = self.decoder.new_state(self.context);
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
