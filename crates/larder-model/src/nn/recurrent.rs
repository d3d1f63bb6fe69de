//! The recurrent state of one layer, with checkpoints to which it can be rewound. It is where it was advanced last: in main memory, or
//! on a device.

use std::io::{self, Write};
use std::ops::Range;
use std::sync::Arc;

use larder_core::{NumberFormat, Rng};
use larder_kernels::{narrow, widen};

use super::kv_pool::{KvPage, StateBytes};
use super::{KvPool, made_up};
use crate::device::{KvPageShape, StateSpan};
use crate::error::Result;
use crate::hidden::Place;
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
    memory: StateMemory,
}

/// Where a state is.
enum StateMemory {
    /// In main memory.
    Host { values: StateValues, bytes: StateBytes },
    /// In a page on the device of the pool: the window, then the recurrence.
    Device(KvPage),
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

    /// The shape of a page with a state.
    fn page_shape(self) -> KvPageShape {
        KvPageShape { kind: NumberFormat::F32, heads: 1, positions: 1, row_bytes: self.bytes() }
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
            done = piece.end;
            step(self.writable(lens, start + done)?, piece);
            if done == due {
                self.checkpoint(self.current.clone());
            }
        }
        Ok(())
    }

    /// The page of the state, and those of its checkpoints, for the next `tokens` tokens, which a chain on the device of the pool takes
    /// in from row `first_row` on.
    pub(crate) fn extend(&mut self, tokens: usize, lens: StateLens, first_row: usize) -> Result<StateSpan> {
        let (policy, start) = (self.pool.checkpoints(), self.tokens());
        let page = self.writable_on_device(lens, start + tokens)?;
        let mut copies = Vec::new();
        let mut due = policy.next(start);
        while due < start + tokens {
            let copy = self.pool.page(lens.page_shape(), Place::Device)?;
            copies.push((due - start, copy.device_id()));
            self.checkpoint(Some(Arc::new(Snapshot { tokens: due, memory: StateMemory::Device(copy) })));
            due = policy.next(due);
        }
        if due == start + tokens {
            self.checkpoint(self.current.clone());
        }
        // Of several checkpoints some may have been dropped again.
        copies.retain(|(taken_in, _)| self.checkpoints.iter().any(|kept| kept.tokens == start + taken_in));
        Ok(StateSpan { page, recurrence_at: lens.window, first_row, tokens, copies })
    }

    /// A copy of the window, which is zeros before the first token.
    pub fn window(&self, lens: StateLens) -> Result<Vec<f32>> {
        self.current.as_ref().map_or_else(|| Ok(vec![0.0; lens.window]), |current| Ok(current.values(lens)?.window))
    }

    /// A copy of the recurrence, which is zeros before the first token. Waits for a device that has it.
    pub fn recurrence(&self, lens: StateLens) -> Result<Vec<f32>> {
        let zeros = || Ok(vec![0.0; lens.recurrence]);
        self.current.as_ref().map_or_else(zeros, |current| Ok(current.values(lens)?.recurrence))
    }

    /// Takes in `tokens` tokens that were not computed: at each checkpoint and at the end the state has values of `rng`.
    pub fn fill(&mut self, tokens: usize, lens: StateLens, rng: &mut Rng) -> Result<()> {
        self.advance(tokens, lens, |values, _| {
            values.window = made_up(lens.window, rng);
            values.recurrence = made_up(lens.recurrence, rng);
        })
    }

    /// Writes the checkpoints and the state, as [`saved_state`](crate::saved_state) has them; nothing before the first token. The caller
    /// guarantees states in main memory.
    pub fn save(&self, out: &mut dyn Write) -> io::Result<()> {
        let Some(current) = &self.current else { return Ok(()) };
        let earlier = self.checkpoints.iter().filter(|checkpoint| checkpoint.tokens < current.tokens);
        let states: Vec<_> = earlier.chain([current]).collect();
        out.write_all(&(states.len() as u32).to_le_bytes())?;
        for state in states {
            out.write_all(&(state.tokens as u64).to_le_bytes())?;
            write_floats(&state.on_host().window, out)?;
            write_floats(&state.on_host().recurrence, out)?;
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
            let memory = StateMemory::Host { values, bytes };
            loaded.current = Some(Arc::new(Snapshot { tokens: tokens as usize, memory }));
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

    /// The current state in main memory, as one that nothing else has, which becomes that after `tokens` tokens.
    fn writable(&mut self, lens: StateLens, tokens: usize) -> Result<&mut StateValues> {
        let is_own = |current: &mut Arc<Snapshot>| Arc::get_mut(current).is_some_and(|own| own.memory.is_on_host());
        if !self.current.as_mut().is_some_and(is_own) {
            let bytes = self.pool.reserve(lens.bytes())?;
            let values = self.current.as_ref().map_or_else(|| Ok(lens.zeros()), |shared| shared.values(lens))?;
            self.current = Some(Arc::new(Snapshot { tokens, memory: StateMemory::Host { values, bytes } }));
        }
        let own = self.current.as_mut().and_then(Arc::get_mut).expect("the state was just made");
        own.tokens = tokens;
        match &mut own.memory {
            StateMemory::Host { values, .. } => Ok(values),
            StateMemory::Device(_) => unreachable!("the state is in main memory"),
        }
    }

    /// The page of the current state on the device, as one that nothing else has, which becomes that after `tokens` tokens.
    fn writable_on_device(&mut self, lens: StateLens, tokens: usize) -> Result<usize> {
        let device = self.pool.device().expect("chains are on the device of the pool").clone();
        let is_own = |current: &mut Arc<Snapshot>| Arc::get_mut(current).is_some_and(|own| !own.memory.is_on_host());
        if !self.current.as_mut().is_some_and(is_own) {
            let page = self.pool.page(lens.page_shape(), Place::Device)?;
            let send = |values: &StateValues| {
                let floats = [&values.window[..], &values.recurrence].concat();
                let mut bytes = vec![0; lens.bytes()];
                narrow(NumberFormat::F32, &floats, &mut bytes);
                device.append(page.device_id(), 0, &bytes)
            };
            match self.current.as_ref().map(|current| &current.memory) {
                None => send(&lens.zeros())?,
                Some(StateMemory::Host { values, .. }) => send(values)?,
                Some(StateMemory::Device(shared)) => device.copy(shared.device_id(), page.device_id(), 1)?,
            }
            self.current = Some(Arc::new(Snapshot { tokens, memory: StateMemory::Device(page) }));
        }
        let own = self.current.as_mut().and_then(Arc::get_mut).expect("the state was just made");
        own.tokens = tokens;
        match &own.memory {
            StateMemory::Device(page) => Ok(page.device_id()),
            StateMemory::Host { .. } => unreachable!("the state is on the device"),
        }
    }

    /// Keeps a state as a checkpoint. It is copied only if more tokens follow.
    fn checkpoint(&mut self, state: Option<Arc<Snapshot>>) {
        self.checkpoints.extend(state);
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
        self.checkpoints.iter().chain(extra).map(|state| state.memory.bytes()).sum()
    }
}

impl StateMemory {
    fn is_on_host(&self) -> bool {
        matches!(self, StateMemory::Host { .. })
    }

    fn bytes(&self) -> usize {
        match self {
            StateMemory::Host { bytes, .. } => bytes.count(),
            StateMemory::Device(page) => page.bytes(),
        }
    }
}

impl Snapshot {
    /// A copy of the values. Waits for a device that has them.
    fn values(&self, lens: StateLens) -> Result<StateValues> {
        match &self.memory {
            StateMemory::Host { values, .. } => Ok(values.clone()),
            StateMemory::Device(page) => {
                let (mut bytes, mut values) = (vec![0; lens.bytes()], vec![0.0; lens.window + lens.recurrence]);
                page.read(&mut bytes)?;
                widen(NumberFormat::F32, &bytes, &mut values);
                let recurrence = values.split_off(lens.window);
                Ok(StateValues { window: values, recurrence })
            }
        }
    }

    /// The values, which are in main memory.
    fn on_host(&self) -> &StateValues {
        match &self.memory {
            StateMemory::Host { values, .. } => values,
            StateMemory::Device(_) => unreachable!("the mixer has no form for devices, or the pool has no device"),
        }
    }
}

#[cfg(test)]
mod tests {
    use larder_core::CheckpointPolicy;

    use super::*;
    use crate::double::AttentionDouble;
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
            let StateValues { window, recurrence } = current.values(LENS).unwrap();
            [window[0], recurrence[0], recurrence[1]]
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

    /// Takes in the next tokens on a device, as [`go`] does.
    fn go_on_device(state: &mut RecurrentState, tokens: Range<usize>, device: &AttentionDouble) {
        let span = state.extend(tokens.len(), LENS, 3).unwrap();
        assert_eq!((span.recurrence_at, span.first_row, span.tokens), (1, 3, tokens.len()));
        let mut values = device.floats(span.page);
        for (taken_in, token) in tokens.enumerate() {
            values = vec![token as f32, values[1] + 1.0, values[2] + token as f32];
            let copies = span.copies.iter().filter(|(after, _)| *after == taken_in + 1);
            copies.for_each(|(_, page)| device.set_floats(*page, 0, &values));
        }
        device.set_floats(span.page, 0, &values);
    }

    #[test]
    fn a_state_moves_between_memory_and_a_device_with_its_checkpoints() {
        let device = Arc::new(AttentionDouble::new(1 << 20));
        let policy = CheckpointPolicy { every: 5, most: 3 };
        let pool = KvPool::new(KvFormat::F32, policy, Some(6 * LENS.bytes()), Some(device.clone()));
        for (piece, on_device) in [(1, 0b1), (3, 0b110), (7, 0b01), (11, 0b10), (23, 0b1), (2, 0b0011)] {
            let mut state = RecurrentState::new(&pool);
            for (number, start) in (0..23).step_by(piece).enumerate() {
                let tokens = start..(start + piece).min(23);
                match on_device >> (number % 4) & 1 {
                    1 => go_on_device(&mut state, tokens, &device),
                    _ => go(&mut state, tokens),
                }
            }
            let at: Vec<usize> = state.checkpoints.iter().map(|checkpoint| checkpoint.tokens).collect();
            assert_eq!((at, state.bytes()), (vec![10, 15, 20], 4 * LENS.bytes()), "pieces of {piece}");
            assert_eq!((values(&state), state.window(LENS).unwrap()), ([22.0, 23.0, 253.0], vec![22.0]));
            let mut fork = state.clone();
            go_on_device(&mut fork, 23..24, &device);
            assert_eq!((values(&state), values(&fork)), ([22.0, 23.0, 253.0], [23.0, 24.0, 276.0]));
            drop(fork);
            state.truncate(15);
            assert_eq!(values(&state), [14.0, 15.0, 105.0], "pieces of {piece}");
            go_on_device(&mut state, 15..16, &device);
            assert_eq!(values(&state), [15.0, 16.0, 120.0]);
            state.truncate(10);
            assert_eq!(values(&state), [9.0, 10.0, 45.0], "the checkpoint was not written to");
        }
        assert_eq!((pool.usage().bytes(), pool.usage().pages), (0, 0));
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
