use super::Trace;

/// What one forward pass asks of the cache in one row.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceStep<'a> {
    /// Which of the layers that have experts.
    pub row: usize,
    /// The experts wanted, each once, token by token in order of rank.
    pub wanted: Vec<usize>,
    /// The router's logits if the pass has one token and the trace knows them, otherwise empty.
    pub logits: &'a [f32],
    /// Whether a sequence begins here.
    pub starts_sequence: bool,
}

/// The steps of a trace, pass by pass and row by row.
pub struct Steps<'a> {
    trace: &'a Trace,
    pass: usize,
    row: usize,
    /// The pass's first token.
    token: usize,
    /// Sequences that have begun.
    sequence: usize,
    /// The first token of the next one.
    next_sequence: usize,
    /// The last step in which an expert was seen.
    seen: Vec<usize>,
    step: usize,
}

impl<'a> Steps<'a> {
    pub(super) fn new(trace: &'a Trace) -> Self {
        let seen = vec![0; trace.experts];
        Steps { trace, pass: 0, row: 0, token: 0, sequence: 0, next_sequence: 0, seen, step: 0 }
    }

    fn wanted(&mut self, tokens: usize) -> Vec<usize> {
        self.step += 1;
        let chosen = (self.token..self.token + tokens).flat_map(|token| self.trace.chosen(token, self.row));
        let (seen, step) = (&mut self.seen, self.step);
        chosen.map(|id| *id as usize).filter(|id| std::mem::replace(&mut seen[*id], step) != step).collect()
    }

    fn begins_sequence(&mut self) -> bool {
        let begins = self.row == 0 && self.token == self.next_sequence;
        if begins {
            self.next_sequence += self.trace.sequences[self.sequence] as usize;
            self.sequence += 1;
        }
        begins
    }
}

impl<'a> Iterator for Steps<'a> {
    type Item = TraceStep<'a>;

    fn next(&mut self) -> Option<TraceStep<'a>> {
        let tokens = *self.trace.passes.get(self.pass)? as usize;
        let starts_sequence = self.begins_sequence();
        let logits = if tokens == 1 { self.trace.logits_of(self.token, self.row) } else { &[] };
        let step = TraceStep { row: self.row, wanted: self.wanted(tokens), logits, starts_sequence };
        self.row += 1;
        if self.row == self.trace.rows {
            self.row = 0;
            self.pass += 1;
            self.token += tokens;
        }
        Some(step)
    }
}
