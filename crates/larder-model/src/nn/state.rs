use larder_core::Kind;
use larder_kernels::{Table, narrow};

/// How keys and values are remembered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Memory {
    /// As they are.
    F32,
    /// Rounded, in half the bytes.
    F16,
}

impl Memory {
    /// Bytes of a number.
    pub fn bytes(self) -> usize {
        self.kind().block_bytes()
    }

    fn kind(self) -> Kind {
        match self {
            Memory::F32 => Kind::F32,
            Memory::F16 => Kind::F16,
        }
    }
}

/// What a model remembers of a sequence.
#[derive(Clone)]
pub struct State {
    /// Tokens seen.
    pub len: usize,
    /// One per decoder layer.
    pub layers: Vec<LayerState>,
}

impl State {
    /// An empty memory for `layers` layers, with room for `tokens` tokens.
    pub fn new(layers: usize, tokens: usize, memory: Memory) -> Self {
        State { len: 0, layers: (0..layers).map(|_| LayerState::new(tokens, memory)).collect() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerState::bytes).sum()
    }

    /// Goes back to the first `len` tokens, if what is remembered of them can be told from the rest; otherwise nothing
    /// changes. Windows and recurrences know only how the sequence ended.
    pub fn cut(&mut self, len: usize) -> bool {
        if len >= self.len {
            return len == self.len;
        }
        let whole = self.layers.iter().all(LayerState::is_rows);
        if whole {
            self.len = len;
            self.layers.iter_mut().for_each(|layer| layer.cut(len));
        }
        whole
    }
}

/// What one layer remembers; each kind of mixer uses the fields it needs.
#[derive(Clone)]
pub struct LayerState {
    /// Keys of attention, or the latents of latent attention.
    pub keys: Rows,
    /// Values of attention.
    pub values: Rows,
    /// The last inputs of a causal convolution, oldest first: `[width - 1, channels]`.
    pub window: Vec<f32>,
    /// The memory of a recurrence.
    pub recurrent: Vec<f32>,
}

impl LayerState {
    /// Nothing yet, with room for `tokens` tokens.
    pub fn new(tokens: usize, memory: Memory) -> Self {
        let rows = || Rows::new(tokens, memory);
        LayerState { keys: rows(), values: rows(), window: Vec::new(), recurrent: Vec::new() }
    }

    /// Whether each token is remembered by itself.
    fn is_rows(&self) -> bool {
        self.window.is_empty() && self.recurrent.is_empty()
    }

    fn cut(&mut self, len: usize) {
        self.keys.len = self.keys.len.min(len);
        self.values.len = self.values.len.min(len);
    }

    fn bytes(&self) -> usize {
        self.keys.data.len() + self.values.data.len() + (self.window.len() + self.recurrent.len()) * size_of::<f32>()
    }
}

/// Vectors `[heads, positions, width]` that grow along their positions, each head's in one piece.
#[derive(Clone)]
pub struct Rows {
    kind: Kind,
    data: Vec<u8>,
    heads: usize,
    /// Bytes of one vector.
    row: usize,
    /// Positions that fit.
    room: usize,
    len: usize,
}

impl Rows {
    /// None yet, with room for `room` positions.
    pub fn new(room: usize, memory: Memory) -> Self {
        Rows { kind: memory.kind(), data: Vec::new(), heads: 0, row: 0, room, len: 0 }
    }

    /// Appends `new [n, heads, width]`. Memory is taken from the system at the first call, for as many positions as
    /// there is to be room for, and again only if there are more.
    pub fn append(&mut self, new: &[f32], heads: usize, width: usize) {
        let (need, row) = (self.len + new.len() / (heads * width), width * self.kind.block_bytes());
        if self.data.is_empty() {
            (self.heads, self.row) = (heads, row);
            self.room = self.room.max(need);
            self.data = vec![0; heads * self.room * row];
        } else if need > self.room {
            self.grow(need.next_power_of_two());
        }
        debug_assert_eq!((self.heads, self.row), (heads, row));
        for token in new.chunks_exact(heads * width) {
            for (head, values) in token.chunks_exact(width).enumerate() {
                narrow(self.kind, values, &mut self.data[(head * self.room + self.len) * row..][..row]);
            }
            self.len += 1;
        }
    }

    /// All rows, or the first `width` values of each.
    pub fn table(&self, width: usize) -> Table<'_> {
        Table { kind: self.kind, data: &self.data, head: self.room * self.row, row: self.row, width }
    }

    fn grow(&mut self, room: usize) {
        let (used, from, to) = (self.len * self.row, self.room * self.row, room * self.row);
        let mut data = vec![0; self.heads * to];
        for (old, new) in self.data.chunks_exact(from).zip(data.chunks_exact_mut(to)) {
            new[..used].copy_from_slice(&old[..used]);
        }
        (self.data, self.room) = (data, room);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_rows_can_be_cut() {
        let mut state = State::new(2, 4, Memory::F32);
        state.layers.iter_mut().for_each(|layer| layer.keys.append(&[1.0, 2.0, 3.0], 1, 1));
        state.len = 3;
        assert!(!state.cut(4) && state.cut(3) && state.cut(1));
        assert_eq!((state.len, state.layers[1].keys.len, state.layers[1].values.len), (1, 1, 0));
        state.layers[0].window = vec![0.5];
        assert!(!state.cut(0));
        assert_eq!(state.len, 1);
    }

    #[test]
    fn rows_survive_growth() {
        for (room, memory) in [0, 1, 7, 100].into_iter().flat_map(|r| [(r, Memory::F32), (r, Memory::F16)]) {
            let mut rows = Rows::new(room, memory);
            for i in 0..100 {
                let value = |head: usize| [i as f32, head as f32, 0.5];
                rows.append(&[value(0), value(1)].concat(), 2, 3);
                let table = rows.table(2);
                for (head, at) in (0..2).flat_map(|head| (0..=i).map(move |at| (head, at))) {
                    let from = head * table.head + at * table.row;
                    let mut kept = [0.0; 2];
                    let bytes = 2 * table.kind.block_bytes();
                    larder_kernels::widen(table.kind, &table.data[from..][..bytes], &mut kept);
                    assert_eq!(kept, [at as f32, head as f32]);
                }
            }
        }
    }
}
