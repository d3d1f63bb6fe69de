//! The knapsack, expert by expert: Algorithm 2 of the paper.

use super::grid::Grid;
use super::successive::Item;

/// Chooses items by dynamic programming over items and capacity.
pub(super) fn solve(items: &[Item], capacity: u64) -> Vec<usize> {
    let sizes: Vec<u64> = items.iter().map(|item| item.bytes).collect();
    let grid = Grid::new(&sizes, capacity);
    let mut best = vec![0.0; grid.capacity + 1];
    let words = (grid.capacity + 1).div_ceil(64);
    let mut taken = vec![0u64; words * items.len()];
    for (item, taken) in items.iter().zip(taken.chunks_exact_mut(words)) {
        let size = grid.units(item.bytes);
        // In descending order, so that the cells read do not include this item yet.
        for q in (size..=grid.capacity).rev() {
            let with = best[q - size] + item.value;
            if with > best[q] {
                best[q] = with;
                taken[q / 64] |= 1 << (q % 64);
            }
        }
    }
    let mut chosen = Vec::new();
    let mut q = grid.capacity;
    for (at, taken) in taken.chunks_exact(words).enumerate().rev() {
        if taken[q / 64] >> (q % 64) & 1 == 1 {
            chosen.push(at);
            q -= grid.units(items[at].bytes);
        }
    }
    chosen.reverse();
    chosen
}
