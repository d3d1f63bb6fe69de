//! The best values of a row, as a device returns them.

use crate::device::BEST_FOUND;

/// A row of the result of [`DeviceOps::find_best`](crate::DeviceOps::find_best).
pub fn best_of(row: &[f32], best: usize) -> Vec<f32> {
    let rank = |value: f32| if value.is_nan() { f32::INFINITY } else { value };
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| rank(row[*b]).total_cmp(&rank(row[*a])));
    let least = rank(row[order[best - 1]]);
    order.retain(|id| rank(row[*id]) >= least);
    let mut found = vec![f32::from_bits(order.len() as u32)];
    order.iter().take(BEST_FOUND).for_each(|id| found.extend([f32::from_bits(*id as u32), row[*id]]));
    found.resize(1 + 2 * BEST_FOUND, 0.0);
    found
}
