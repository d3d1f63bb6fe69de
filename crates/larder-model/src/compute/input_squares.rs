//! Sums of squares of the inputs of weight matrices, of which an importance matrix is made.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_core::{ExpertId, LayerIdx};
use larder_kernels::Inputs;
use parking_lot::Mutex;

/// The input that matrices of an expert share.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum ExpertInput {
    /// That of the gate and the up matrix: hidden states.
    Hidden,
    /// That of the down matrix: values after the activation.
    Inner,
}

/// Collects the inputs of all matmuls of the models that compute on a context.
#[derive(Default, Debug)]
pub struct InputSquares {
    resident: Mutex<BTreeMap<String, Arc<Mutex<ColumnSquares>>>>,
    experts: Mutex<BTreeMap<(LayerIdx, ExpertInput), Vec<ColumnSquares>>>,
}

/// Sums over the tokens that a matrix was multiplied with.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct ColumnSquares {
    /// For each column the sum of the squares of its inputs; empty before the first token.
    pub sums: Vec<f32>,
    /// Number of tokens.
    pub tokens: u64,
}

impl ColumnSquares {
    fn add<'a>(&mut self, columns: usize, rows: impl Iterator<Item = &'a [f32]>) {
        // Partial sums keep their precision over texts of any length.
        let mut squares = vec![0.0_f32; columns];
        for row in rows {
            squares.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * x);
            self.tokens += 1;
        }
        self.sums.resize(columns, 0.0);
        self.sums.iter_mut().zip(&squares).for_each(|(sum, square)| *sum += square);
    }
}

impl InputSquares {
    /// The sums of each resident matrix that was multiplied with, by its name.
    pub fn resident(&self) -> BTreeMap<String, ColumnSquares> {
        let all = self.resident.lock();
        let sums = all.iter().map(|(name, squares)| (name.clone(), squares.lock().clone()));
        sums.filter(|(_, squares)| squares.tokens > 0).collect()
    }

    /// Takes the sums of the experts: for each layer and input those of each expert, up to the last that was used.
    pub fn take_experts(&self) -> BTreeMap<(LayerIdx, ExpertInput), Vec<ColumnSquares>> {
        std::mem::take(&mut self.experts.lock())
    }

    /// The sums of the resident matrix `name`.
    pub(crate) fn of_matrix(&self, name: &str) -> MatrixSquares {
        MatrixSquares(self.resident.lock().entry(name.to_owned()).or_default().clone())
    }

    /// Adds the `rows` of `x` to the sums of an expert.
    pub(crate) fn add(&self, layer: LayerIdx, expert: ExpertId, input: ExpertInput, x: &Inputs, rows: &[u32]) {
        let mut all = self.experts.lock();
        let experts = all.entry((layer, input)).or_default();
        if experts.len() <= expert.index() {
            experts.resize(expert.index() + 1, ColumnSquares::default());
        }
        experts[expert.index()].add(x.cols(), rows.iter().map(|row| row_of(x, *row as usize)));
    }
}

/// The sums of one resident matrix.
#[derive(Clone, Debug)]
pub(crate) struct MatrixSquares(Arc<Mutex<ColumnSquares>>);

impl MatrixSquares {
    /// Adds the rows `pick` of `x`; `None` for all.
    pub fn add(&self, x: &Inputs, pick: Option<&[u32]>) {
        let mut squares = self.0.lock();
        match pick {
            Some(pick) => squares.add(x.cols(), pick.iter().map(|row| row_of(x, *row as usize))),
            None => squares.add(x.cols(), x.all_values().chunks_exact(x.cols())),
        }
    }
}

fn row_of<'a>(x: &Inputs<'a>, row: usize) -> &'a [f32] {
    &x.all_values()[row * x.cols()..][..x.cols()]
}

#[cfg(test)]
mod tests {
    use larder_kernels::InputBuffer;

    use super::*;

    fn inputs(buffer: &mut InputBuffer) -> Inputs<'_> {
        buffer.fill(&[1.0, 2.0, -3.0, 0.0, 0.5, 4.0], 2, false)
    }

    #[test]
    fn squares_are_summed_by_column_over_the_tokens_of_each_matrix() {
        let (squares, mut buffer) = (InputSquares::default(), InputBuffer::new());
        let x = inputs(&mut buffer);
        squares.of_matrix("never multiplied");
        squares.of_matrix("q").add(&x, None);
        squares.of_matrix("q").add(&x, Some(&[2]));
        let q = ColumnSquares { sums: vec![1.0 + 9.0 + 0.25 + 0.25, 4.0 + 16.0 + 16.0], tokens: 4 };
        assert_eq!(squares.resident(), BTreeMap::from([("q".to_owned(), q)]));
    }

    #[test]
    fn experts_have_sums_of_their_own() {
        let (squares, mut buffer, layer) = (InputSquares::default(), InputBuffer::new(), LayerIdx(3));
        let x = inputs(&mut buffer);
        squares.add(layer, ExpertId(2), ExpertInput::Hidden, &x, &[0, 1]);
        squares.add(layer, ExpertId(0), ExpertInput::Hidden, &x, &[1]);
        squares.add(layer, ExpertId(2), ExpertInput::Inner, &x, &[2]);
        let found = squares.take_experts();
        let sums = |input| found[&(layer, input)].iter().map(|s| (s.tokens, s.sums.clone())).collect::<Vec<_>>();
        assert_eq!(sums(ExpertInput::Hidden), [(1, vec![9.0, 0.0]), (0, vec![]), (2, vec![10.0, 4.0])]);
        assert_eq!(sums(ExpertInput::Inner)[2], (1, vec![0.25, 16.0]));
        assert!(squares.take_experts().is_empty());
    }
}
