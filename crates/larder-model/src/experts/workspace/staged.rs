//! Matmuls with the input of experts whose other bytes are still being read.

use larder_core::ExpertId;

/// Rows of gate and up `[rows, inter]`, expert by expert, until their experts are computed to the end.
#[derive(Default)]
pub(super) struct StagedInputs {
    gate: Vec<f32>,
    up: Vec<f32>,
    /// The experts, each with its values of `gate` and `up`.
    experts: Vec<Staged>,
}

struct Staged {
    expert: ExpertId,
    /// First value in `gate`, if there is a gate, and in `up`.
    start: usize,
    values: usize,
}

impl StagedInputs {
    /// Bytes of this many rows.
    pub const fn bytes(rows: usize, inter: usize) -> usize {
        2 * rows * inter * size_of::<f32>()
    }

    /// Drops all rows.
    pub fn clear(&mut self) {
        self.gate.clear();
        self.up.clear();
        self.experts.clear();
    }

    /// Keeps the rows of some experts, given with their numbers of values; `gate` is empty if experts have none.
    pub fn keep(&mut self, experts: impl Iterator<Item = (ExpertId, usize)>, gate: &[f32], up: &[f32]) {
        let mut start = self.up.len();
        for (expert, values) in experts {
            self.experts.push(Staged { expert, start, values });
            start += values;
        }
        self.gate.extend_from_slice(gate);
        self.up.extend_from_slice(up);
        debug_assert_eq!(start, self.up.len(), "the values are those of the experts");
    }

    /// Appends the rows of an expert to `gate` and `up`, and forgets them.
    pub fn take(&mut self, expert: ExpertId, gate: &mut Vec<f32>, up: &mut Vec<f32>) {
        let at = self.experts.iter().position(|staged| staged.expert == expert).expect("its inputs have been computed");
        let Staged { start, values, .. } = self.experts.swap_remove(at);
        if !self.gate.is_empty() {
            gate.extend_from_slice(&self.gate[start..][..values]);
        }
        up.extend_from_slice(&self.up[start..][..values]);
        if self.experts.is_empty() {
            self.clear();
        }
    }
}
