//! The cells of a group: which entries of a code book are nearest with a given scale.

use super::code_book::{CodeBook, Excess};

/// Largest number of cells of a group.
const CELLS: usize = 8;

/// Magnitudes of a group's values and what their errors weigh, in cells of as many values as an entry has.
#[derive(Clone, Copy)]
pub struct Cells<'a, const CELL: usize> {
    pub sizes: &'a [[f32; CELL]],
    pub weights: &'a [[f32; CELL]],
}

/// The entries of a group with a scale.
#[derive(Clone, Copy)]
pub struct CodedGroup {
    pub entries: [u16; CELLS],
    pub error: f32,
}

impl<const CELL: usize> Cells<'_, CELL> {
    /// The best entries for the scale; `None` if their error is not below `bound`.
    pub fn code<const LEVELS: usize, const HALVES: usize>(
        &self,
        book: &CodeBook<CELL, LEVELS, HALVES>,
        scale: f32,
        bound: f32,
    ) -> Option<CodedGroup> {
        let mut excesses = [[[0.0; LEVELS]; CELL]; CELLS];
        let mut halves = [[0; 2]; CELLS];
        let mut coded = CodedGroup { entries: [0; CELLS], error: 0.0 };
        for (c, (sizes, weights)) in self.sizes.iter().zip(self.weights).enumerate() {
            let least;
            (excesses[c], least) = excess(&book.levels, scale, sizes, weights);
            halves[c] = book.halves(scale, sizes);
            coded.error += least;
        }
        for c in 0..self.sizes.len() {
            if coded.error.is_nan() || coded.error >= bound {
                return None;
            }
            let more;
            (coded.entries[c], more) = book.nearest(&excesses[c], halves[c]);
            coded.error += more;
        }
        (coded.error < bound).then_some(coded)
    }

    /// The weighted sums of size², size · level and level² over all values.
    pub fn sums<const LEVELS: usize, const HALVES: usize>(
        &self,
        book: &CodeBook<CELL, LEVELS, HALVES>,
        entries: &[u16],
    ) -> [f32; 3] {
        let mut sums = [0.0; 3];
        for ((sizes, weights), entry) in self.sizes.iter().zip(self.weights).zip(entries) {
            for ((size, weight), level) in sizes.iter().zip(weights).zip(&book.entries[*entry as usize]) {
                sums[0] += weight * size * size;
                sums[1] += weight * size * level;
                sums[2] += weight * level * level;
            }
        }
        sums
    }
}

/// The errors of a cell at each level, in excess of the least ones, and the sum of these.
fn excess<const CELL: usize, const LEVELS: usize>(
    levels: &[f32; LEVELS],
    scale: f32,
    sizes: &[f32; CELL],
    weights: &[f32; CELL],
) -> (Excess<CELL, LEVELS>, f32) {
    let levels = levels.map(|level| scale * level);
    let mut sum = 0.0;
    let excess = std::array::from_fn(|i| {
        let errors = levels.map(|level| weights[i] * (sizes[i] - level) * (sizes[i] - level));
        let least = errors.iter().fold(f32::INFINITY, |least: f32, error| if *error < least { *error } else { least });
        sum += least;
        errors.map(|error| error - least)
    });
    (excess, sum)
}
