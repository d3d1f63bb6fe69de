use candle_core::{Device, Tensor};

use crate::error::Result;

/// What a model remembers of a sequence.
pub struct State {
    /// Tokens seen.
    pub len: usize,
    /// One per decoder layer.
    pub layers: Vec<LayerState>,
}

impl State {
    /// An empty memory for `layers` layers.
    pub fn new(layers: usize) -> Self {
        State { len: 0, layers: (0..layers).map(|_| LayerState::default()).collect() }
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.layers.iter().map(LayerState::bytes).sum()
    }
}

/// What one layer remembers; each kind of mixer uses the fields it needs.
#[derive(Default)]
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
    fn bytes(&self) -> usize {
        self.keys.bytes() + self.values.bytes() + (self.window.len() + self.recurrent.len()) * size_of::<f32>()
    }
}

/// A tensor `[heads, positions, width]` that grows along its positions.
#[derive(Default)]
pub struct Rows {
    buffer: Option<Tensor>,
    len: usize,
}

impl Rows {
    /// Appends `new [heads, n, width]` and returns all rows from position `from` on, `[heads, len - from, width]`.
    pub fn append(&mut self, new: &Tensor, from: usize) -> Result<Tensor> {
        let (heads, n, width) = new.dims3()?;
        let need = self.len + n;
        let buffer = match self.buffer.take() {
            Some(buffer) if buffer.dim(1)? >= need => buffer,
            old => {
                let capacity = need.next_power_of_two().max(64);
                let grown = Tensor::zeros((heads, capacity, width), new.dtype(), &Device::Cpu)?;
                if let Some(old) = old {
                    grown.slice_set(&old.narrow(1, 0, self.len)?.contiguous()?, 1, 0)?;
                }
                grown
            }
        };
        buffer.slice_set(&new.contiguous()?, 1, self.len)?;
        self.len = need;
        let rows = buffer.narrow(1, from, need - from)?;
        self.buffer = Some(buffer);
        Ok(rows)
    }

    fn bytes(&self) -> usize {
        self.buffer.as_ref().map_or(0, |b| b.elem_count() * size_of::<f32>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_survive_growth() {
        let mut rows = Rows::default();
        for i in 0..100 {
            let new = Tensor::full(i as f32, (2, 1, 3), &Device::Cpu).unwrap();
            let all = rows.append(&new, i / 2).unwrap();
            assert_eq!(all.dims(), [2, i + 1 - i / 2, 3]);
            let column: Vec<f32> =
                all.get(1).unwrap().narrow(1, 2, 1).unwrap().flatten_all().unwrap().to_vec1().unwrap();
            assert_eq!(column, (i / 2..=i).map(|v| v as f32).collect::<Vec<_>>());
        }
    }
}
