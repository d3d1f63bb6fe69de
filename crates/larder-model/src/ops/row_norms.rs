//! The norms of one row.

/// `row / sqrt(mean(row²) + eps) · weight`
pub(crate) fn rms_row(row: &mut [f32], weight: &[f32], eps: f64) {
    scale(row, eps);
    row.iter_mut().zip(weight).for_each(|(x, w)| *x *= w);
}

/// `(row - mean(row)) / sqrt(variance(row) + eps) · weight + bias`
pub(crate) fn layer_norm_row(row: &mut [f32], weight: &[f32], bias: &[f32], eps: f64) {
    let mean = sum(row.iter().copied()) / row.len() as f32;
    row.iter_mut().for_each(|x| *x -= mean);
    scale(row, eps);
    row.iter_mut().zip(weight.iter().zip(bias)).for_each(|(x, (w, b))| *x = *x * w + b);
}

/// `row / sqrt(mean(row²) + eps)`
pub(crate) fn scale(row: &mut [f32], eps: f64) {
    let mean = sum(row.iter().map(|x| x * x)) as f64 / row.len() as f64;
    let scale = (1.0 / (mean + eps).sqrt()) as f32;
    row.iter_mut().for_each(|x| *x *= scale);
}

/// Sums in eight interleaved lanes, which is faster and more exact than a single running sum.
pub(crate) fn sum(values: impl ExactSizeIterator<Item = f32>) -> f32 {
    let mut lanes = [0.0f32; 8];
    values.enumerate().for_each(|(i, v)| lanes[i % 8] += v);
    lanes.iter().sum()
}
