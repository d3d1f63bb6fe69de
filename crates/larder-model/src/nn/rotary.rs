//! The rotation of the heads of queries and keys by a table of angles.

use candle_core::{Device, Tensor};

use super::ForwardPass;
use crate::error::Result;
use crate::matrix::with_f32;

/// Cosines and sines of the tokens of a step, `[tokens, dim / 2]`.
#[derive(Default)]
pub struct RopeTable(pub(super) Vec<(f32, f32)>);

impl RopeTable {
    /// `[tokens, dim / 2]`
    pub(super) fn turns(&self) -> &[(f32, f32)] {
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
    /// `x [n, heads, width]` → same shape
    pub fn apply(&self, x: &Tensor, pass: &ForwardPass) -> Result<Tensor> {
        let RopeTable(turns) = &pass.ropes[self.table];
        let (n, heads, width) = x.dims3()?;
        let mut values = with_f32(x, <[f32]>::to_vec)?;
        for (token, turns) in values.chunks_exact_mut(heads * width).zip(turns.chunks_exact(self.dim / 2)) {
            token.chunks_exact_mut(width).for_each(|head| self.rotate(&mut head[..self.dim], turns));
        }
        Ok(Tensor::from_vec(values, (n, heads, width), &Device::Cpu)?)
    }

    /// Rotates the last values of each head of `x [n, heads, width]` instead of the first; backwards if `back`.
    pub fn apply_to_tails(&self, x: &mut [f32], [heads, width]: [usize; 2], pass: &ForwardPass, back: bool) {
        let RopeTable(turns) = &pass.ropes[self.table];
        for (token, turns) in x.chunks_exact_mut(heads * width).zip(turns.chunks_exact(self.dim / 2)) {
            let turned_back: Vec<_> = turns.iter().map(|(cos, sin)| (*cos, -sin)).collect();
            let turns = if back { &turned_back } else { turns };
            token.chunks_exact_mut(width).for_each(|head| self.rotate(&mut head[width - self.dim..], turns));
        }
    }

    /// Rotates the first values of a row by these cosines and sines.
    pub fn rotate_by(self, row: &mut [f32], turns: &[(f32, f32)]) {
        self.rotate(&mut row[..self.dim], turns);
    }

    /// Rotates the first values of a row by the first position of a table.
    pub fn rotate_head(&self, row: &mut [f32], table: &RopeTable) {
        self.rotate(&mut row[..self.dim], &table.0);
    }

    /// Rotates the last values of a row by the first position of a table.
    pub fn rotate_tail(&self, row: &mut [f32], table: &RopeTable) {
        let start = row.len() - self.dim;
        self.rotate(&mut row[start..], &table.0);
    }

    fn rotate(&self, x: &mut [f32], turns: &[(f32, f32)]) {
        let turn =
            |a: &mut f32, b: &mut f32, (cos, sin): (f32, f32)| (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
        if self.interleaved {
            x.as_chunks_mut::<2>().0.iter_mut().zip(turns).for_each(|([a, b], t)| turn(a, b, *t));
        } else {
            let (first, second) = x.split_at_mut(self.dim / 2);
            first.iter_mut().zip(second).zip(turns).for_each(|((a, b), t)| turn(a, b, *t));
        }
    }
}
