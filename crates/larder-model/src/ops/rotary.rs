//! The rotation of the heads of queries and keys by a table of angles.

/// Cosines and sines of the tokens of a step, `[tokens, dim / 2]`.
#[derive(Default)]
pub struct RopeTable(pub(crate) Vec<(f32, f32)>);

impl RopeTable {
    /// `[tokens, dim / 2]`
    pub(crate) fn cos_sin(&self) -> &[(f32, f32)] {
        &self.0
    }
}

/// The part of a head that is rotated, and its layout.
#[derive(Clone, Copy, Debug)]
pub struct Rotary {
    /// Number of leading values of a head that are rotated.
    pub dim: usize,
    /// Pairs are adjacent (2i, 2i+1) instead of in halves (i, i + dim/2).
    pub interleaved: bool,
    /// Which of the model's ropes turns it.
    pub table: usize,
}

impl Rotary {
    /// Rotates the first values of a row by these cosines and sines.
    pub fn rotate_by(self, row: &mut [f32], cos_sin: &[(f32, f32)]) {
        self.rotate(&mut row[..self.dim], cos_sin);
    }

    fn rotate(&self, x: &mut [f32], cos_sin: &[(f32, f32)]) {
        let turn =
            |a: &mut f32, b: &mut f32, (cos, sin): (f32, f32)| (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        if self.interleaved {
            x.as_chunks_mut::<2>().0.iter_mut().zip(cos_sin).for_each(|([a, b], t)| turn(a, b, *t));
        } else {
            let (first, second) = x.split_at_mut(self.dim / 2);
            first.iter_mut().zip(second).zip(cos_sin).for_each(|((a, b), t)| turn(a, b, *t));
        }
    }
}
