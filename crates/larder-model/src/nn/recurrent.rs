//! The recurrent state of one layer, with checkpoints to which it can be rewound.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use larder_core::Rng;

use super::kv_pool::StateBytes;
use super::{KvPool, made_up};
use crate::error::Result;
use crate::saved_state::{SavedState, SavedStateError, write_floats};

/// What a layer without attention carries from token to token. Clones share states until one of them advances.
#[derive(Clone)]
pub struct RecurrentState {
    pool: Arc<KvPool>,
    /// `None` before the first token.
    current: Option<Arc<Snapshot>>,
    /// Earlier states at multiples of [`CheckpointPolicy::every`](larder_core::CheckpointPolicy::every), ascending.
    checkpoints: Vec<Arc<Snapshot>>,
}

/// The state after some tokens.
struct Snapshot {
    /// Number of these tokens.
    tokens: usize,
    values: StateValues,
    bytes: StateBytes,
}

/// The values of a recurrent state, zeros before the first token.
#[derive(Clone, Default)]
pub struct StateValues {
    /// The last inputs of a causal convolution, oldest first: `[width - 1, channels]`.
    pub window: Vec<f32>,
    /// The state of a recurrence.
    pub recurrence: Vec<f32>,
}

/// Lengths of a state's parts.
#[derive(Clone, Copy)]
pub struct StateLens {
    /// Of the window.
    pub window: usize,
    /// Of the recurrence.
    pub recurrence: usize,
}

impl StateLens {
    /// Bytes of the state.
    pub fn bytes(self) -> usize {
        (self.window + self.recurrence) * size_of::<f32>()
    }

    fn zeros(self) -> StateValues {
        StateValues { window: vec![0.0; self.window], recurrence: vec![0.0; self.recurrence] }
    }
}

impl RecurrentState {
    /// No tokens yet, and no memory.
    pub fn new(pool: &Arc<KvPool>) -> Self {
        RecurrentState { pool: pool.clone(), current: None, checkpoints: Vec::new() }
    }

    /// Calls `step` with the state and a range of the next `tokens` tokens, one piece after the other. Pieces end where
    /// checkpoints are taken, so that they do not depend on how the tokens are divided into passes.
    pub fn advance(
        &mut self,
        tokens: usize,
        lens: StateLens,
        mut step: impl FnMut(&mut StateValues, Range<usize>),
    ) -> Result<()> {
        let policy = self.pool.checkpoints();
        let (start, mut done) = (self.tokens(), 0);
        while done < tokens {
            let due = policy.next(start + done) - start;
            let piece = done..tokens.min(due);
            let state = self.writable(lens)?;
            state.tokens += piece.len();
            done = piece.end;
            step(&mut state.values, piece);
            if done == due {
                self.checkpoint();
            }
        }
        Ok(())
    }

    /// A copy of the window, which is zeros before the first token.
    pub fn window(&self, lens: StateLens) -> Vec<f32> {
        self.current.as_ref().map_or_else(|| vec![0.0; lens.window], |current| current.values.window.clone())
    }

    /// The current values; `None` before the first token.
    pub fn values(&self) -> Option<&StateValues> {
        self.current.as_ref().map(|current| &current.values)
    }

    /// Takes in `tokens` tokens that were not computed: at each checkpoint and at the end the state has values of `rng`.
    pub fn fill(&mut self, tokens: usize, lens: StateLens, rng: &mut Rng) -> Result<()> {
        self.advance(tokens, lens, |values, _| {
            values.window = made_up(lens.window, rng);
            values.recurrence = made_up(lens.recurrence, rng);
        })
    }

    /// Writes the checkpoints and the state, as [`saved_state`](crate::saved_state) has them; nothing before the first token.
    pub fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        let Some(current) = &self.current else { return Ok(()) };
        let earlier = self.checkpoints.iter().filter(|checkpoint| checkpoint.tokens < current.tokens);
        let states: Vec<_> = earlier.chain([current]).collect();
        out.write_all(&(states.len() as u32).to_le_bytes())?;
        for state in states {
            out.write_all(&(state.tokens as u64).to_le_bytes())?;
            write_floats(&state.values.window, out)?;
            write_floats(&state.values.recurrence, out)?;
        }
        Ok(())
    }

    /// The state after `len` tokens that [`save`](Self::save) wrote. Of its checkpoints the latest are kept, as many as the
    /// policy has.
    pub(crate) fn load(
        pool: &Arc<KvPool>,
        lens: StateLens,
        len: usize,
        from: &mut SavedState,
    ) -> Result<Self, SavedStateError> {
        let (mut loaded, policy) = (RecurrentState::new(pool), pool.checkpoints());
        for _ in 0..from.u32()? {
            let tokens = from.u64()?;
            if tokens > len as u64 || tokens as usize <= loaded.tokens() {
                return Err(SavedStateError::Wrong("its recurrent states are not in order"));
            }
            from.require(lens.bytes())?;
            let bytes = pool.reserve(lens.bytes())?;
            let values = StateValues { window: from.floats(lens.window)?, recurrence: from.floats(lens.recurrence)? };
            loaded.current = Some(Arc::new(Snapshot { tokens: tokens as usize, values, bytes }));
            if tokens < len as u64 || policy.next(len - 1) == len {
                loaded.checkpoints.extend(loaded.current.clone());
            }
            if loaded.checkpoints.len() > policy.most {
                loaded.checkpoints.remove(0);
            }
        }
        match loaded.tokens() {
            tokens if tokens == len => Ok(loaded),
            _ => Err(SavedStateError::Wrong("it has no recurrent state after its last token")),
        }
    }

    /// Tokens that the state has taken in.
    fn tokens(&self) -> usize {
        self.current.as_ref().map_or(0, |current| current.tokens)
    }

    /// The current state, as one that nothing else has.
    fn writable(&mut self, lens: StateLens) -> Result<&mut Snapshot> {
        if self.current.as_mut().is_none_or(|current| Arc::get_mut(current).is_none()) {
            let bytes = self.pool.reserve(lens.bytes())?;
            let (tokens, values) = match &self.current {
                Some(shared) => (shared.tokens, shared.values.clone()),
                None => (0, lens.zeros()),
            };
            self.current = Some(Arc::new(Snapshot { tokens, values, bytes }));
        }
        let current = self.current.as_mut().and_then(Arc::get_mut);
        Ok(current.expect("the state was just made"))
    }

    /// Keeps the current state as a checkpoint. It is copied only if more tokens follow.
    fn checkpoint(&mut self) {
        self.checkpoints.extend(self.current.clone());
        let positions: Vec<usize> = self.checkpoints.iter().map(|checkpoint| checkpoint.tokens).collect();
        if let Some(superfluous) = self.pool.checkpoints().superfluous(&positions) {
            self.checkpoints.remove(superfluous);
        }
    }

    /// How many of the first `len` tokens can be kept: those before the newest state at or before `len`. A state without
    /// tokens, which belongs to a layer with another mixer, keeps all.
    pub fn keepable(&self, len: usize) -> usize {
        let Some(current) = &self.current else { return len };
        let states = self.checkpoints.iter().chain([current]);
        states.map(|state| state.tokens).filter(|tokens| *tokens <= len).max().unwrap_or(0)
    }

    /// Goes back to the state after `len` tokens, which the caller knows to be kept, or to none.
    pub fn truncate(&mut self, len: usize) {
        self.checkpoints.retain(|checkpoint| checkpoint.tokens <= len);
        if self.current.as_ref().is_some_and(|current| current.tokens > len) {
            self.current = self.checkpoints.last().filter(|last| last.tokens == len).cloned();
        }
    }

    /// Bytes of the state and its checkpoints, shared ones included.
    pub fn bytes(&self) -> usize {
        let newest = self.checkpoints.last();
        let extra = self.current.as_ref().filter(|current| newest.is_none_or(|newest| !Arc::ptr_eq(newest, current)));
        self.checkpoints.iter().chain(extra).map(|state| state.bytes.count()).sum()
    }
}

#[cfg(test)]
mod tests {
    use larder_core::CheckpointPolicy;

    use super::*;
    use crate::nn::KvFormat;

    const LENS: StateLens = StateLens { window: 1, recurrence: 2 };

    /// Takes in the next tokens: the state remembers their number and their sum.
    fn go(state: &mut RecurrentState, tokens: Range<usize>) {
        let step = |values: &mut StateValues, piece: Range<usize>| {
            for token in piece.map(|i| (tokens.start + i) as f32) {
                values.window[0] = token;
                values.recurrence[0] += 1.0;
                values.recurrence[1] += token;
            }
        };
        state.advance(tokens.len(), LENS, step).unwrap();
    }

    fn values(state: &RecurrentState) -> [f32; 3] {
        state.current.as_ref().map_or([0.0; 3], |current| {
            [current.values.window[0], current.values.recurrence[0], current.values.recurrence[1]]
        })
    }

    #[test]
    fn checkpoints_do_not_depend_on_pieces() {
        let pool = KvPool::new(KvFormat::F32, CheckpointPolicy { every: 5, most: 3 }, None, None);
        for piece in [1, 3, 5, 7, 23] {
            let mut state = RecurrentState::new(&pool);
            for start in (0..23).step_by(piece) {
                go(&mut state, start..(start + piece).min(23));
            }
            let at: Vec<usize> = state.checkpoints.iter().map(|checkpoint| checkpoint.tokens).collect();
            assert_eq!(at, [10, 15, 20]);
            assert_eq!((values(&state), state.bytes(), pool.usage().state_bytes), ([22.0, 23.0, 253.0], 48, 48));
            assert_eq!([23, 22, 19, 14, 4].map(|len| state.keepable(len)), [23, 20, 15, 10, 0]);
            state.truncate(15);
            assert_eq!((values(&state), state.bytes()), ([14.0, 15.0, 105.0], 24));
            let mut fork = state.clone();
            go(&mut fork, 15..16);
            assert_eq!((values(&state), values(&fork)), ([14.0, 15.0, 105.0], [15.0, 16.0, 120.0]));
            assert_eq!(pool.usage().state_bytes, 36);
            fork.truncate(0);
            assert_eq!((values(&fork), fork.bytes()), ([0.0; 3], 0));
        }
        assert_eq!(pool.usage().state_bytes, 0);
    }

    #[test]
    fn a_policy_without_checkpoints_keeps_none() {
        let pool = KvPool::new(KvFormat::F32, CheckpointPolicy { every: 5, most: 0 }, Some(12), None);
        let mut state = RecurrentState::new(&pool);
        go(&mut state, 0..23);
        assert_eq!((state.keepable(23), state.keepable(22), state.bytes()), (23, 0, 12));
        assert!(state.clone().advance(1, LENS, |_, _| ()).is_err(), "a second state does not fit");
    }
}
