use larder_kernels::Table;

/// What a model remembers of a sequence.
pub struct State {
    /// Tokens seen.
    pub len: usize,
    /// One per decoder layer.
    pub layers: Vec<LayerState>,
}

impl State {
    /// An empty memory for `layers` layers, with room for `tokens` tokens.
    pub fn new(layers: usize, tokens: usize) -> Self {
        State { len: 0, layers: (0..layers).map(|_| LayerState::new(tokens)).collect() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerState::bytes).sum()
    }
}

/// What one layer remembers; each kind of mixer uses the fields it needs.
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
    pub fn new(tokens: usize) -> Self {
        let rows = || Rows { room: tokens, ..Rows::default() };
        LayerState { keys: rows(), values: rows(), window: Vec::new(), recurrent: Vec::new() }
    }

    fn bytes(&self) -> usize {
        let values = self.keys.data.len() + self.values.data.len() + self.window.len() + self.recurrent.len();
        values * size_of::<f32>()
    }
}

/// Vectors `[heads, positions, width]` that grow along their positions, each head's in one piece.
#[derive(Default)]
pub struct Rows {
    data: Vec<f32>,
    heads: usize,
    width: usize,
    /// Positions that fit.
    room: usize,
    len: usize,
}

impl Rows {
    /// Appends `new [n, heads, width]`. Memory is taken from the system at the first call, for as many positions as
    /// there is to be room for, and again only if there are more.
    pub fn append(&mut self, new: &[f32], heads: usize, width: usize) {
        let need = self.len + new.len() / (heads * width);
        if self.data.is_empty() {
            (self.heads, self.width) = (heads, width);
            self.room = self.room.max(need);
            self.data = vec![0.0; heads * self.room * width];
        } else if need > self.room {
            self.grow(need.next_power_of_two());
        }
        debug_assert_eq!((self.heads, self.width), (heads, width));
        for token in new.chunks_exact(heads * width) {
            for (head, row) in token.chunks_exact(width).enumerate() {
                self.data[(head * self.room + self.len) * width..][..width].copy_from_slice(row);
            }
            self.len += 1;
        }
    }

    /// All rows, or the first `width` values of each.
    pub fn table(&self, width: usize) -> Table<'_> {
        Table { data: &self.data, head: self.room * self.width, row: self.width, width }
    }

    fn grow(&mut self, room: usize) {
        let (used, from, to) = (self.len * self.width, self.room * self.width, room * self.width);
        let mut data = vec![0.0; self.heads * to];
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
    fn rows_survive_growth() {
        for room in [0, 1, 7, 100] {
            let mut rows = Rows { room, ..Rows::default() };
            for i in 0..100 {
                let value = |head: usize| [i as f32, head as f32, 0.5];
                rows.append(&[value(0), value(1)].concat(), 2, 3);
                let table = rows.table(2);
                for head in 0..2 {
                    for at in 0..=i {
                        assert_eq!(table.row(head, at), [at as f32, head as f32]);
                    }
                }
            }
        }
    }
}
