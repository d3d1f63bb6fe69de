//! Item sizes in units that keep knapsack tables small.

/// Sizes and capacity in a common unit; a knapsack table has one cell per unit of capacity.
pub(super) struct Grid {
    /// Bytes of the unit.
    unit: u64,
    /// Capacity in units.
    pub capacity: usize,
}

/// Most cells of a table, over all items.
const CELLS: u64 = 1 << 28;

impl Grid {
    /// The largest unit in which all sizes are whole, unless the table would have too many cells: then a larger one, to
    /// which sizes are rounded up, so that what fits there also fits in bytes.
    pub fn new(sizes: &[u64], capacity: u64) -> Self {
        // Capacity beyond the sum of all sizes is never used.
        let capacity = capacity.min(sizes.iter().fold(0, |sum: u64, size| sum.saturating_add(*size)));
        let count = sizes.len() as u64;
        let common = sizes.iter().copied().fold(0, gcd).max(1);
        let coarse = (capacity / CELLS + 1).saturating_mul(count);
        let unit = if (capacity / common).saturating_mul(count) > CELLS { coarse } else { common };
        Grid { unit, capacity: (capacity / unit) as usize }
    }

    /// A size in units, rounded up.
    pub fn units(&self, bytes: u64) -> usize {
        bytes.div_ceil(self.unit) as usize
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    match b {
        0 => a,
        _ => gcd(b, a % b),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_divide_sizes_or_round_them_up() {
        let grid = Grid::new(&[6, 9, 9], 25);
        assert_eq!((grid.capacity, grid.units(6), grid.units(9)), (8, 2, 3));
        assert_eq!(Grid::new(&[6, 9], 1 << 60).capacity, 5);
        let sizes = [1_000_003, 1_000_033];
        let grid = Grid::new(&sizes.repeat(500), 999_999_999);
        assert!(grid.capacity as u64 * 1000 <= 2 * CELLS && grid.units(1_000_003) as u64 * grid.unit >= 1_000_003);
    }
}
