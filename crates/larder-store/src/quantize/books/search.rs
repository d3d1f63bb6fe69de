//! Signs, scales and entries of a block.

use half::f16;

use super::{
    Importance,
    cells::{Cells, CodedGroup},
    code_book::CodeBook,
};
use crate::quantize::search::{self, Group, inverse, rounded};

/// Values per block.
pub const SUPER: usize = 256;
/// Values whose signs are one byte.
const SIGNED: usize = 8;
/// Largest number of groups.
const GROUPS: usize = 16;
/// Largest number of entries.
const ENTRIES: usize = 64;
/// The largest scale of a group, which is `2 · s + 1`, and the largest `s`.
const MOST: f32 = 31.0;
const MOST_S: i32 = 15;
/// How far the `s` of a group is looked for, from what it would be if every combination of levels were an entry, and
/// then from the best one. Scales are rather larger, because few entries have many high levels.
const ROUNDS: [&[i32]; 2] = [&[0, 1, -1, 2, 3, -2], &[0, 1, -1]];

/// How much of the loss of size is made good. The nearest values are on the whole smaller than the exact ones, by the
/// share of their error in the sum of squares: in two bits several percent, which add up from matrix to matrix where
/// other errors cancel out. Larger values have larger errors, so not all of it is made good.
const RESTORED: f32 = 0.7;

/// The share of the sum of squares that is not in the mean, below which values are nearly the same.
const SAME: f32 = 0.04;

/// Which signs eight values can have.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Signs {
    /// Each its own.
    Free,
    /// An even number of them negative.
    Even,
}

/// A block, before its parts are packed.
#[derive(Clone)]
pub struct CodedBlock {
    /// The scale of the scales.
    pub d: f16,
    /// For each group its `s`.
    pub scales: [u8; GROUPS],
    /// For each cell the number of its entry.
    pub entries: [u16; ENTRIES],
    /// For each eight values their signs.
    pub signs: [u8; SUPER / SIGNED],
}

impl CodedBlock {
    /// The low seven signs of the four times eight values of a group of 32, and its scale above them.
    pub fn sevens(&self, g: usize) -> u32 {
        let signs = self.signs[4 * g..][..4].iter().enumerate();
        signs.fold(u32::from(self.scales[g]) << 28, |packed, (i, signs)| packed | u32::from(signs & 127) << (7 * i))
    }

    /// Stores two scales in each byte.
    pub fn put_scales(&self, out: &mut [u8]) {
        out.iter_mut().zip(self.scales.as_chunks::<2>().0).for_each(|(out, [low, high])| *out = low | high << 4);
    }
}

/// A format with a code book, in groups of `GROUP` values.
pub struct BookFormat<const CELL: usize, const LEVELS: usize, const HALVES: usize, const GROUP: usize> {
    pub book: CodeBook<CELL, LEVELS, HALVES>,
    pub signs: Signs,
    /// The unit of the levels.
    pub unit: f32,
}

impl<const CELL: usize, const LEVELS: usize, const HALVES: usize, const GROUP: usize>
    BookFormat<CELL, LEVELS, HALVES, GROUP>
{
    /// The block nearest to `values`.
    pub fn code(&self, values: &[f32; SUPER], importance: Importance) -> CodedBlock {
        let weights = search::weights(values, importance);
        let (sizes, signs) = sizes(values, &weights, self.signs);
        let mut best = CodedBlock { d: f16::ZERO, scales: [0; GROUPS], entries: [0; ENTRIES], signs };
        let mut next = best.clone();
        self.first_scales(&sizes, &weights, &mut next);
        let mut least = f32::INFINITY;
        for offsets in ROUNDS {
            let Some(sums) = self.code_groups(&sizes, &weights, offsets, &mut next) else { break };
            if sums.error >= least {
                break;
            }
            (best, least) = (next.clone(), sums.error);
            best.d = f16::from_f32(restored(next.d.to_f32(), sums.xx * inverse(sums.xs * self.unit)));
            next.d = f16::from_f32(sums.xs * inverse(sums.ss) / self.unit);
        }
        best
    }

    /// Scales as they would be if every combination of levels were an entry.
    fn first_scales(&self, sizes: &[f32; SUPER], weights: &[f32; SUPER], block: &mut CodedBlock) {
        let mut scales = [0.0; GROUPS];
        for (scale, group) in scales.iter_mut().zip(Group::all_of(sizes, weights, GROUP)) {
            *scale = first_scale(group, &self.book.levels);
        }
        let largest = scales.iter().fold(0.0, |most: f32, scale| most.max(*scale));
        block.d = f16::from_f32(largest / MOST / self.unit);
        let inverse = inverse(block.d.to_f32() * self.unit);
        block.scales = scales.map(|scale| rounded((scale * inverse - 1.0) / 2.0, 0.0, MOST_S as f32) as u8);
    }

    /// Moves the scale of each group by the best of these offsets, and chooses its entries. `None` if errors are no
    /// numbers.
    fn code_groups(
        &self,
        sizes: &[f32; SUPER],
        weights: &[f32; SUPER],
        offsets: &[i32],
        block: &mut CodedBlock,
    ) -> Option<GroupSums> {
        let mut all = GroupSums::default();
        let base = block.d.to_f32() * self.unit;
        let groups = sizes.chunks_exact(GROUP).zip(weights.chunks_exact(GROUP));
        for ((sizes, weights), (scale, entries)) in
            groups.zip(block.scales.iter_mut().zip(block.entries.chunks_exact_mut(GROUP / CELL)))
        {
            let cells = Cells { sizes: sizes.as_chunks().0, weights: weights.as_chunks().0 };
            let zeros = sizes.iter().all(|size| *size == 0.0);
            let tried = offsets.iter().map(|offset| i32::from(*scale) + offset);
            let (s, coded) = self.code_group(cells, base, tried.filter(|s| !zeros || *s == 0))?;
            *scale = s as u8;
            entries.copy_from_slice(&coded.entries[..GROUP / CELL]);
            // There is no level of zero. Columns of zeros are padding, and must not make all other scales smaller.
            if zeros {
                continue;
            }
            let ([xx, xs, ss], odd) = (cells.sums(&self.book, entries), (2 * s + 1) as f32);
            all.error += coded.error;
            all.xx += xx;
            all.xs += xs * odd;
            all.ss += ss * odd * odd;
        }
        Some(all)
    }

    /// The best of some `s`, and the entries of the group with it.
    fn code_group(&self, cells: Cells<CELL>, base: f32, tried: impl Iterator<Item = i32>) -> Option<(i32, CodedGroup)> {
        let mut best = None::<(i32, CodedGroup)>;
        for s in tried.filter(|s| (0..=MOST_S).contains(s)) {
            let bound = best.map_or(f32::INFINITY, |(_, coded)| coded.error);
            let coded = cells.code(&self.book, base * (2 * s + 1) as f32, bound);
            best = coded.map(|coded| (s, coded)).or(best);
        }
        best
    }
}

/// Weighted sums over all groups, where `s` is a level times the scale of its group.
#[derive(Default)]
struct GroupSums {
    error: f32,
    xx: f32,
    xs: f32,
    ss: f32,
}

/// A scale nearer to `lossless`, with which values are as large on the whole as the exact ones. Where they are smaller
/// by more than a fifth, this is not for want of size.
fn restored(scale: f32, lossless: f32) -> f32 {
    scale + RESTORED * (lossless.clamp(scale, 1.25 * scale) - scale)
}

/// The magnitudes of values and their signs. Where the number of negative ones must be even, the value that matters
/// least gets the wrong sign, and its magnitude is negative.
fn sizes(values: &[f32; SUPER], weights: &[f32; SUPER], signs: Signs) -> ([f32; SUPER], [u8; SUPER / SIGNED]) {
    let mut sizes = values.map(f32::abs);
    let mut bytes = [0; SUPER / SIGNED];
    for (c, byte) in bytes.iter_mut().enumerate() {
        let cell = c * SIGNED..(c + 1) * SIGNED;
        *byte = values[cell.clone()].iter().enumerate().fold(0, |bits, (i, v)| bits | u8::from(*v < 0.0) << i);
        if signs == Signs::Even && byte.count_ones() % 2 == 1 {
            let cost = |i: &usize| weights[*i] * sizes[*i];
            let least = cell.min_by(|a, b| cost(a).total_cmp(&cost(b))).expect("a cell has values");
            *byte ^= 1 << (least % SIGNED);
            sizes[least] = -sizes[least];
        }
    }
    (sizes, bytes)
}

/// The best scale of a group if every combination of levels were an entry. Values that are nearly the same are all at
/// the lowest level, which is an entry of every book.
fn first_scale(group: Group, levels: &[f32]) -> f32 {
    let (lowest, highest) = (levels[0], levels[levels.len() - 1]);
    let [w, wx, wxx] = group.sums(|x, w| [w, w * x, w * x * x]);
    if wx * wx > (1.0 - SAME) * w * wxx {
        return wx / w / lowest;
    }
    let step = |v: f32, pair: &[f32]| if v > (pair[0] + pair[1]) / 2.0 { pair[1] - pair[0] } else { 0.0 };
    let nearest = |v: f32| levels.windows(2).fold(lowest, |level, pair| level + step(v, pair));
    let most = group.values.iter().fold(0.0, |most: f32, v| most.max(*v));
    let inverses = (0..16).map(|i| highest * (1.2 - 0.05 * i as f32) * inverse(most));
    search::scale(group, inverses, nearest)
}
