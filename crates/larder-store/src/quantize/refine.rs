//! Improves the scales of a block all together, where columns matter differently.
//!
//! Scales that are best for each group by itself lose when they are rounded to integers with a common scale: a group
//! that matters little may decide about that scale. So here the integers of each group are moved, and the common scales
//! are replaced by the best ones for all integers, as long as the error of the whole block falls.

use half::f16;

use super::search::Group;

/// Rounds of moving integers and of replacing the common scales.
const ROUNDS: usize = 4;

/// The scales of a block: a value is its level times the integer scale of its group times `d`, less the integer minimum
/// of the group times `dmin`.
#[derive(Clone, Copy)]
pub struct BlockScales<const GROUPS: usize> {
    pub d: f32,
    pub dmin: f32,
    /// For each group, its integer scale and minimum.
    pub groups: [(f32, f32); GROUPS],
}

/// Bounds of integers, and the level that is nearest to a value.
pub struct CodeRange<N> {
    pub scales: (f32, f32),
    pub minima: (f32, f32),
    pub nearest: N,
}

impl<const GROUPS: usize> BlockScales<GROUPS> {
    /// These scales, or better ones.
    pub fn refined<N: Fn(f32) -> f32>(
        self,
        values: &[f32],
        weights: &[f32],
        range: &CodeRange<N>,
    ) -> BlockScales<GROUPS> {
        let groups = || Group::all_of(values, weights, values.len() / GROUPS);
        let error = |scales: &Self| -> f32 {
            groups().zip(scales.groups).map(|(group, of)| scales.error(group, of, &range.nearest)).sum()
        };
        let (mut best, mut least) = (self, error(&self));
        for _ in 0..ROUNDS {
            let mut next = best;
            for (group, of) in groups().zip(&mut next.groups) {
                *of = best.moved(group, *of, range);
            }
            next.replace_common(groups(), &range.nearest);
            let error = error(&next);
            // Not less if it is no number.
            if error.is_nan() || error >= least {
                break;
            }
            (best, least) = (next, error);
        }
        best
    }

    /// The weighted error of a group with these integers.
    fn error(&self, group: Group, (scale, min): (f32, f32), nearest: impl Fn(f32) -> f32) -> f32 {
        let (scale, low) = (self.d * scale, self.dmin * min);
        let inverse = super::search::inverse(scale);
        let [error] = group.sums(|x, w| {
            let off = x + low - scale * nearest((x + low) * inverse);
            [w * off * off]
        });
        error
    }

    /// The best integers of a group at most one from these.
    fn moved<N: Fn(f32) -> f32>(&self, group: Group, of: (f32, f32), range: &CodeRange<N>) -> (f32, f32) {
        let (mut best, mut least) = (of, self.error(group, of, &range.nearest));
        for (scale, min) in
            [(-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0), (-1.0, -1.0), (1.0, 1.0), (-1.0, 1.0), (1.0, -1.0)]
        {
            let tried = (of.0 + scale, of.1 + min);
            let within = |value: f32, (least, most): (f32, f32)| value >= least && value <= most;
            if !within(tried.0, range.scales) || !within(tried.1, range.minima) {
                continue;
            }
            let error = self.error(group, tried, &range.nearest);
            if error < least {
                (best, least) = (tried, error);
            }
        }
        best
    }

    /// Replaces the common scales by the best ones for the integers and the levels that they lead to.
    fn replace_common<'a>(&mut self, groups: impl Iterator<Item = Group<'a>>, nearest: impl Fn(f32) -> f32) {
        let mut all = [0.0f32; 5];
        for (group, (scale, min)) in groups.zip(self.groups) {
            let (inverse, low) = (super::search::inverse(self.d * scale), self.dmin * min);
            let [ss, s, w, xs, x] = group.sums(|x, w| {
                let level = scale * nearest((x + low) * inverse);
                [w * level * level, w * level, w, w * x * level, w * x]
            });
            let sums = [ss, s * min, w * min * min, xs, x * min];
            all.iter_mut().zip(sums).for_each(|(all, sum)| *all += sum);
        }
        let [ss, sm, mm, xs, xm] = all;
        let determinant = ss * mm - sm * sm;
        let (d, dmin) = match determinant > 1e-6 * ss * mm {
            true => ((xs * mm - xm * sm) / determinant, (xs * sm - xm * ss) / determinant),
            false if ss > 0.0 => ((xs + self.dmin * sm) / ss, self.dmin),
            false => return,
        };
        let half = |value: f32| f16::from_f32(value).to_f32();
        if d.is_finite() && dmin >= 0.0 {
            (self.d, self.dmin) = (half(d), half(dmin));
        }
    }
}
