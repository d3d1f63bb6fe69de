//! Routing traces: the experts that each token chose, recorded, synthesised or imported, and replayed in the lab.

mod error;
pub(crate) mod expert_activations;
mod file;
mod steps;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ops::Range;

use half::f16;

pub use error::TraceError;
pub use steps::{Steps, TraceStep};

/// Marks an empty place among a token's experts, as a lossy routing strategy leaves it.
pub const UNUSED: u16 = u16::MAX;

/// The key of a trace's metadata for the gates of its rows, as JSON.
pub const GATES_KEY: &str = "gates";

/// Largest number of experts of a trace, over all rows; it bounds the tables that are allocated for one.
pub const EXPERTS_MAX: usize = 1 << 20;

/// The experts that each token chose in each MoE layer.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Trace {
    /// Number of MoE layers.
    pub rows: usize,
    /// Experts per MoE layer.
    pub experts: usize,
    /// Places for a token's experts per MoE layer.
    pub top_k: usize,
    /// `[tokens, rows, top_k]`, in order of rank; [`UNUSED`] where fewer were chosen, after all others.
    pub ids: Vec<u16>,
    /// `[tokens, rows, top_k]`, or empty.
    pub weights: Vec<f16>,
    /// Router logits `[tokens, rows, experts]`, or empty.
    pub logits: Vec<f32>,
    /// Sequence and phase of each token.
    pub origins: Vec<TraceToken>,
    /// Tokens of each forward pass (step); a prompt that is prefilled in one step is one entry. A step may hold tokens
    /// of several sequences.
    pub passes: Vec<u32>,
    /// Tokens of each stretch after which the eviction policies were told that something new begins: of each sequence,
    /// or of several sequences that were generated together. Each starts with a new pass.
    pub sequences: Vec<u32>,
    /// Changes of the number of slots while it was recorded, in order; empty if the number was fixed.
    pub capacities: Vec<CapacityAt>,
    /// Free text about the origin: model, command, seed.
    pub meta: BTreeMap<String, String>,
}

/// A number of slots that a cache had from a pass of a trace on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CapacityAt {
    /// Index of the first pass, or the number of passes if none followed.
    pub pass: u32,
    /// Slots in use of each pool: per layer or, in global scope, in total.
    pub slots: u32,
    /// Whether it changed before the eviction policies were told that something new begins with this pass.
    pub before_sequence: bool,
}

/// Where a token of a trace comes from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TraceToken {
    /// Number of its sequence within the trace.
    pub sequence: u32,
    /// Whether the model generated it; else it is part of a prompt.
    pub decode: bool,
}

/// The routing of one forward pass, to be added to a trace.
#[derive(Clone, Copy, Debug, Default)]
pub struct TracePass<'a> {
    /// Chosen experts `[tokens, rows, top_k]`.
    pub ids: &'a [u16],
    /// Weights `[tokens, rows, top_k]`, or empty in every pass of a trace.
    pub weights: &'a [f16],
    /// Router logits `[tokens, rows, experts]`, or empty in every pass of a trace.
    pub logits: &'a [f32],
    /// Sequence and phase of each token. Empty for a pass of one sequence, the only one since the last start; then a
    /// pass of one token counts as generated.
    pub origins: &'a [TraceToken],
    /// Whether it starts a new sequence.
    pub starts_sequence: bool,
}

impl Trace {
    /// An empty trace.
    pub fn new(rows: usize, experts: usize, top_k: usize) -> Self {
        Trace { rows, experts, top_k, ..Trace::default() }
    }

    /// Number of tokens.
    pub fn tokens(&self) -> usize {
        self.ids.len() / (self.rows * self.top_k).max(1)
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The experts of one token in one row, in order of rank, without empty places.
    pub fn chosen(&self, token: usize, row: usize) -> &[u16] {
        let at = (token * self.rows + row) * self.top_k;
        let all = &self.ids[at..at + self.top_k];
        &all[..all.iter().position(|id| *id == UNUSED).unwrap_or(all.len())]
    }

    /// The logits of one token in one row; empty if there are none.
    pub fn logits_of(&self, token: usize, row: usize) -> &[f32] {
        if self.logits.is_empty() {
            return &[];
        }
        let at = (token * self.rows + row) * self.experts;
        &self.logits[at..at + self.experts]
    }

    /// The range of tokens of each sequence.
    pub fn sequence_ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        self.sequences.iter().scan(0, |end, len| {
            let start = *end;
            *end += *len as usize;
            Some(start..*end)
        })
    }

    /// The experts that the cache has to provide: pass by pass, row by row.
    pub fn steps(&self) -> Steps<'_> {
        Steps::new(self)
    }

    /// Adds a forward pass. The first pass of a trace always starts a sequence.
    pub fn push(&mut self, pass: &TracePass) -> Result<(), TraceError> {
        let tokens = self.fit(pass)?;
        self.ids.extend_from_slice(pass.ids);
        self.weights.extend_from_slice(pass.weights);
        self.logits.extend_from_slice(pass.logits);
        self.passes.push(tokens);
        match self.sequences.last_mut() {
            Some(last) if !pass.starts_sequence => *last += tokens,
            _ => self.sequences.push(tokens),
        }
        match pass.origins {
            [] => {
                let only = TraceToken { sequence: self.sequences.len() as u32 - 1, decode: tokens == 1 };
                self.origins.resize(self.origins.len() + tokens as usize, only);
            }
            origins => self.origins.extend_from_slice(origins),
        }
        Ok(())
    }

    /// Number of tokens of a pass, or an error if it does not fit the trace.
    fn fit(&self, pass: &TracePass) -> Result<u32, TraceError> {
        let place = (self.rows * self.top_k).max(1);
        let tokens = pass.ids.len() / place;
        let misfit = |what| Err(TraceError::Misfit { what, tokens, rows: self.rows, experts: self.experts });
        let first = self.is_empty();
        if tokens == 0 || !pass.ids.len().is_multiple_of(place) {
            return misfit("a number of experts that is not a multiple of those per token");
        }
        let weights = if first { !pass.weights.is_empty() } else { !self.weights.is_empty() };
        if pass.weights.len() != if weights { pass.ids.len() } else { 0 } {
            return misfit("weights for some of its experts only");
        }
        let logits = if first { !pass.logits.is_empty() } else { !self.logits.is_empty() };
        if !pass.origins.is_empty() && pass.origins.len() != tokens {
            return misfit("origins for some of its tokens only");
        }
        if pass.logits.len() != if logits { tokens * self.rows * self.experts } else { 0 } {
            return misfit("logits for some of its experts only");
        }
        u32::try_from(self.tokens() + tokens).map_err(|_| TraceError::TooLong)?;
        Ok(tokens as u32)
    }

    /// Adds the sequences of another trace of the same geometry. Weights and logits are kept only if both have them.
    pub fn append(&mut self, other: &Trace) -> Result<(), TraceError> {
        let (shape, other_shape) = ([self.rows, self.experts, self.top_k], [other.rows, other.experts, other.top_k]);
        if shape != other_shape {
            return Err(TraceError::Geometry { first: shape, second: other_shape });
        }
        u32::try_from(self.tokens() + other.tokens()).map_err(|_| TraceError::TooLong)?;
        let first = self.is_empty();
        join(&mut self.weights, &other.weights, first);
        join(&mut self.logits, &other.logits, first);
        let passes = self.passes.len() as u32;
        // What changed after the last pass came before what begins now.
        self.capacities.iter_mut().filter(|c| c.pass == passes).for_each(|c| c.before_sequence = true);
        self.capacities.extend(other.capacities.iter().map(|c| CapacityAt { pass: passes + c.pass, ..*c }));
        let first = self.origins.iter().map(|o| o.sequence + 1).max().unwrap_or(0);
        self.origins.extend(other.origins.iter().map(|o| TraceToken { sequence: o.sequence + first, ..*o }));
        self.ids.extend_from_slice(&other.ids);
        self.passes.extend_from_slice(&other.passes);
        self.sequences.extend_from_slice(&other.sequences);
        Ok(())
    }

    /// A trace of a range of the sequences. The caller guarantees that they exist.
    pub fn select(&self, sequences: Range<usize>) -> Trace {
        let ranges: Vec<Range<usize>> = self.sequence_ranges().collect();
        let tokens = match &ranges[sequences.clone()] {
            [] => 0..0,
            some => some[0].start..some[some.len() - 1].end,
        };
        let cut = |per_token: usize| tokens.start * per_token..tokens.end * per_token;
        let ends: Vec<usize> = self.passes.iter().scan(0, |at, n| Some((*at += *n as usize, *at).1)).collect();
        let passes = [tokens.start, tokens.end].map(|token| ends.partition_point(|end| *end <= token));
        Trace {
            ids: self.ids[cut(self.rows * self.top_k)].to_vec(),
            weights: self.weights.get(cut(self.rows * self.top_k)).unwrap_or_default().to_vec(),
            logits: self.logits.get(cut(self.rows * self.experts)).unwrap_or_default().to_vec(),
            origins: renumbered(&self.origins[tokens.clone()]),
            passes: self.passes[passes[0]..passes[1]].to_vec(),
            capacities: self.capacities_of(passes[0] as u32..passes[1] as u32),
            sequences: self.sequences[sequences].to_vec(),
            meta: self.meta.clone(),
            ..*self
        }
    }

    /// The changes of the number of slots within a range of passes, and first the number at its beginning, counted from
    /// there. Those behind the last pass of the trace are within a range that ends there.
    fn capacities_of(&self, passes: Range<u32>) -> Vec<CapacityAt> {
        let last = self.passes.len() as u32;
        let before = self.capacities.iter().rfind(|c| c.pass < passes.start);
        let before = before.map(|c| CapacityAt { pass: 0, before_sequence: true, ..*c });
        let is_within = |pass: u32| passes.contains(&pass) || pass == last && passes.end == last;
        let within = self.capacities.iter().filter(|c| is_within(c.pass));
        before.into_iter().chain(within.map(|c| CapacityAt { pass: c.pass - passes.start, ..*c })).collect()
    }

    /// Checks that its parts fit together; the error says which do not.
    pub fn check(&self) -> Result<(), TraceError> {
        let wrong = |what: String| Err(TraceError::Content(what));
        if self.is_empty() {
            return wrong("holds no tokens".into());
        }
        if self.rows.checked_mul(self.experts).is_none_or(|n| n == 0 || n > EXPERTS_MAX) {
            return wrong(format!(
                "has {} layers of {} experts; larder supports up to {EXPERTS_MAX} experts in all layers together",
                self.rows, self.experts
            ));
        }
        if self.top_k == 0 || self.top_k > self.experts || self.experts >= UNUSED as usize {
            return wrong(format!("has {} experts per token, of {} experts", self.top_k, self.experts));
        }
        let tokens = self.tokens();
        let places = tokens * self.rows * self.top_k;
        let sizes = [
            ("experts", self.ids.len(), places),
            ("origins", self.origins.len(), tokens),
            ("weights", self.weights.len(), if self.weights.is_empty() { 0 } else { places }),
            ("logits", self.logits.len(), if self.logits.is_empty() { 0 } else { tokens * self.rows * self.experts }),
        ];
        if let Some((name, got, want)) = sizes.into_iter().find(|(_, got, want)| got != want) {
            return wrong(format!("has {got} values in '{name}', where {tokens} tokens need {want}"));
        }
        self.check_lengths()?;
        self.check_capacities()?;
        self.check_ids()?;
        match self.logits.iter().position(|l| !l.is_finite()) {
            Some(at) => wrong(format!("has a logit at token {} that is not finite", at / (self.rows * self.experts))),
            None => Ok(()),
        }
    }

    fn check_lengths(&self) -> Result<(), TraceError> {
        for (name, lengths) in [("passes", &self.passes), ("sequences", &self.sequences)] {
            let sum: u64 = lengths.iter().map(|n| u64::from(*n)).sum();
            if lengths.contains(&0) || sum != self.tokens() as u64 {
                let tokens = self.tokens();
                return Err(TraceError::Content(format!("has '{name}' that do not add up to its {tokens} tokens")));
            }
        }
        let ends = |lengths: &[u32]| -> Vec<u64> {
            let mut at = 0;
            lengths.iter().map(|n| (at += u64::from(*n), at).1).collect()
        };
        let passes = ends(&self.passes);
        match ends(&self.sequences).iter().find(|end| passes.binary_search(end).is_err()) {
            Some(end) => {
                Err(TraceError::Content(format!("has a pass that crosses the end of a sequence at token {end}")))
            }
            None => Ok(()),
        }
    }

    fn check_capacities(&self) -> Result<(), TraceError> {
        let most = (self.rows * self.experts) as u32;
        let (mut before, last) = ((0, false), self.passes.len() as u32);
        for CapacityAt { pass, slots, before_sequence } in &self.capacities {
            let place = (*pass, !before_sequence);
            if place < before || *pass > last || !(1..=most).contains(slots) {
                return Err(TraceError::Content(format!("has a capacity of {slots} slots at pass {pass} of {last}")));
            }
            before = place;
        }
        Ok(())
    }

    fn check_ids(&self) -> Result<(), TraceError> {
        let mut seen = vec![usize::MAX; self.experts];
        for (at, all) in self.ids.chunks_exact(self.top_k).enumerate() {
            let wrong = |what: String| {
                let (token, row) = (at / self.rows, at % self.rows);
                Err(TraceError::Content(format!("has {what} at token {token}, layer {row}")))
            };
            let chosen = all.iter().position(|id| *id == UNUSED).unwrap_or(all.len());
            if chosen == 0 || all[chosen..].iter().any(|id| *id != UNUSED) {
                return wrong("a gap among the chosen experts".into());
            }
            for id in &all[..chosen] {
                match seen.get_mut(*id as usize) {
                    None => return wrong(format!("expert {id} of {}", self.experts)),
                    Some(last) if *last == at => return wrong(format!("expert {id} twice")),
                    Some(last) => *last = at,
                }
            }
        }
        Ok(())
    }
}

/// The same origins, with sequences numbered in the order in which they begin.
fn renumbered(origins: &[TraceToken]) -> Vec<TraceToken> {
    let mut numbers = BTreeMap::new();
    let number = |origin: &TraceToken| {
        let next = numbers.len() as u32;
        TraceToken { sequence: *numbers.entry(origin.sequence).or_insert(next), ..*origin }
    };
    origins.iter().map(number).collect()
}

/// Appends `more`, or clears `all` if only one of the two has values.
fn join<T: Copy>(all: &mut Vec<T>, more: &[T], first: bool) {
    if first || (!all.is_empty() && !more.is_empty()) { all.extend_from_slice(more) } else { all.clear() }
}
