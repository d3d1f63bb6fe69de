//! Where a patch is: the table of learned positions, resampled for the grid of a picture, and rotary angles of two
//! axes.

use crate::processor::place;

/// Adds to each patch its learned position: the table of `side` × `side` rows is resampled linearly so that its
/// corners are those of the picture.
pub fn add_learned(x: &mut [f32], table: &[f32], side: usize, (rows, columns): (usize, usize), merge: usize) {
    let width = table.len() / (side * side);
    for (number, x) in x.chunks_exact_mut(width).enumerate() {
        let (row, column) = place(number, columns, merge);
        let (down, across) = (taps(row, rows, side), taps(column, columns, side));
        let mut parts = [(0.0, &table[..width]); 4];
        for (i, part) in parts.iter_mut().enumerate() {
            let ((r, by_row), (c, by_column)) = (down[i / 2], across[i % 2]);
            *part = (by_row * by_column, &table[(r * side + c) * width..][..width]);
        }
        for (i, x) in x.iter_mut().enumerate() {
            let sum = parts.iter().fold(0.0, |sum, (weight, values)| sum + values[i] * weight);
            *x += sum;
        }
    }
}

/// The two places of a table between which place `index` of `count` lies, and their weights.
fn taps(index: usize, count: usize, side: usize) -> [(usize, f32); 2] {
    let at = index as f32 * (side - 1) as f32 / count.saturating_sub(1).max(1) as f32;
    let (low, part) = (at.floor(), at - at.floor());
    let low = (low as usize).min(side - 1);
    [(low, 1.0 - part), ((low + 1).min(side - 1), part)]
}

/// Cosines and sines of the rotation of a patch: `[patches, head_dim / 2]` each. The first half of the frequencies
/// turns by the row, the second by the column.
pub struct Rotations {
    cos: Vec<f32>,
    sin: Vec<f32>,
    half: usize,
}

impl Rotations {
    /// Those of all patches of a grid.
    pub fn new(head_dim: usize, theta: f64, (rows, columns): (usize, usize), merge: usize) -> Self {
        let half = head_dim / 2;
        let frequency = |j: usize| (1.0 / theta.powf((2 * j) as f64 / half as f64)) as f32;
        let frequencies: Vec<f32> = (0..half / 2).map(frequency).collect();
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for number in 0..rows * columns {
            let (row, column) = place(number, columns, merge);
            for position in [row, column] {
                for frequency in &frequencies {
                    let (s, c) = f64::from(position as f32 * frequency).sin_cos();
                    cos.push(c as f32);
                    sin.push(s as f32);
                }
            }
        }
        Rotations { cos, sin, half }
    }

    /// Turns the heads of the patch `number`: the pairs are the values half a head apart.
    pub fn turn(&self, number: usize, heads: &mut [f32]) {
        let at = number * self.half..(number + 1) * self.half;
        let (cos, sin) = (&self.cos[at.clone()], &self.sin[at]);
        for head in heads.chunks_exact_mut(2 * self.half) {
            let (left, right) = head.split_at_mut(self.half);
            for (((a, b), c), s) in left.iter_mut().zip(right).zip(cos).zip(sin) {
                (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
            }
        }
    }
}
