//! The recurrent state of one layer, with checkpoints to which it can be rewound.

use std::io::{self, Write};
use std::sync::Arc;

use larder_core::{NumberFormat, Rng};
use larder_kernels::{narrow, widen};

use super::pool::KvPage;
use super::{KeptPositions, KvPool, StateLens, made_up};
use crate::error::Result;
use crate::kv::{SavedState, SavedStateError};
use crate::ops::StateSpan;

/// What a layer without attention carries from token to token. Clones share states until one of them advances.
#[derive(Clone)]
pub struct RecurrentState {
    pool: Arc<KvPool>,
    /// `None` before the first token.
    current: Option<Arc<Snapshot>>,
    /// Earlier states, ascending.
    checkpoints: Vec<Arc<Snapshot>>,
}

/// The state after some tokens.
struct Snapshot {
    /// Number of these tokens.
    tokens: usize,
    /// The window, then the recurrence.
    page: KvPage,
}

impl RecurrentState {
    /// No tokens yet, and no memory.
    pub fn new(pool: &Arc<KvPool>) -> Self {
        RecurrentState { pool: pool.clone(), current: None, checkpoints: Vec::new() }
    }

    /// The page of the state, and those of its checkpoints, for the next `tokens` tokens, which an operation takes in
    /// from row `first_row` on. A checkpoint for which there is no memory is left out.
    pub(crate) fn extend(
        &mut self,
        tokens: usize,
        lens: StateLens,
        first_row: usize,
        kept: &KeptPositions,
    ) -> Result<StateSpan> {
        let start = self.tokens();
        let end = start + tokens;
        self.keep_only(kept);
        let page = self.writable(lens, end)?;
        let mut copies = Vec::new();
        for at in kept.within(start, end) {
            if at == end {
                self.checkpoints.extend(self.current.clone());
                continue;
            }
            let Ok(copy) = self.pool.page(lens.page_shape(), self.pool.state_place()) else { continue };
            copies.push((at - start, copy.id()));
            self.checkpoints.push(Arc::new(Snapshot { tokens: at, page: copy }));
        }
        Ok(StateSpan { page, recurrence_at: lens.window, first_row, tokens, copies })
    }

    /// Gives the checkpoints back that are not kept.
    pub fn keep_only(&mut self, kept: &KeptPositions) {
        self.checkpoints.retain(|checkpoint| kept.contains(checkpoint.tokens));
    }

    /// A copy of the recurrence, which is zeros before the first token. Waits for a device that has it.
    pub fn recurrence(&self, lens: StateLens) -> Result<Vec<f32>> {
        let zeros = || Ok(vec![0.0; lens.recurrence]);
        self.current.as_ref().map_or_else(zeros, |current| Ok(current.values()?.split_off(lens.window)))
    }

    /// Takes in `tokens` tokens that were not computed: at each checkpoint and at the end the state has values of
    /// `rng`.
    pub fn fill(&mut self, tokens: usize, lens: StateLens, rng: &mut Rng, kept: &KeptPositions) -> Result<()> {
        let span = self.extend(tokens, lens, 0, kept)?;
        for page in span.copies.iter().map(|(_, page)| *page).chain([span.page]) {
            let values = made_up(lens.window + lens.recurrence, rng);
            self.pool.pages(self.pool.state_place()).append(page, 0, &bytes_of(&values))?;
        }
        Ok(())
    }

    /// Writes the checkpoints and the state, as [`saved_state`](super::saved_state) has them; nothing before the first
    /// token.
    pub fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        let Some(current) = &self.current else { return Ok(()) };
        let earlier = self.checkpoints.iter().filter(|checkpoint| checkpoint.tokens < current.tokens);
        let states: Vec<_> = earlier.chain([current]).collect();
        out.write_all(&(states.len() as u32).to_le_bytes())?;
        for state in states {
            out.write_all(&(state.tokens as u64).to_le_bytes())?;
            let mut bytes = vec![0; state.page.bytes()];
            state.page.read(&mut bytes).map_err(io::Error::other)?;
            out.write_all(&bytes)?;
        }
        Ok(())
    }

    /// The state after `len` tokens that [`save`](Self::save) wrote, with the checkpoints that are kept.
    pub(crate) fn load(
        pool: &Arc<KvPool>,
        lens: StateLens,
        len: usize,
        kept: &KeptPositions,
        from: &mut SavedState,
    ) -> Result<Self, SavedStateError> {
        let mut loaded = RecurrentState::new(pool);
        for _ in 0..from.u32()? {
            let tokens = from.u64()?;
            if tokens > len as u64 || tokens as usize <= loaded.tokens() {
                return Err(SavedStateError::Wrong("its recurrent states are not in order"));
            }
            from.require(lens.bytes())?;
            let page = pool.page(lens.page_shape(), pool.state_place())?;
            page.write(0, &bytes_of(&from.floats(lens.window + lens.recurrence)?))?;
            loaded.current = Some(Arc::new(Snapshot { tokens: tokens as usize, page }));
            if kept.contains(tokens as usize) {
                loaded.checkpoints.extend(loaded.current.clone());
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

    /// The page of the current state, as one that nothing else has, which becomes that after `tokens` tokens.
    fn writable(&mut self, lens: StateLens, tokens: usize) -> Result<usize> {
        if self.current.as_mut().is_none_or(|current| Arc::get_mut(current).is_none()) {
            let page = self.pool.page(lens.page_shape(), self.pool.state_place())?;
            match &self.current {
                None => page.write(0, &vec![0; lens.bytes()])?,
                Some(shared) => page.copy_from(&shared.page, 1)?,
            }
            self.current = Some(Arc::new(Snapshot { tokens, page }));
        }
        let own = self.current.as_mut().and_then(Arc::get_mut).expect("the state was just made");
        own.tokens = tokens;
        Ok(own.page.id())
    }

    /// How many of the first `len` tokens can be kept: those before the newest state at or before `len`. A state
    /// without tokens, which belongs to a layer with another mixer, keeps all.
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
        self.checkpoints.iter().chain(extra).map(|state| state.page.bytes()).sum()
    }
}

impl Snapshot {
    /// A copy of the window and the recurrence. Waits for a device that has them.
    fn values(&self) -> Result<Vec<f32>> {
        let mut bytes = vec![0; self.page.bytes()];
        self.page.read(&mut bytes)?;
        let mut values = vec![0.0; bytes.len() / size_of::<f32>()];
        widen(NumberFormat::F32, &bytes, &mut values);
        Ok(values)
    }
}

fn bytes_of(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; size_of_val(values)];
    narrow(NumberFormat::F32, values, &mut bytes);
    bytes
}

#[cfg(test)]
impl RecurrentState {
    /// Takes in tokens: `step` changes the state by each.
    pub(super) fn take_in(
        &mut self,
        tokens: usize,
        lens: StateLens,
        kept: &KeptPositions,
        mut step: impl FnMut(&mut [f32], usize),
    ) {
        let span = self.extend(tokens, lens, 3, kept).unwrap();
        assert_eq!((span.recurrence_at, span.first_row, span.tokens), (lens.window, 3, tokens));
        let memory = self.pool.pages(self.pool.state_place());
        let (mut bytes, mut values) = (vec![0; lens.bytes()], vec![0.0; lens.window + lens.recurrence]);
        memory.read(span.page, &mut bytes).unwrap();
        widen(NumberFormat::F32, &bytes, &mut values);
        for token in 0..tokens {
            step(&mut values, token);
            let copies = span.copies.iter().filter(|(after, _)| *after == token + 1);
            copies.for_each(|(_, page)| memory.append(*page, 0, &bytes_of(&values)).unwrap());
        }
        memory.append(span.page, 0, &bytes_of(&values)).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use larder_core::CheckpointPolicy;

    use super::*;
    use crate::device::DeviceAttention;
    use crate::fake::FakeAttention;
    use crate::kv::{Checkpoints, KvFormat};

    const LENS: StateLens = StateLens { window: 1, recurrence: 2 };

    /// Takes in the next tokens: the state remembers their number and their sum.
    fn go(state: &mut RecurrentState, checkpoints: &mut Checkpoints, tokens: Range<usize>) {
        checkpoints.advance(tokens.start, tokens.end);
        state.take_in(tokens.len(), LENS, checkpoints.kept(), |values, i| {
            let token = (tokens.start + i) as f32;
            values.copy_from_slice(&[token, values[1] + 1.0, values[2] + token]);
        });
    }

    fn values(state: &RecurrentState) -> Vec<f32> {
        state.current.as_ref().map_or_else(|| vec![0.0; 3], |current| current.values().unwrap())
    }

    #[test]
    fn checkpoints_do_not_depend_on_pieces() {
        let device = || Some(Arc::new(FakeAttention::new(1 << 20)) as Arc<dyn DeviceAttention>);
        for (chunk, device) in [1, 3, 5, 7, 23].into_iter().flat_map(|chunk| [(chunk, None), (chunk, device())]) {
            let policy = CheckpointPolicy { every: 5, most: 3, pins: 0 };
            let pool = KvPool::new(KvFormat::F32, policy, None, (Arc::default(), device));
            let (mut state, mut kept) = (RecurrentState::new(&pool), Checkpoints::new(policy));
            for start in (0..23).step_by(chunk) {
                go(&mut state, &mut kept, start..(start + chunk).min(23));
            }
            let at: Vec<usize> = state.checkpoints.iter().map(|checkpoint| checkpoint.tokens).collect();
            assert_eq!(at, [10, 15, 20]);
            assert_eq!((values(&state), state.bytes(), pool.usage().state_bytes), (vec![22.0, 23.0, 253.0], 48, 48));
            assert_eq!([23, 22, 19, 14, 4].map(|len| state.keepable(len)), [23, 20, 15, 10, 0]);
            state.truncate(15);
            kept.truncate(15);
            assert_eq!((values(&state), state.bytes()), (vec![14.0, 15.0, 105.0], 24));
            let mut fork = state.clone();
            go(&mut fork, &mut kept, 15..16);
            assert_eq!((values(&state), values(&fork)), (vec![14.0, 15.0, 105.0], vec![15.0, 16.0, 120.0]));
            assert_eq!(pool.usage().state_bytes, 36);
            fork.truncate(0);
            assert_eq!((values(&fork), fork.bytes()), (vec![0.0; 3], 0));
            state.truncate(10);
            assert_eq!(values(&state), [9.0, 10.0, 45.0], "the checkpoint was not written to");
            drop((state, fork));
            assert_eq!(pool.usage().state_bytes, 0);
        }
    }

    #[test]
    fn a_policy_without_checkpoints_keeps_none() {
        let policy = CheckpointPolicy { every: 5, most: 0, pins: 0 };
        let pool = KvPool::new(KvFormat::F32, policy, Some(12), Default::default());
        let mut state = RecurrentState::new(&pool);
        go(&mut state, &mut Checkpoints::new(policy), 0..23);
        assert_eq!((state.keepable(23), state.keepable(22), state.bytes()), (23, 0, 12));
        assert!(state.clone().extend(1, LENS, 0, &KeptPositions::default()).is_err(), "a second state does not fit");
    }
}
