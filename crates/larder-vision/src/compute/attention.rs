//! Softmax attention in which every position sees all others. Queries are taken in pieces, so that scores of a piece
//! are in memory, never all of them.

use larder_kernels::{Arithmetic, ThreadPool, exp, widest};

use super::matmul::{TILE, matmul};
use super::panels::ColumnPanels;

/// Queries of a piece.
const PIECE: usize = 8 * TILE;
/// Sums of exponentials that are taken side by side.
const LANES: usize = 16;

/// The shape of an attention, and its inputs.
pub struct FullAttention<'a> {
    /// Number of heads.
    pub heads: usize,
    /// Values of a head.
    pub head_dim: usize,
    /// Queries, keys and values: `[positions, 3, heads, head_dim]`
    pub joined: &'a [f32],
    /// What scores are multiplied with.
    pub scale: f32,
}

/// Bytes of memory that [`attention`] takes on `threads` threads beside its inputs and its result.
pub fn attention_scratch_bytes(positions: usize, heads: usize, head_dim: usize, threads: usize) -> u64 {
    let packed = 2 * positions.next_multiple_of(16) * heads * head_dim.next_multiple_of(16);
    let piece = PIECE * (positions + 2 * head_dim);
    ((packed + threads * piece) * size_of::<f32>()) as u64
}

/// Keys and values of a head as matrices.
struct Head {
    /// `[head_dim, positions]`
    keys: ColumnPanels,
    /// `[positions, head_dim]`
    values: ColumnPanels,
}

/// `[positions, heads, head_dim]`
pub fn attention(pool: &ThreadPool, of: &FullAttention) -> Vec<f32> {
    attention_in_pieces(pool, of, PIECE)
}

fn attention_in_pieces(pool: &ThreadPool, of: &FullAttention, piece: usize) -> Vec<f32> {
    let (width, dim) = (of.heads * of.head_dim, of.head_dim);
    let mut heads: Vec<Option<Head>> = (0..of.heads).map(|_| None).collect();
    pool.run_chunks(&mut heads, 1, &|head, slot| slot[0] = Some(of.head(head)));
    let heads: Vec<Head> = heads.into_iter().flatten().collect();
    let positions = of.joined.len() / (3 * width);
    let mut out = vec![0.0; positions * width];
    pool.run_chunks(&mut out, piece * width, &|number, out| {
        let count = out.len() / width;
        let (mut scores, mut result) = (vec![0.0; count * positions], vec![0.0; count * dim]);
        for (head, matrices) in heads.iter().enumerate() {
            let queries = of.rows(number * piece, count, head * dim);
            of.piece(matrices, &queries, &mut scores, &mut result);
            for (row, result) in out.chunks_exact_mut(width).zip(result.chunks_exact(dim)) {
                row[head * dim..][..dim].copy_from_slice(result);
            }
        }
    });
    out
}

impl FullAttention<'_> {
    /// The values of a head's width from `at` on, of `count` positions.
    fn rows(&self, first: usize, count: usize, at: usize) -> Vec<f32> {
        let (row, dim) = (3 * self.heads * self.head_dim, self.head_dim);
        let mut rows = Vec::with_capacity(count * dim);
        let positions = self.joined[first * row..].chunks_exact(row).take(count);
        positions.for_each(|position| rows.extend_from_slice(&position[at..][..dim]));
        rows
    }

    fn head(&self, head: usize) -> Head {
        let (width, dim) = (self.heads * self.head_dim, self.head_dim);
        let positions = self.joined.len() / (3 * width);
        let keys = self.rows(0, positions, width + head * dim);
        let values = self.rows(0, positions, 2 * width + head * dim);
        let mut columns = Vec::with_capacity(values.len());
        (0..dim).for_each(|column| columns.extend(values[column..].iter().step_by(dim)));
        Head { keys: ColumnPanels::from_f32(&keys, dim), values: ColumnPanels::from_f32(&columns, positions) }
    }

    fn piece(&self, head: &Head, queries: &[f32], scores: &mut [f32], result: &mut [f32]) {
        let positions = head.keys.columns();
        matmul(queries, self.head_dim, &head.keys, &[], scores);
        for scores in scores.chunks_exact_mut(positions) {
            widest(Softmax { scores, scale: self.scale });
        }
        matmul(scores, positions, &head.values, &[], result);
    }
}

struct Softmax<'a> {
    scores: &'a mut [f32],
    scale: f32,
}

impl Arithmetic for Softmax<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Softmax { scores, scale } = self;
        let mut most = [f32::NEG_INFINITY; LANES];
        for some in scores.chunks(LANES) {
            most.iter_mut().zip(some).for_each(|(most, v)| *most = if *v * scale > *most { *v * scale } else { *most });
        }
        let most = most.iter().fold(f32::NEG_INFINITY, |a, b| a.max(*b));
        let mut sums = [0.0f32; LANES];
        let (whole, rest) = scores.as_chunks_mut::<LANES>();
        for some in whole {
            for (v, sum) in some.iter_mut().zip(&mut sums) {
                *v = exp(*v * scale - most);
                *sum += *v;
            }
        }
        for (v, sum) in rest.iter_mut().zip(&mut sums) {
            *v = exp(*v * scale - most);
            *sum += *v;
        }
        let one = 1.0 / sums.iter().sum::<f32>();
        scores.iter_mut().for_each(|v| *v *= one);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize, seed: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 250.0 - 2.0).collect()
    }

    #[test]
    fn pieces_and_threads_change_no_bit() {
        let (positions, heads, head_dim) = (77, 3, 10);
        let joined = values(positions * 3 * heads * head_dim, 1);
        let of = FullAttention { heads, head_dim, joined: &joined, scale: 0.3 };
        let one = attention_in_pieces(&ThreadPool::single_threaded(), &of, positions);
        for (threads, piece) in [(1, 1), (2, 7), (4, 48), (3, 76)] {
            let pool = ThreadPool::new(threads, false).unwrap();
            assert!(attention_in_pieces(&pool, &of, piece) == one, "{threads} threads, pieces of {piece}");
        }
    }

    #[test]
    fn it_is_the_average_of_values_by_softmax() {
        let (positions, heads, head_dim) = (35, 2, 8);
        let joined = values(positions * 3 * heads * head_dim, 1);
        let of = FullAttention { heads, head_dim, joined: &joined, scale: 0.3 };
        let got = attention(&ThreadPool::single_threaded(), &of);
        // Part 0 are queries, 1 keys, 2 values.
        let at = |part, p, h, d| f64::from(joined[((p * 3 + part) * heads + h) * head_dim + d]);
        for (p, h) in (0..positions).flat_map(|p| (0..heads).map(move |h| (p, h))) {
            let score = |other| (0..head_dim).map(|d| at(0, p, h, d) * at(1, other, h, d)).sum::<f64>() * 0.3;
            let shares: Vec<f64> = (0..positions).map(|other| score(other).exp()).collect();
            let total: f64 = shares.iter().sum();
            for d in 0..head_dim {
                let want = (0..positions).map(|o| shares[o] * at(2, o, h, d)).sum::<f64>() / total;
                let got = f64::from(got[(p * heads + h) * head_dim + d]);
                assert!((got - want).abs() < 1e-5, "{got} is not {want}");
            }
        }
    }
}
