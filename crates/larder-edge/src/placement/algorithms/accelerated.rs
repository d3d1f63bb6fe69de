//! The knapsack by size of experts: Algorithm 3 of the paper. Of experts of one size the most valuable ones are taken,
//! so the sums of their values are a concave sequence. A concave sequence is combined with any other by comparing few
//! of their pairs.

use std::collections::BTreeMap;

use super::grid::Grid;
use super::successive::Item;

/// Chooses items by dynamic programming over sizes and capacity.
pub(super) fn solve(items: &[Item], capacity: u64) -> Vec<usize> {
    let sizes: Vec<u64> = items.iter().map(|item| item.bytes).collect();
    let grid = Grid::new(&sizes, capacity);
    let mut classes: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
    items.iter().enumerate().for_each(|(at, item)| classes.entry(grid.units(item.bytes)).or_default().push(at));
    let mut best = vec![0.0; grid.capacity + 1];
    let mut steps = Vec::new();
    for (size, mut class) in classes {
        class.sort_by(|a, b| items[*b].value.total_cmp(&items[*a].value));
        let sums = std::iter::once(0.0).chain(class.iter().scan(0.0, |sum, at| {
            *sum += items[*at].value;
            Some(*sum)
        }));
        let taken = join(&mut best, &sums.collect::<Vec<f64>>(), size);
        steps.push((size, class, taken));
    }
    let mut chosen = Vec::new();
    let mut q = grid.capacity;
    for (size, class, taken) in steps.into_iter().rev() {
        let count = taken[q] as usize;
        chosen.extend(&class[..count]);
        q -= count * size;
    }
    chosen.sort_unstable();
    chosen
}

/// `best[q]` becomes the greatest `best[q - l * size] + sums[l]`; returned is that l for each q.
fn join(best: &mut [f64], sums: &[f64], size: usize) -> Vec<u32> {
    let mut taken = vec![0; best.len()];
    for start in 0..size.min(best.len()) {
        let before: Vec<f64> = best[start..].iter().step_by(size).copied().collect();
        let pairs = Pairs { before: &before, sums };
        pairs.find(0..before.len(), 0..before.len(), &mut |at, from| {
            let cell = start + at * size;
            best[cell] = pairs.value(at, from);
            taken[cell] = (at - from).min(sums.len() - 1) as u32;
        });
    }
    taken
}

/// The value of every cell, reached from every earlier cell.
struct Pairs<'a> {
    before: &'a [f64],
    sums: &'a [f64],
}

impl Pairs<'_> {
    /// Capacity beyond the last expert stays empty.
    fn value(&self, at: usize, from: usize) -> f64 {
        self.before[from] + self.sums[(at - from).min(self.sums.len() - 1)]
    }

    /// Finds the best origin of each cell in `cells`. Since the sums are concave, a later cell's best origin is never
    /// before that of an earlier one: the middle cell's origin bounds the search on both sides.
    fn find(
        &self,
        cells: std::ops::Range<usize>,
        origins: std::ops::Range<usize>,
        found: &mut impl FnMut(usize, usize),
    ) {
        if cells.is_empty() {
            return;
        }
        let middle = cells.start + cells.len() / 2;
        let mut best = origins.start;
        for from in origins.start..origins.end.min(middle + 1) {
            if self.value(middle, from) > self.value(middle, best) {
                best = from;
            }
        }
        found(middle, best);
        self.find(cells.start..middle, origins.start..best + 1, found);
        self.find(middle + 1..cells.end, best..origins.end, found);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::dp;
    use super::*;

    fn value(items: &[Item], chosen: &[usize]) -> f64 {
        chosen.iter().map(|at| items[*at].value).sum()
    }

    fn bytes(items: &[Item], chosen: &[usize]) -> u64 {
        chosen.iter().map(|at| items[*at].bytes).sum()
    }

    #[test]
    fn the_best_pair_is_not_the_densest_expert() {
        let item = |bytes, value| Item { bytes, value };
        let items = [item(6, 7.0), item(5, 5.0), item(5, 5.5)];
        for solve in [solve, dp::solve] {
            assert_eq!(solve(&items, 10), [1, 2]);
            assert_eq!(solve(&items, 9), [0]);
            assert_eq!(solve(&items, 16), [0, 1, 2]);
            assert_eq!(solve(&items, 4), [0; 0]);
            assert_eq!(solve(&[], 4), [0; 0]);
        }
    }

    proptest! {
        #[test]
        fn both_solvers_reach_the_optimum(
            items in prop::collection::vec((1u64..7, 1u32..100), 0..11),
            capacity in 0u64..40,
        ) {
            let items: Vec<Item> =
                items.into_iter().map(|(bytes, value)| Item { bytes: 3 * bytes, value: f64::from(value) }).collect();
            let subset = |bits: u32| (0..items.len()).filter(move |at| bits >> at & 1 == 1).collect::<Vec<_>>();
            let best = (0..1u32 << items.len())
                .map(subset)
                .filter(|chosen| bytes(&items, chosen) <= capacity)
                .map(|chosen| value(&items, &chosen))
                .fold(0.0, f64::max);
            for solve in [solve, dp::solve] {
                let chosen = solve(&items, capacity);
                prop_assert!(bytes(&items, &chosen) <= capacity);
                prop_assert_eq!(value(&items, &chosen), best);
            }
        }
    }
}
